"""Gaussian process over shapes, for interpolation and extrapolation from few samples.

The covariance of two samples is a constant, a linear part on ``trend`` features, a Matern 3/2
function of their distance in octaves, and for samples of one member of a pool another constant and
Matern function. Its scales are maximum-a-posteriori estimates: Rasmussen and Williams (2006),
sections 2.2, 4.2, 5.4 and (5.9) for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .robust import first_minimum

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
CONSTANT = 0.2
"""Prior deviation of a pool's offset, in log time: about 20 %. With half or twice the value, errors
change by less than 0.1 points (benchmarks/RESULTS.md)."""
START = np.log([0.5, 0.08, 2.0, 0.03, 0.05, 0.05])
"""Logs of the priors' medians: log time for trend, shape, noise and members; octaves for the
range."""
_SPREAD = np.array([0.5, 0.6, 0.5, 0.6, 0.5, 0.5])
"""Deviations of the log-normal priors: trend, shape, octaves of its range, noise, member's offset,
member's shape."""
NUM_SCALES = len(START)
_FARTHEST = 5.0
"""Bound of a scale, in deviations from the prior."""
_STARTS = np.array([[0.0] * 6, [0.0, 1.0, -1.0, -1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 1.0, 0.0, 0.0]])
"""Starts of the search, in deviations of the prior: the prior, then rough with little noise, then
smooth with much."""
_ALIKE_LOG = 1e-3
"""Tolerance on log posteriors: of optima closer than this, that of the first start is used."""
_JITTER_FRACS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)
"""Shares of the diagonal that are added to it, tried in order until the matrix is definite despite
rounding."""
_SQRT_3 = float(np.sqrt(3.0))
_FEWEST_TUNED, _MOST_TUNED = 4, 100
"""Bounds on the number of samples for which the covariance is tuned: fewer do not determine it,
more cost too much."""
_WILD = 2.0
"""Standardised held-out residual above which a sample loses weight."""
_NUM_REWEIGHTS = 2
"""Rounds of reweighting. One or four give the same errors (benchmarks/RESULTS.md): outliers are
identified in the first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs of the process for each sample, ``(rows, ...)``."""

    coordinates: Matrix
    trend: Matrix
    member: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.member)

    @property
    def is_pooled(self) -> bool:
        """True if samples of several members share the process."""
        return bool(self.member.max(initial=0))

    def along(self, axes: NDArray[np.int64], origin: Vector) -> Inputs:
        """Return the same rows with selected coordinates, relative to an origin."""
        return replace(self, coordinates=self.coordinates[:, axes] - origin)


