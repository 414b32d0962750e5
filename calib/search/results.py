"""Inputs and results of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ..memory.peak import (
    FITS_PROBABILITY,
    OVERHEAD_SIGMA_FRAC,
    RESERVE_FRAC,
    SIGMA_FRAC,
    MemoryEstimate,
    Verdict,
    fit_probability,
    memory,
    memory_with_offset,
    verdict,
)
from ..plain_json import JsonObject
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encoded

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
    offset_nbytes: int | None = None
    """None if no peak was measured."""
    is_sure: bool = False
    """True if tight layouts count as not fitting."""

    def holds(self, allocated_nbytes: Floats, overhead_nbytes: Floats) -> NDArray[np.bool_]:
        """Return True for layouts likelier to fit than not, or surely fitting, by the rule of
        ``fit_probability``."""
        if self.capacity_nbytes is None:
            return np.ones(np.shape(allocated_nbytes), dtype=bool)
        allocated = (1 + RESERVE_FRAC) * (allocated_nbytes + (self.offset_nbytes or 0))
        sigma = np.hypot(SIGMA_FRAC * allocated_nbytes, OVERHEAD_SIGMA_FRAC * overhead_nbytes)
        margin = _SURE * sigma if self.is_sure else 0.0
        return allocated + overhead_nbytes + margin <= self.capacity_nbytes

    def needed(self, config: RunConfig, measured: RunConfig) -> MemoryEstimate:
        """Return the peak memory of a layout; the offset is that of layout ``measured``."""
        if self.offset_nbytes is None:
            return memory(config)
        return memory_with_offset(config, measured, self.offset_nbytes)

    def verdict(self, needed: MemoryEstimate) -> Verdict:
        """Return the verdict on an estimate of ``needed``; ``UNKNOWN`` without a capacity."""
        return verdict(needed, self.capacity_nbytes, is_calibrated=self.offset_nbytes is not None)

    def fit_probability(self, needed: MemoryEstimate) -> float | None:
        """Return the probability that the layout runs, in 0..1; None without a capacity."""
        if not self.capacity_nbytes:
            return None
        return fit_probability(
            needed, self.capacity_nbytes, is_calibrated=self.offset_nbytes is not None
        )


ANY_MEMORY = MemoryBudget()
"""Memory of an unknown device, on which all layouts count as fitting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The best variant of one row."""

    config: RunConfig
    time_s: float
    """Median step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Encoded):
    """Number of layouts that a search tried, by outcome; each counts once."""

    num_cells: int
    """Splits of the ranks, each with its variants."""
    num_layouts: int
    over_memory: int
    """Layouts that do not fit, as far as they are not slower."""
    evaluated: int
    """Layouts whose step was computed."""
    not_tried: int = 0
    """Layouts that were left when the search was stopped."""
    cut: Mapping[str, int] = field(default_factory=dict)
    """Combinations of degrees that each of Megatron's rules excludes; not among the layouts."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            num_layouts=self.num_layouts,
            over_memory=self.over_memory,
            slower=self.slower,
            evaluated=self.evaluated,
            not_tried=self.not_tried,
            cut_by_rules=self.cut,
        )

    @property
    def slower(self) -> int:
        """Layouts whose passes alone take longer than the step of each of the best, or that
        recompute more than another of their split that fits."""
        return self.num_layouts - self.over_memory - self.evaluated - self.not_tried

    @property
    def text(self) -> str:
        """Summary for the user."""
        words = [
            f"{self.num_layouts:,} layout{'s' * (self.num_layouts != 1)}",
            f"{self.over_memory:,} over memory",
            f"{self.slower:,} surely slower",
            f"{self.evaluated:,} evaluated",
        ]
        if self.not_tried:
            words.append(f"stopped before {self.not_tried:,} were tried")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best layouts, fastest first, some that do not fit, and how many were tried."""

    best: tuple[Ranked, ...]
    lacking: tuple[RunConfig, ...]
    """Layouts that do not fit, least lacking first."""
    tried: Tried

    @property
    def layouts(self) -> tuple[RunConfig, ...]:
        """The best and the lacking layouts, without duplicates."""
        return tuple(dict.fromkeys((*(one.config for one in self.best), *self.lacking)))
