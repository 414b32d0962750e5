"""Gaussian process over shapes: what few samples say of shapes between and beside them.

Covariance of two samples: a constant, a linear part on ``trend`` features, a Matern 3/2 function
of their distance in octaves, and the same once more between samples of one member of a pool.
Rasmussen and Williams (2006), sections 2.2, 4.2 and 5.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

Vector = NDArray[np.float64]
_CONSTANT = 0.2
_START = np.log([0.5, 0.08, 2.0, 0.03, 0.05, 0.05])
_SPREAD = np.array([0.5, 0.6, 0.5, 0.6, 0.5, 0.5])
"""Log-normal priors: trend, shape, octaves of its range, noise, member's offset, member's shape."""
_MOST_ITERATIONS = 10
_FEWEST_TUNED, _MOST_TUNED = 4, 100
"""Samples between which the covariance is tuned: fewer say nothing of it, more cost too much."""
_WILD = 2.0
"""Left-out residuals of more deviations than this lose weight."""
_NUM_REWEIGHTS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What the process sees of each sample, ``(rows, ...)``."""

    coordinates: NDArray[np.float64]
    trend: NDArray[np.float64]
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
class GaussianProcess:
    """A fitted process."""

    theta: Vector
    inputs: Inputs
    factor: NDArray[np.float64]
    """Lower Cholesky factor of the samples' covariance."""
    solved: Vector
    left_out: Vector
    """Residual of each sample when it alone is left out."""
    left_out_sigma: Vector

    def predict(self, inputs: Inputs) -> tuple[Vector, Vector]:
        """Mean and standard deviation, noise of one measurement included, ``(rows,)`` each."""
        cross = _covariance(inputs, self.inputs, self.theta, self.inputs.is_pooled)
        half = solve_triangular(self.factor, cross.T, lower=True, check_finite=False)
        variance = _variance(inputs, self.theta, self.inputs.is_pooled) - (half**2).sum(axis=0)
        noise = np.exp(2 * self.theta[3])
        return cross @ self.solved, np.sqrt(np.maximum(variance, 0.0) + noise)


def fit_gaussian(inputs: Inputs, values: Vector, weight: Vector) -> GaussianProcess:
    """Fit by greatest posterior of the covariance, then weigh wild samples down.

    ``weight`` divides the noise of a sample.  Deterministic.
    """
    is_tuned = _FEWEST_TUNED <= len(inputs) <= _MOST_TUNED
    theta = _tuned(inputs, values, weight) if is_tuned else _START
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
    matrix = _covariance(inputs, inputs, theta, inputs.is_pooled) + np.diag(
        np.exp(2 * theta[3]) / weight
    )
    factor = cho_factor(matrix, lower=True, check_finite=False)
    inverse = cho_solve(factor, np.eye(len(values)), check_finite=False)
    solved = inverse @ values
    spread = np.diag(inverse)
    return GaussianProcess(
        theta=theta,
        inputs=inputs,
        factor=np.tril(factor[0]),
        solved=solved,
        left_out=solved / spread,
        left_out_sigma=1.0 / np.sqrt(spread),
    )


def _tuned(inputs: Inputs, values: Vector, weight: Vector) -> Vector:
    def cost(theta: Vector) -> float:
        matrix = _covariance(inputs, inputs, theta, inputs.is_pooled) + np.diag(
            np.exp(2 * theta[3]) / weight
        )
        try:
            factor = cholesky(matrix, lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return 1e9
        half = solve_triangular(factor, values, lower=True, check_finite=False)
        prior = ((theta - _START) / _SPREAD) ** 2
        return float(0.5 * half @ half + np.log(np.diag(factor)).sum() + 0.5 * prior.sum())

    found = minimize(cost, _START, method="L-BFGS-B", options={"maxiter": _MOST_ITERATIONS})
    return np.asarray(found.x, dtype=np.float64)


def _covariance(
    first: Inputs, second: Inputs, theta: Vector, is_pooled: bool
) -> NDArray[np.float64]:
    trend, shape, octaves, _, offset, own = np.exp(theta)
    a, b = first.coordinates, second.coordinates
    square = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2.0 * a @ b.T
    distance = np.sqrt(3.0 * np.maximum(square, 0.0)) / octaves
    matern = (1.0 + distance) * np.exp(-distance)
    out = _CONSTANT**2 + trend**2 * first.trend @ second.trend.T + shape**2 * matern
    if is_pooled:
        same = first.member[:, None] == second.member[None, :]
        out += same * (offset**2 + own**2 * matern)
    return out


def _variance(inputs: Inputs, theta: Vector, is_pooled: bool) -> Vector:
    """Diagonal of the covariance of the inputs with themselves."""
    trend, shape, _, _, offset, own = np.exp(theta)
    out = _CONSTANT**2 + shape**2 + trend**2 * (inputs.trend**2).sum(axis=1)
    return out + (offset**2 + own**2 if is_pooled else 0.0)