def stacked(parts: Sequence[Inputs]) -> Inputs:
    """Concatenate the rows of all parts, in their order."""
    return Inputs(
        coordinates=np.concatenate([p.coordinates for p in parts]),
        trend=np.concatenate([p.trend for p in parts]),
        member=np.concatenate([p.member for p in parts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """Components of the covariance between two sets of samples, ``(first, second)`` each."""

    trend: Matrix
    octaves: Matrix
    """Distance in octaves."""
    is_same: Matrix | None
    """1 if both are of one member, else 0; None if members are not distinguished."""

    @staticmethod
    def of(first: Inputs, second: Inputs, *, is_pooled: bool) -> Pairs:
        """Return all pairs of a sample of ``first`` and one of ``second``."""
        same = first.member[:, None] == second.member[None, :]
        return Pairs(
            trend=first.trend @ second.trend.T,
            # By differences: products would give equal samples a nonzero distance.
            octaves=_distances(first.coordinates, second.coordinates),
            is_same=same.astype(np.float64) if is_pooled else None,
        )

    def covariance(self, theta: Vector) -> Matrix:
        """Return the covariance without noise; ``theta`` are the logs of the scales, as in
        ``START``."""
        trend, shape, octaves, _, offset, member_shape = np.exp(theta)
        matern = _matern(_SQRT_3 * self.octaves / octaves)
        out = CONSTANT**2 + trend**2 * self.trend + shape**2 * matern
        if self.is_same is not None:
            out += self.is_same * (offset**2 + member_shape**2 * matern)
        return out


def variance(inputs: Inputs, theta: Vector, *, is_pooled: bool) -> Vector:
    """Return the diagonal of the inputs' own covariance, without noise, ``(rows,)``."""
    trend, shape, _, _, offset, member_shape = np.exp(theta)
    out = CONSTANT**2 + shape**2 + trend**2 * (inputs.trend**2).sum(axis=1)
    return out + (offset**2 + member_shape**2 if is_pooled else 0.0)


def lower_factor(matrix: Matrix) -> Matrix:
    """Return the lower Cholesky factor of a covariance whose diagonal is raised by a trillionth.

    It is raised by more if that is not enough: for nearly equal samples, at unusual scales.
    """
    from scipy.linalg import cholesky  # only fitting needs SciPy, which is slow to import

    diagonal = np.diag(np.diag(matrix))
    for frac in _JITTER_FRACS[:-1]:
        try:
            return cholesky(matrix + frac * diagonal, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            continue
    return cholesky(matrix + _JITTER_FRACS[-1] * diagonal, lower=True, check_finite=False)


def inverse(factor: Matrix) -> Matrix:
    """Return the inverse of the matrix with this lower factor."""
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), np.eye(len(factor)), check_finite=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScalePosterior:
    """Posterior of the scales given samples: values ``(rows,)`` and weights that divide the
    noise."""

    pairs: Pairs
    values: Vector
    weight: Vector

    @staticmethod
    def of(inputs: Inputs, values: Vector, weight: Vector) -> ScalePosterior:
        """Build the posterior of the scales of these samples."""
        return ScalePosterior(
            pairs=Pairs.of(inputs, inputs, is_pooled=inputs.is_pooled),
            values=values,
            weight=weight,
        )

    def matrix(self, theta: Vector) -> Matrix:
        """Return the covariance of the samples, noise included."""
        return self.pairs.covariance(theta) + np.diag(np.exp(2 * theta[3]) / self.weight)

    def cost(self, theta: Vector) -> tuple[float, Vector]:
        """Return the negative log posterior up to a constant, and its gradient,
        ``(NUM_SCALES,)``."""
        factor = lower_factor(self.matrix(theta))
        precision = inverse(factor)
        solved = precision @ self.values
        away = (theta - START) / _SPREAD
        value = 0.5 * self.values @ solved + np.log(np.diag(factor)).sum() + 0.5 * away @ away
        slopes = self._slopes(theta, precision - np.outer(solved, solved))
        return float(value), slopes + away / _SPREAD

    def _slopes(self, theta: Vector, pull: Matrix) -> Vector:
        """Return half the sums over ``pull`` times the derivatives of the matrix."""
        trend, shape, octaves, noise, offset, member_shape = np.exp(2 * theta)
        distance = _SQRT_3 * self.pairs.octaves / np.sqrt(octaves)
        matern, bend = _matern(distance), distance**2 * np.exp(-distance)
        same = self.pairs.is_same
        mine = np.zeros_like(pull) if same is None else pull * same
        return np.array(
            [
                trend * np.sum(pull * self.pairs.trend),
                shape * np.sum(pull * matern),
                0.5 * (shape * np.sum(pull * bend) + member_shape * np.sum(mine * bend)),
                noise * np.sum(np.diag(pull) / self.weight),
                offset * np.sum(mine),
                member_shape * np.sum(mine * matern),
            ]
        )

    def maximize(self) -> Vector:
        """Return the logs of the scales at the maximum posterior, the best of a few searches."""
        from scipy.optimize import minimize

        bounds = [(-_FARTHEST, _FARTHEST)] * NUM_SCALES

        def scaled(away: Vector) -> tuple[float, Vector]:
            value, slope = self.cost(START + _SPREAD * away)
            return value, slope * _SPREAD

        results = [
            minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=_SEARCH)
            for start in _STARTS
        ]
        best = first_minimum([float(f.fun) for f in results], alike=_ALIKE_LOG)
        return START + _SPREAD * np.asarray(results[best].x, dtype=np.float64)


_SEARCH = {"maxiter": 200, "ftol": 1e-15, "gtol": 1e-8}
"""Tolerances at the level of rounding, so that other processors end at the same optimum."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """A fitted process."""

    theta: Vector
    inputs: Inputs
    whitener: NDArray[np.float64]
    """Inverse of the lower Cholesky factor of the samples' covariance."""
    solved: Vector
    held_out_residuals: Vector
    """Residual of each sample with only it held out."""
    held_out_sigma: Vector

    def predict(self, inputs: Inputs) -> tuple[Vector, Vector]:
        """Return the mean and standard deviation, noise of one measurement included, ``(rows,)``
        each."""
        is_pooled = self.inputs.is_pooled
        cross = Pairs.of(inputs, self.inputs, is_pooled=is_pooled).covariance(self.theta)
        half = cross @ self.whitener.T
        posterior_variance = variance(inputs, self.theta, is_pooled=is_pooled) - (half**2).sum(
            axis=1
        )
        noise = np.exp(2 * self.theta[3])
        return cross @ self.solved, np.sqrt(np.maximum(posterior_variance, 0.0) + noise)


def fit_gaussian(inputs: Inputs, values: Vector, weight: Vector) -> GaussianProcess:
    """Fit the scales by maximum posterior, then reduce the weight of outliers.

    ``weight`` divides the noise of a sample. The same rows give the same process; on a processor
    that rounds differently its predictions differ by less than a millionth.
    """
    is_tuned = _FEWEST_TUNED <= len(inputs) <= _MOST_TUNED
    theta = ScalePosterior.of(inputs, values, weight).maximize() if is_tuned else START
    fitted, used = _solve(inputs, values, weight, theta), weight
    for _ in range(_NUM_REWEIGHTS):
        # The deviation that a sample would have with its original weight.
        lost = np.exp(2 * theta[3]) * (1.0 / weight - 1.0 / used)
        wild = np.abs(fitted.held_out_residuals) / np.sqrt(fitted.held_out_sigma**2 + lost)
        if not (wild > _WILD).any():
            break
        used = weight * np.where(wild > _WILD, np.maximum(_WILD / wild, 0.05) ** 2, 1.0)
        fitted = _solve(inputs, values, used, theta)
    return fitted


def _solve(inputs: Inputs, values: Vector, weight: Vector, theta: Vector) -> GaussianProcess:
    from scipy.linalg import solve_triangular  # only fitting needs it

    factor = lower_factor(ScalePosterior.of(inputs, values, weight).matrix(theta))
    precision = inverse(factor)
    solved = precision @ values
    spread = np.diag(precision)
    return GaussianProcess(
        theta=theta,
        inputs=inputs,
        whitener=solve_triangular(factor, np.eye(len(factor)), lower=True, check_finite=False),
        solved=solved,
        held_out_residuals=solved / spread,
        held_out_sigma=1.0 / np.sqrt(spread),
    )


def _distances(first: Matrix, second: Matrix) -> Matrix:
    """Return Euclidean distances, ``(first, second)``."""
    squares = np.zeros((len(first), len(second)))
    for one, other in zip(first.T, second.T, strict=True):
        squares += (one[:, np.newaxis] - other) ** 2
    return np.sqrt(squares)


def _matern(distance: Matrix) -> Matrix:
    return (1.0 + distance) * np.exp(-distance)
