"""The remaining time of a run as a distribution: work, and failures in addition.

Standard library only, but for runs that fail; SciPy is slow to import.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from statistics import NormalDist

# Total probability of larger numbers of failures; far below the precision that any rule needs.
_NEGLIGIBLE = 1e-9
# No run has more; components overlap long before, and each adds a term to every quantile.
_MAX_FAILURES = 400
_SQRT_2 = math.sqrt(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a run as a Poisson process, and the cost of one."""

    mtbf_s: float
    """Mean time between failures of the whole job, seconds."""
    restart_s: float
    """Seconds from the failure until training resumes."""
    save_every_s: float = 0.0
    """Time between checkpoints; work since the last one is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingTime:
    """Remaining time as a mixture of normal distributions, one for each number of failures;
    empty if it is not known, as in a forecast that was read from a file: its values are NaN.

    >>> remaining = RemainingTime.normal(100.0, 10.0)
    >>> round(remaining.quantile(0.95), 1), round(remaining.chance_beyond(100.0), 2)
    (116.4, 0.5)
    """

    weights: tuple[float, ...] = ()
    means_s: tuple[float, ...] = ()
    sigmas_s: tuple[float, ...] = ()

    @staticmethod
    def normal(mean_s: float, sigma_s: float) -> RemainingTime:
        """Return the distribution without failures."""
        return RemainingTime(weights=(1.0,), means_s=(mean_s,), sigmas_s=(max(sigma_s, 0.0),))

    @staticmethod
    def with_failures(mean_s: float, sigma_s: float, failures: Failures) -> RemainingTime:
        """Return the distribution of work of ``mean_s`` +- ``sigma_s`` with random failures.

        The number of failures is Poisson with mean ``mean_s / mtbf_s`` (failures during repeated
        work are second-order and neglected); each costs a restart and the lost work.
        """
        # Slow to import, and only failures need them.
        import numpy as np
        from scipy import stats

        expected = mean_s / failures.mtbf_s
        last = min(_MAX_FAILURES, int(stats.poisson.ppf(1.0 - _NEGLIGIBLE, expected)))
        counts = np.arange(last + 1)
        chances = stats.poisson.pmf(counts, expected)
        chances /= chances.sum()
        # Lost work is uniform from 0 to the time between checkpoints.
        means = mean_s + counts * (failures.restart_s + 0.5 * failures.save_every_s)
        sigmas = np.sqrt(sigma_s**2 + counts * (failures.save_every_s**2 / 12.0))
        return RemainingTime(
            weights=tuple(chances.tolist()),
            means_s=tuple(means.tolist()),
            sigmas_s=tuple(sigmas.tolist()),
        )

    @property
    def mean_s(self) -> float:
        """Expected time, seconds."""
        if not self.weights:
            return math.nan
        return math.fsum(map(operator.mul, self.weights, self.means_s))

    def chance_beyond(self, time_s: float) -> float:
        """Return P(remaining time > ``time_s``)."""
        if not self.weights:
            return math.nan
        parts = zip(self.weights, self.means_s, self.sigmas_s, strict=True)
        return math.fsum(
            weight * (0.5 * math.erfc((time_s - mean_s) / (sigma_s * _SQRT_2)))
            if sigma_s > 0
            else weight * (time_s < mean_s)
            for weight, mean_s, sigma_s in parts
        )

    def quantile(self, level: float) -> float:
        """Return the time that is not exceeded with probability ``level``; at least 0."""
        if not self.weights:
            return math.nan
        if len(self.weights) == 1:
            return max(0.0, self.means_s[0] + self.sigmas_s[0] * NormalDist().inv_cdf(level))
        from scipy import optimize  # slow to import, and only failures need it

        # A normal distribution has 2e-33 beyond twelve standard deviations: the root is inside.
        parts = [*zip(self.means_s, self.sigmas_s, strict=True)]
        low = min(mean_s - 12.0 * sigma_s for mean_s, sigma_s in parts) - 1e-9
        high = max(mean_s + 12.0 * sigma_s for mean_s, sigma_s in parts) + 1e-9
        solution = optimize.root_scalar(
            lambda time_s: 1.0 - self.chance_beyond(time_s) - level, bracket=(low, high)
        )
        return max(0.0, float(solution.root))

    def nodes(self, count: int = 128) -> list[float]:
        """Return times at the midpoints of ``count`` equally likely parts, for quadrature."""
        return [self.quantile((place + 0.5) / count) for place in range(count)]


def learned_mtbf_s(num_failures: int, run_s: float, *, prior_mtbf_s: float) -> float:
    """Return the mean time between failures after ``num_failures`` in ``run_s`` seconds of a job.

    Inverse of the posterior mean of the rate under a gamma prior worth one failure; never infinite,
    as a run without failures so far proves little.

    >>> learned_mtbf_s(0, 0.0, prior_mtbf_s=3600.0)
    3600.0
    """
    # Gamma prior and Poisson counts: shape and rate add up.
    return (prior_mtbf_s + max(run_s, 0.0)) / (1.0 + num_failures)
