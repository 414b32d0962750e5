"""Inputs and results of a search, and the proof of optimality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..memory import FITS_PROBABILITY, OVERHEAD_SIGMA_FRAC, RESERVE_FRAC, SIGMA_FRAC
from ..workload import Encoded, RunConfig

Floats = NDArray[np.float64]
TOP = 20
"""Default number of best layouts."""
NUM_LACKING = 5
"""Number of reported layouts that do not fit."""
_SURE = NormalDist().inv_cdf(FITS_PROBABILITY)
"""Deviations of memory by which a layout has to stay below the capacity."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effort:
    """Extent of a search, and callbacks to stop it and to report progress."""

    top: int = TOP
    is_stopped: Callable[[], bool] = lambda: False
    """Called between rounds; if it returns True, the result is the best so far."""
    on_progress: Callable[[str, float], None] = lambda _what, _frac: None
    """Called with the phase of the search and the share of it that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of a device, and the measured memory peak minus its estimate."""

    capacity_nbytes: int | None = None
    offset_nbytes: int = 0
    is_sure: bool = False
    """True if tight layouts count as not fitting."""

    def holds(self, allocated_nbytes: Floats, overhead_nbytes: Floats) -> NDArray[np.bool_]:
        """Return True for layouts likelier to fit than not, or surely fitting, by the rule of
        ``fit_probability``."""
        if self.capacity_nbytes is None:
            return np.ones(np.shape(allocated_nbytes), dtype=bool)
        allocated = (1 + RESERVE_FRAC) * (allocated_nbytes + self.offset_nbytes)
        sigma = np.hypot(SIGMA_FRAC * allocated_nbytes, OVERHEAD_SIGMA_FRAC * overhead_nbytes)
        margin = _SURE * sigma if self.is_sure else 0.0
        return allocated + overhead_nbytes + margin <= self.capacity_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The best variant of one row."""

    config: RunConfig
    time_s: float
    """Median step time."""
    order: int
    """Tie-breaker of equal times; the lower comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """A layout that does not fit."""

    config: RunConfig
    needed_nbytes: float


@dataclass(slots=True)
class Tally:
    """Layouts of a space by outcome; each counts once."""

    over_memory: int = 0
    bounded: int = 0
    """Layouts that a bound excludes from the best."""
    dominated: int = 0
    """Layouts of whose cell another variant recomputes less, and fits."""
    not_asked: int = 0
    """Layouts that the constraint excludes."""
    evaluated: int = 0

    def add(self, other: Tally) -> None:
        """Merge another tally into this one."""
        for name in Tally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_layouts(self) -> int:
        """Number of all layouts."""
        return sum(getattr(self, name) for name in Tally.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Encoded):
    """Proof of optimality of a search result."""

    JSON: ClassVar[str] = (
        "num_layouts=tally.num_layouts num_asked=num_layouts **tally cut_by_rules=cut "
        "is_proven gap_frac"
    )

    num_cells: int
    """Number of splits of the ranks, each with its variants."""
    tally: Tally
    cut: Mapping[str, int] = field(default_factory=dict)
    """Combinations of degrees that each of Megatron's rules excludes; not in the tally."""
    num_requested: int | None = None
    """Number of layouts in the tally that satisfy the constraint; None without a constraint."""
    gap_frac: float = 0.0
    """Upper bound on how much faster an unevaluated layout may be; 0 if proven."""

    @property
    def is_proven(self) -> bool:
        """True if no unevaluated layout can be among the best."""
        return self.gap_frac == 0.0

    @property
    def num_layouts(self) -> int:
        """Number of layouts among which the best were chosen."""
        return self.tally.num_layouts if self.num_requested is None else self.num_requested

    @property
    def text(self) -> str:
        """Summary for the user; layouts count by the first reason that excludes them."""
        tally, begin = self.tally, f"{self.tally.num_layouts:,}"
        if self.num_requested is None:
            begin += " layouts"
        else:
            begin = f"{self.num_requested:,} layouts ({begin} with their variants)"
        words = [
            begin,
            f"{tally.over_memory:,} over memory",
            f"{tally.bounded:,} excluded by a lower bound on their time",
            f"{tally.dominated:,} dominated by one that recomputes less",
            f"{tally.evaluated:,} evaluated",
        ]
        if tally.not_asked:
            words.insert(-1, f"{tally.not_asked:,} not among them")
        end = "proven" if self.is_proven else f"not proven: up to {self.gap_frac:.0%} may remain"
        return f"{', '.join(words)}; {end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best layouts, fastest first, some that do not fit, and the proof."""

    best: tuple[Ranked, ...]
    lacking: tuple[RunConfig, ...]
    """Layouts that do not fit, least lacking first."""
    proof: Proof

    @property
    def layouts(self) -> tuple[RunConfig, ...]:
        """The best and the lacking layouts, without duplicates."""
        return tuple(dict.fromkeys((*(one.config for one in self.best), *self.lacking)))
