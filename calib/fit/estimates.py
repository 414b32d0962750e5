"""Times with their uncertainty and provenance: what every fitted model answers."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..regressors.intervals import Z_90
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator


class Source(Enum):
    """Where an estimate comes from, best first."""

    MEASURED = "measured"
    """The same operator and shape was measured on this run."""
    PROBED = "probed"
    """The same operator and shape was measured beside this run, between two steps."""
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

    @staticmethod
    def of_parts(number: int, parts: Iterable[tuple[Sequence[int], Estimates]]) -> Estimates:
        """One estimate for each of ``number`` items, from those of some of their places each."""
        time_s, sigma_log = np.zeros((2, number))
        sources = [Source.PRIOR] * number
        for places, found in parts:
            time_s[places], sigma_log[places] = found.time_s, found.sigma_log
            for place, source in zip(places, found.sources, strict=True):
                sources[place] = source
        return Estimates(time_s=time_s, sigma_log=sigma_log, sources=tuple(sources))


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Several estimates one after the other."""

    time_s: float
    low_s: float
    high_s: float
    """Ends of the 90 % interval."""


def total(
    estimates: Estimates, families: Sequence[Hashable], counts: NDArray[np.int64] | None = None
) -> Total:
    """The sum of estimates, each ``counts`` times (once where None).

    Errors of one family go together and add up: what a law or a ceiling has wrong for one of its
    operators it has wrong for all, and repeats of one operator share its error.  Families err on
    their own and add in quadrature.

    >>> two = Estimates(time_s=np.array([1.0, 1.0]), sigma_log=np.array([0.1, 0.1]),
    ...                 sources=(Source.FITTED, Source.FITTED))
    >>> [round(total(two, names).high_s, 3) for names in (("a", "a"), ("a", "b"))]
    [2.358, 2.247]
    """
    times = estimates.time_s * (np.ones(len(families)) if counts is None else counts)
    shares: dict[Hashable, float] = {}
    for name, error_s in zip(families, times * estimates.sigma_log, strict=True):
        shares[name] = shares.get(name, 0.0) + float(error_s)
    time_s = float(times.sum())
    sigma_log = float(np.sqrt(sum(s**2 for s in shares.values()))) / time_s if time_s else 0.0
    return Total(
        time_s=time_s,
        low_s=time_s * float(np.exp(-Z_90 * sigma_log)),
        high_s=time_s * float(np.exp(Z_90 * sigma_log)),
    )


class Estimator(Protocol):
    """What the timeline asks of a calibration."""

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Time of each operator on this machine."""
        ...

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Transfer time of each collective, without waiting for late ranks."""
        ...
