"""Gaussian process over shapes: what few samples say of shapes between and beside them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .covariance import START, Inputs, Pairs, ScalePosterior, inverse, lower_factor, variance

Vector = NDArray[np.float64]
_FEWEST_TUNED, _MOST_TUNED = 4, 100
"""Samples between which the covariance is tuned: fewer say nothing of it, more cost too much."""
_WILD = 2.0
"""Left-out residuals of more deviations than this lose weight."""
_NUM_REWEIGHTS = 2
"""One or four rounds give the same errors (benchmarks/sensitivity.py): wild samples are told in the
first."""


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
