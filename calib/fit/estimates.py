"""Times with their uncertainty and provenance: what every fitted model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator


class Source(Enum):
    """Where an estimate comes from, best first."""

    MEASURED = "measured"
    """The same operator and shape was measured on this run."""
    FITTED = "fitted"
    """Inside the range of shapes that were measured."""
    EXTRAPOLATED = "extrapolated"
    """Outside that range: the law carries it."""
    PRIOR = "prior"
    """No sample of this kind: public data or a ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """One entry per queried operator or collective."""

    time_s: NDArray[np.float64]
    """Median estimates, shape ``(n,)``."""
    sigma_log: NDArray[np.float64]
    """Standard deviation of log time, shape ``(n,)``."""
    sources: tuple[Source, ...]


class Estimator(Protocol):
    """What the timeline asks of a calibration."""

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Time of each operator on this machine."""
        ...

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Transfer time of each collective, without waiting for late ranks."""
        ...
