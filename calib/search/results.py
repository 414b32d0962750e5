"""What a search is given, what it finds, and how far that is proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..memory import RESERVE_FRAC
from ..workload import Encoded, RunConfig

Floats = NDArray[np.float64]
TOP = 20
"""Layouts that are proven to be the best where nobody asks for another number."""
NUM_LACKING = 5
"""Layouts told of that do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Effort:
    """How much a search is asked for, who may stop it and who hears of it."""

    top: int = TOP
    is_stopped: Callable[[], bool] = lambda: False
    """Asked between rounds: then the answer is the best so far."""
    on_progress: Callable[[str, float], None] = lambda _what, _frac: None
    """Hears what is done and which share of it is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Memory of a device, and what its measured peak had beyond the estimate."""

    capacity_nbytes: int | None = None
    offset_nbytes: int = 0

    def holds(self, allocated_nbytes: Floats, overhead_nbytes: Floats) -> NDArray[np.bool_]:
        """Whether layouts are likelier to fit than not: the rule of ``fit_probability``."""
        if self.capacity_nbytes is None:
            return np.ones(np.shape(allocated_nbytes), dtype=bool)
        allocated = (1 + RESERVE_FRAC) * (allocated_nbytes + self.offset_nbytes)
        return allocated + overhead_nbytes <= self.capacity_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The best variant of one row."""

    config: RunConfig
    time_s: float
    """Median step time."""
    order: int
    """Of two that take the same time the lower comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lacking:
    """A layout that does not fit."""

    config: RunConfig
    needed_nbytes: float


@dataclass(slots=True)
class Tally:
    """What became of the layouts of a space; each is in one of the five."""

    over_memory: int = 0
    bounded: int = 0
    """A bound says that they are not among the best."""
    dominated: int = 0
    """Another one of their cell computes less again, and fits."""
    not_asked: int = 0
    """Something else was to be kept."""
    evaluated: int = 0

    def add(self, other: Tally) -> None:
        """Counts those of another one too."""
        for name in Tally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def num_layouts(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in Tally.__slots__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Encoded):
    """How far an answer is proven."""

    JSON: ClassVar[str] = (
        "num_layouts=tally.num_layouts num_asked=num_layouts **tally cut_by_rules=cut "
        "is_proven gap_frac"
    )

    num_cells: int
    """Splits of the ranks, each with its variants."""
    tally: Tally
    cut: Mapping[str, int] = field(default_factory=dict)
    """Combinations of degrees that each of Megatron's rules left out; no layouts of the tally."""
    num_requested: int | None = None
    """Layouts of the tally that have what was to be kept; None where all were asked for."""
    gap_frac: float = 0.0
    """How much faster than the best found an unseen layout might be; 0 where it is proven."""

    @property
    def is_proven(self) -> bool:
        """True where no layout that was not evaluated can be among the best."""
        return self.gap_frac == 0.0

    @property
    def num_layouts(self) -> int:
        """How many layouts the best are the best of."""
        return self.tally.num_layouts if self.num_requested is None else self.num_requested

    @property
    def text(self) -> str:
        """What a user reads of it: layouts are counted by the first thing that is in their way."""
        tally, begin = self.tally, f"{self.tally.num_layouts:,}"
        if self.num_requested is None:
            begin += " layouts"
        else:
            begin = f"{self.num_requested:,} layouts asked for among {begin} of their splits"
        words = [
            begin,
            f"{tally.over_memory:,} over memory",
            f"{tally.bounded:,} slower by a lower bound on their time",
            f"{tally.dominated:,} beaten by one that recomputes less",
            f"{tally.evaluated:,} evaluated",
        ]
        if tally.not_asked:
            words.insert(-1, f"{tally.not_asked:,} more not asked for")
        end = "proven" if self.is_proven else f"not proven: up to {self.gap_frac:.0%} may be left"
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
        """Both, none twice."""
        return tuple(dict.fromkeys((*(one.config for one in self.best), *self.lacking)))
