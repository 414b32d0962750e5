"""Gaussian process over shapes: what few samples say of shapes between and beside them.

Covariance of two samples: a constant, a linear part on ``trend`` features, a Matern 3/2 function
of their distance in octaves, and the same once more between samples of one member of a pool.
Its scales are taken at the greatest posterior: Rasmussen and Williams (2006), sections 2.2, 4.2,
5.4 and (5.9) for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .robust import first_of_least

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
CONSTANT = 0.2
"""A pool's offset, in log time: about 20 %. Halved or doubled, errors move by less than 0.1 points
(benchmarks/sensitivity.py)."""
START = np.log([0.5, 0.08, 2.0, 0.03, 0.05, 0.05])
"""Logs of the priors' medians: log time for trend, shape, noise and members, octaves for the
range."""
_SPREAD = np.array([0.5, 0.6, 0.5, 0.6, 0.5, 0.5])
"""Log-normal priors: trend, shape, octaves of its range, noise, member's offset, member's shape."""
NUM_SCALES = len(START)
_FARTHEST = 5.0
"""Deviations from the prior that a scale may lie."""
_STARTS = np.array([[0.0] * 6, [0.0, 1.0, -1.0, -1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 1.0, 0.0, 0.0]])
"""In deviations of the prior: the prior, then rough and quiet, then smooth and loud."""
_ALIKE_LOG = 1e-3
"""Log posteriors closer than this are one: of two such optima the first start's is taken."""
_JITTER_FRACS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)
"""Shares of the diagonal that are added to it: the next where rounding leaves it indefinite."""
_SQRT_3 = float(np.sqrt(3.0))
_FEWEST_TUNED, _MOST_TUNED = 4, 100
"""Samples between which the covariance is tuned: fewer say nothing of it, more cost too much."""
_WILD = 2.0
"""Left-out residuals of more deviations than this lose weight."""
_NUM_REWEIGHTS = 2
"""One or four rounds give the same errors (benchmarks/sensitivity.py): wild samples are told in the
first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What the process sees of each sample, ``(rows, ...)``."""

    coordinates: Matrix
    trend: Matrix
    member: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.member)

    @property
    def is_pooled(self) -> bool:
        """True where samples of several members share the process."""
        return bool(self.member.max(initial=0))

    def along(self, axes: NDArray[np.int64], origin: Vector) -> Inputs:
        """The same rows with some coordinates only, counted from an origin."""
        return replace(self, coordinates=self.coordinates[:, axes] - origin)


