"""The distribution of the time left: steps, the work between them, and failures on top."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Floats = NDArray[np.float64]
# Probability of all larger numbers of failures together: far below what any rule asks for.
_NEGLIGIBLE = 1e-9
# More are no run; the normal parts overlap long before, and each costs a term of every quantile.
_MAX_FAILURES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of a run as a Poisson process, and what one of them costs."""

    mtbf_s: float
    """Mean time between failures of the whole job, seconds."""
    restart_s: float
    """From the failure until training goes on."""
    save_every_s: float = 0.0
    """Time between checkpoints: what was done since the last one is done again."""

    @property
    def mean_cost_s(self) -> float:
        """Restart plus half the time between checkpoints."""
        return self.restart_s + 0.5 * self.save_every_s

    @property
    def cost_variance_s2(self) -> float:
        """The lost work lies evenly between nothing and all since the last checkpoint."""
        return self.save_every_s**2 / 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """A mixture of normal distributions, one for each number of failures.

    >>> left = TimeLeft.normal(100.0, 10.0)
    >>> round(left.quantile(0.95), 1), round(left.chance_beyond(100.0), 2)
    (116.4, 0.5)
    """

    weights: tuple[float, ...]
    means_s: tuple[float, ...]
    sigmas_s: tuple[float, ...]

    @staticmethod
    def normal(mean_s: float, sigma_s: float) -> TimeLeft:
        """Without failures."""
        return TimeLeft(weights=(1.0,), means_s=(mean_s,), sigmas_s=(max(sigma_s, 0.0),))

    @staticmethod
    def with_failures(mean_s: float, sigma_s: float, failures: Failures) -> TimeLeft:
        """Work of ``mean_s`` +- ``sigma_s``, interrupted at random.

        The number of failures is Poisson with mean ``mean_s / mtbf_s`` (those during repeated work
        are of second order and left out); each costs a restart and what is lost.
        """
        from scipy import stats  # slow to import, and only failures need it

        expected = mean_s / failures.mtbf_s
        last = min(_MAX_FAILURES, int(stats.poisson.ppf(1.0 - _NEGLIGIBLE, expected)))
        counts = np.arange(last + 1)
        chances = stats.poisson.pmf(counts, expected)
        chances /= chances.sum()
        means = mean_s + counts * failures.mean_cost_s
        sigmas = np.sqrt(sigma_s**2 + counts * failures.cost_variance_s2)
        return TimeLeft(
            weights=tuple(chances.tolist()),
            means_s=tuple(means.tolist()),
            sigmas_s=tuple(sigmas.tolist()),
        )

    @property
    def mean_s(self) -> float:
        """Expected time, seconds."""
        return float(np.dot(self.weights, self.means_s))

    def chance_beyond(self, time_s: float) -> float:
        """P(the time left > ``time_s``)."""
        sigmas = np.asarray(self.sigmas_s)
        away = time_s - np.asarray(self.means_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = np.where(sigmas > 0, ndtr(-away / sigmas), away < 0)
        return float(np.dot(self.weights, tails))

    def quantile(self, level: float) -> float:
        """The time that is not exceeded with probability ``level``; at least 0."""
        means, sigmas = np.asarray(self.means_s), np.asarray(self.sigmas_s)
        if len(means) == 1:
            return max(0.0, float(means[0] + sigmas[0] * ndtri(level)))
        from scipy import optimize  # likewise

        # A normal distribution has 2e-33 beyond twelve deviations: the root is always inside.
        reach = 12.0 * sigmas + 1e-9
        low, high = float((means - reach).min()), float((means + reach).max())
        found = optimize.root_scalar(
            lambda time_s: 1.0 - self.chance_beyond(time_s) - level, bracket=(low, high)
        )
        return max(0.0, float(found.root))

    def nodes(self, count: int = 128) -> Floats:
        """Times at the middles of ``count`` equally likely parts, for integrals over the time."""
        levels = (np.arange(count) + 0.5) / count
        if len(self.weights) == 1:
            sigma = self.sigmas_s[0]
            return np.maximum(0.0, self.means_s[0] + sigma * ndtri(levels))
        return np.asarray([self.quantile(float(level)) for level in levels])


def learned_mtbf_s(num_failures: int, run_s: float, *, prior_mtbf_s: float) -> float:
    """Mean time between failures after ``num_failures`` in ``run_s`` seconds of this job.

    Posterior mean of the rate under a gamma prior worth one failure; never infinite, since a run
    without a failure so far proves little.

    >>> learned_mtbf_s(0, 0.0, prior_mtbf_s=3600.0)
    3600.0
    """
    # Gamma prior and Poisson counts: shape and rate add up.
    return (prior_mtbf_s + max(run_s, 0.0)) / (1.0 + num_failures)
