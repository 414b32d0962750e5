"""Times with their uncertainty and provenance, as every fitted model returns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator


class Source(Enum):
    """Provenance of an estimate, best first."""

    MEASURED = "measured"
    """The same operator and shape was measured on this run."""
    PROBED = "probed"
    """The same operator and shape was timed on purpose, between two steps."""
    FITTED = "fitted"
    """Inside the range of shapes that were measured."""
    EXTRAPOLATED = "extrapolated"
    """Outside that range: extrapolated by the law."""
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
    is_rescaled: NDArray[np.bool_] | None = None
    """True where the same operator was measured on this run at another number of rows, shape
    ``(n,)``; None if nowhere."""

    @staticmethod
    def alike(
        time_s: NDArray[np.float64], sigma_log: float | NDArray[np.float64], source: Source
    ) -> Estimates:
        """Return times of one provenance, with a deviation in common or one each."""
        number = len(time_s)
        sigmas = np.zeros(number) + sigma_log
        return Estimates(time_s=time_s, sigma_log=sigmas, sources=(source,) * number)

    @staticmethod
    def of_parts(number: int, parts: Iterable[tuple[Sequence[int], Estimates]]) -> Estimates:
        """Assemble the estimates of ``number`` items from parts, each with the positions of its
        items."""
        time_s, sigma_log = np.zeros((2, number))
        sources = [Source.PRIOR] * number
        is_rescaled = np.zeros(number, dtype=np.bool_)
        for places, part in parts:
            time_s[places], sigma_log[places] = part.time_s, part.sigma_log
            is_rescaled[places] = part.is_rescaled if part.is_rescaled is not None else False
            for place, source in zip(places, part.sources, strict=True):
                sources[place] = source
        return Estimates(
            time_s=time_s, sigma_log=sigma_log, sources=tuple(sources), is_rescaled=is_rescaled
        )

    def as_extrapolated(self) -> Estimates:
        """Return these estimates for a device on which nothing was timed: at best extrapolated."""
        least = Source.EXTRAPOLATED
        return replace(
            self, sources=tuple(one if one is Source.PRIOR else least for one in self.sources)
        )


class Estimator(Protocol):
    """Interface of a calibration that the timeline uses."""

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Return the time of each operator on this machine."""
        ...

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Return the transfer time of each collective, without waiting for late ranks."""
        ...