def stacked(parts: Sequence[Inputs]) -> Inputs:
    """The rows of all parts, in their order."""
    return Inputs(
        coordinates=np.concatenate([p.coordinates for p in parts]),
        trend=np.concatenate([p.trend for p in parts]),
        member=np.concatenate([p.member for p in parts]),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """What the covariance of two sets of samples is made of, ``(first, second)`` each."""

    trend: Matrix
    octaves: Matrix
    """Distance."""
    is_same: Matrix | None
    """1 where both are of one member, else 0; None where no members are told apart."""

    @staticmethod
    def of(first: Inputs, second: Inputs, *, is_pooled: bool) -> Pairs:
        """All pairs of a sample of ``first`` and one of ``second``."""
        same = first.member[:, None] == second.member[None, :]
        return Pairs(
            trend=first.trend @ second.trend.T,
            # By differences: products would leave a distance between equal samples.
            octaves=_distances(first.coordinates, second.coordinates),
            is_same=same.astype(np.float64) if is_pooled else None,
        )

    def covariance(self, theta: Vector) -> Matrix:
        """Covariance without noise; ``theta`` are the logs of the scales, as in ``START``."""
        trend, shape, octaves, _, offset, own = np.exp(theta)
        matern = _matern(_SQRT_3 * self.octaves / octaves)
        out = CONSTANT**2 + trend**2 * self.trend + shape**2 * matern
        if self.is_same is not None:
            out += self.is_same * (offset**2 + own**2 * matern)
        return out


def variance(inputs: Inputs, theta: Vector, *, is_pooled: bool) -> Vector:
    """Diagonal of the covariance of the inputs with themselves, without noise, ``(rows,)``."""
    trend, shape, _, _, offset, own = np.exp(theta)
    out = CONSTANT**2 + shape**2 + trend**2 * (inputs.trend**2).sum(axis=1)
    return out + (offset**2 + own**2 if is_pooled else 0.0)


def lower_factor(matrix: Matrix) -> Matrix:
    """Lower Cholesky factor of a covariance whose diagonal is raised by a trillionth.

    By more where that does not do: samples that are all but equal, at scales far from usual.
    """
    from scipy.linalg import cholesky  # fitting alone needs SciPy, which is slow to import

    diagonal = np.diag(np.diag(matrix))
    for frac in _JITTER_FRACS[:-1]:
        try:
            return cholesky(matrix + frac * diagonal, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            continue
    return cholesky(matrix + _JITTER_FRACS[-1] * diagonal, lower=True, check_finite=False)


def inverse(factor: Matrix) -> Matrix:
    """Inverse of the matrix with this lower factor."""
    from scipy.linalg import cho_solve

    return cho_solve((factor, True), np.eye(len(factor)), check_finite=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScalePosterior:
    """Samples whose scales are asked for: values ``(rows,)`` and weights that divide the noise."""

    pairs: Pairs
    values: Vector
    weight: Vector

    @staticmethod
    def of(inputs: Inputs, values: Vector, weight: Vector) -> ScalePosterior:
        """The posterior of the scales of these samples."""
        return ScalePosterior(
            pairs=Pairs.of(inputs, inputs, is_pooled=inputs.is_pooled),
            values=values,
            weight=weight,
        )

    def matrix(self, theta: Vector) -> Matrix:
        """Covariance of the samples, noise included."""
        return self.pairs.covariance(theta) + np.diag(np.exp(2 * theta[3]) / self.weight)

    def cost(self, theta: Vector) -> tuple[float, Vector]:
        """Negative log posterior but for a constant, and its gradient, ``(NUM_SCALES,)``."""
        factor = lower_factor(self.matrix(theta))
        precision = inverse(factor)
        solved = precision @ self.values
        away = (theta - START) / _SPREAD
        value = 0.5 * self.values @ solved + np.log(np.diag(factor)).sum() + 0.5 * away @ away
        slopes = self._slopes(theta, precision - np.outer(solved, solved))
        return float(value), slopes + away / _SPREAD

    def _slopes(self, theta: Vector, pull: Matrix) -> Vector:
        """Half the sums over ``pull`` times the derivatives of the matrix."""
        trend, shape, octaves, noise, offset, own = np.exp(2 * theta)
        distance = _SQRT_3 * self.pairs.octaves / np.sqrt(octaves)
        matern, bend = _matern(distance), distance**2 * np.exp(-distance)
        same = self.pairs.is_same
        mine = np.zeros_like(pull) if same is None else pull * same
        return np.array(
            [
                trend * np.sum(pull * self.pairs.trend),
                shape * np.sum(pull * matern),
                0.5 * (shape * np.sum(pull * bend) + own * np.sum(mine * bend)),
                noise * np.sum(np.diag(pull) / self.weight),
                offset * np.sum(mine),
                own * np.sum(mine * matern),
            ]
        )

    def greatest(self) -> Vector:
        """Logs of the scales at the greatest posterior, the best of a few searches."""
        from scipy.optimize import minimize

        bounds = [(-_FARTHEST, _FARTHEST)] * NUM_SCALES

        def scaled(away: Vector) -> tuple[float, Vector]:
            value, slope = self.cost(START + _SPREAD * away)
            return value, slope * _SPREAD

        found = [
            minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=_SEARCH)
            for start in _STARTS
        ]
        best = first_of_least([float(f.fun) for f in found], alike=_ALIKE_LOG)
        return START + _SPREAD * np.asarray(found[best].x, dtype=np.float64)


_SEARCH = {"maxiter": 200, "ftol": 1e-15, "gtol": 1e-8}
"""Until steps are lost in rounding, so that other processors end at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GaussianProcess:
    """A fitted process."""

    theta: Vector
    inputs: Inputs
    whitener: NDArray[np.float64]
    """Inverse of the lower Cholesky factor of the samples' covariance."""
    solved: Vector
    left_out: Vector
    """Residual of each sample when it alone is left out."""
    left_out_sigma: Vector

    def predict(self, inputs: Inputs) -> tuple[Vector, Vector]:
        """Mean and standard deviation, noise of one measurement included, ``(rows,)`` each."""
        is_pooled = self.inputs.is_pooled
        cross = Pairs.of(inputs, self.inputs, is_pooled=is_pooled).covariance(self.theta)
        half = cross @ self.whitener.T
        left = variance(inputs, self.theta, is_pooled=is_pooled) - (half**2).sum(axis=1)
        noise = np.exp(2 * self.theta[3])
        return cross @ self.solved, np.sqrt(np.maximum(left, 0.0) + noise)


def fit_gaussian(inputs: Inputs, values: Vector, weight: Vector) -> GaussianProcess:
    """Fit by greatest posterior of the covariance, then weigh wild samples down.

    ``weight`` divides the noise of a sample.  The same rows give the same process; on a processor
    that rounds otherwise its predictions differ by less than a millionth.
    """
    is_tuned = _FEWEST_TUNED <= len(inputs) <= _MOST_TUNED
    theta = ScalePosterior.of(inputs, values, weight).greatest() if is_tuned else START
    fitted, used = _solve(inputs, values, weight, theta), weight
    for _ in range(_NUM_REWEIGHTS):
        # The deviation that a sample would have with the weight it came with.
        lost = np.exp(2 * theta[3]) * (1.0 / weight - 1.0 / used)
        wild = np.abs(fitted.left_out) / np.sqrt(fitted.left_out_sigma**2 + lost)
        if not (wild > _WILD).any():
            break
        used = weight * np.where(wild > _WILD, np.maximum(_WILD / wild, 0.05) ** 2, 1.0)
        fitted = _solve(inputs, values, used, theta)
    return fitted


def _solve(inputs: Inputs, values: Vector, weight: Vector, theta: Vector) -> GaussianProcess:
    from scipy.linalg import solve_triangular  # fitting alone needs it

    factor = lower_factor(ScalePosterior.of(inputs, values, weight).matrix(theta))
    precision = inverse(factor)
    solved = precision @ values
    spread = np.diag(precision)
    return GaussianProcess(
        theta=theta,
        inputs=inputs,
        whitener=solve_triangular(factor, np.eye(len(factor)), lower=True, check_finite=False),
        solved=solved,
        left_out=solved / spread,
        left_out_sigma=1.0 / np.sqrt(spread),
    )


def _distances(first: Matrix, second: Matrix) -> Matrix:
    """Euclidean, ``(first, second)``."""
    squares = np.zeros((len(first), len(second)))
    for one, other in zip(first.T, second.T, strict=True):
        squares += (one[:, np.newaxis] - other) ** 2
    return np.sqrt(squares)


def _matern(distance: Matrix) -> Matrix:
    return (1.0 + distance) * np.exp(-distance)
