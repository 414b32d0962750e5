"""A positive quantity that is known to within a factor: a time, a rate, or the ratio of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from .robust import Z_90


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A positive quantity whose logarithm is normally distributed.

    >>> one, other = (Estimate(median=m, error_log={"rate": 0.3}) for m in (3.0, 2.0))
    >>> round(one.low, 2), round(one.high, 2), round(one.below(3.0), 2), one.ratio_to(other).low
    (1.83, 4.91, 0.5, 1.5)
    """

    median: float
    error_log: Mapping[str, float] = field(default_factory=dict)
    """Change of the logarithm when one unknown is off by one deviation; the same name is the same
    unknown in every estimate of one model."""
    unshared_sigma_log: float = 0.0
    """Deviation of the logarithm that is specific to this quantity."""

    @property
    def sigma_log(self) -> float:
        """Deviation of the logarithm."""
        squares = sum(log**2 for log in self.error_log.values())
        return math.sqrt(squares + self.unshared_sigma_log**2)

    @property
    def low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.median * math.exp(-Z_90 * self.sigma_log)

    @property
    def high(self) -> float:
        """Upper end of the 90 % interval."""
        return self.median * math.exp(Z_90 * self.sigma_log)

    def below(self, value: float) -> float:
        """Return the probability that the quantity is below a positive value."""
        if not self.sigma_log:
            return float(self.median < value)
        return NormalDist(math.log(self.median), self.sigma_log).cdf(math.log(value))

    def ratio_to(self, other: Estimate, *, alike: float = 0.0) -> Estimate:
        """Return the quantity over another, without the errors that both share; ``alike`` is the
        correlation of their unshared ones."""
        names = sorted({*self.error_log, *other.error_log})
        ours, theirs = self.unshared_sigma_log, other.unshared_sigma_log
        variance = ours**2 + theirs**2 - 2 * alike * ours * theirs
        return Estimate(
            median=self.median / other.median,
            error_log={n: self.error_log.get(n, 0.0) - other.error_log.get(n, 0.0) for n in names},
            unshared_sigma_log=math.sqrt(max(0.0, variance)),
        )
