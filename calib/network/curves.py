"""One measured curve: time over payload, between and beyond the measured payloads.

The log ratio of measured time to a law ``fixed + bytes * rate`` is interpolated, which preserves
the bends of protocols and algorithms. Beyond the largest payload the last slope is followed to the
extent that bandwidth bounds the transfer there, and NCCL's own estimate otherwise. Repeats of a
payload are joined by their median; if neighbours scatter, a running median is used, with the window
that predicts held-out payloads best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import SAMPLE_SIGMA_LOG, first_minimum

Vector = NDArray[np.float64]
_ITERATIONS = 40
"""Most steps of the damped search, which ends earlier once steps fall below a billionth."""
_LARGEST_STEP_LOG, _LEAST_STEP_LOG = 1.0, 1e-9
"""Step bounds: constants stay within a factor of e**40 of the prior's, so that nothing can
overflow."""
_FOLDS = 5
"""Number of folds of a curve's payloads, each held out once."""
_LEAST_HALVED = 8
"""Payloads from which half of a curve is informative on the other half."""
_WINDOWS = ((100, (1, 5, 9, 17, 33)), (32, (1, 3, 5, 9)), (16, (1, 3)))
"""Windows of running medians that are tried, by the least number of payloads; below, none."""
_FORGET_OCTAVES = 4.0
"""Doublings over which a latency-bound payload's difference from NCCL's figure halves."""
_FAR_LOG_NBYTES = 40.0
"""e**40 bytes: beyond any payload, so that only a law's rate matters."""
_LOG_2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Measured transfers of one group, ``(rows,)`` each."""

    nbytes: Vector
    time_s: Vector
    weight: Vector

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """``time = fixed_s + nbytes * byte_s``."""

    fixed_s: float
    byte_s: float

    def __call__(self, nbytes: Vector) -> Vector:
        """Return seconds, ``(rows,)``."""
        return self.fixed_s + nbytes * self.byte_s

    def log_time(self, log_nbytes: Vector) -> Vector:
        """Return log seconds, ``(rows,)``.

        >>> Law(fixed_s=1.0, byte_s=0.5).log_time(np.log([2.0, 8.0])).round(4).tolist()
        [0.6931, 1.6094]
        """
        return np.log(self.fixed_s + self.byte_s * np.exp(log_nbytes))


Expected = Callable[[Vector], Vector]
"""Function from payloads in bytes to the seconds that NCCL's model gives."""


def bandwidth_share(expected: Expected, nbytes: Vector) -> Vector:
    """Return the share of the full bandwidth that payloads reach, ``(rows,)``; 1 if only bytes
    count.

    >>> bandwidth_share(lambda n: 1e-5 + n / 1e9, np.array([1e4, 1e7])).round(3).tolist()
    [0.5, 0.999]
    """
    far = np.exp(np.array([_FAR_LOG_NBYTES]))
    return np.clip(expected(far)[0] / far[0] * nbytes / expected(nbytes), 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """A fitted curve; arrays are ``(payloads,)`` unless stated otherwise."""

    law: Law
    log_nbytes: Vector
    residual: Vector
    """Log of (smoothed) time over the law's at each payload."""
    held_out_errors: Vector
    """Log of predicted over measured time of each sample with its payload held out, ``(rows,)``, by
    increasing payload; empty for a single payload."""
    expected: Expected | None
    """NCCL's estimate; None if only the law extrapolates to larger payloads."""
    lower_half: Curve | None
    """The curve of the smaller half of the payloads alone, if there are enough."""

    def log_time(self, log_nbytes: Vector) -> Vector:
        """Return log seconds, ``(rows,)``."""
        inside = self.law.log_time(log_nbytes)
        inside += np.interp(log_nbytes, self.log_nbytes, self.residual)
        if self.expected is None:
            return inside
        above, below = log_nbytes > self.log_nbytes[-1], log_nbytes < self.log_nbytes[0]
        if above.any():
            inside[above] = self._beyond(self.expected, log_nbytes[above])
        if below.any():
            inside[below] = self._before(self.expected, log_nbytes[below], inside[below])
        return inside

    def log_time_of(self, nbytes: Vector) -> Vector:
        """Return log seconds for payloads in bytes, at least one."""
        return self.log_time(np.log(np.maximum(nbytes, 1.0)))

    def octaves_outside(self, log_nbytes: Vector) -> Vector:
        """Return the doublings between a payload and the measured ones, ``(rows,)``."""
        below = np.maximum(self.log_nbytes[0] - log_nbytes, 0.0)
        return (below + np.maximum(log_nbytes - self.log_nbytes[-1], 0.0)) / _LOG_2

    @property
    def least_time_s(self) -> float:
        """Time of the fastest measured payload."""
        return float(np.exp(np.min(self.law.log_time(self.log_nbytes) + self.residual)))

    def top_share(self) -> float:
        """Return the share of the full bandwidth that the largest payload reaches."""
        top = np.exp(self.log_nbytes[-1:])
        return float(bandwidth_share(self.expected or self.law, top)[0])

    def _before(self, expected: Expected, log_nbytes: Vector, by_law: Vector) -> Vector:
        """Extrapolate below the smallest payload: by NCCL's latency if bandwidth bounds it, else by
        the law."""
        least = np.exp(self.log_nbytes[:1])
        bound = bandwidth_share(expected, least)
        start = self.law.log_time(self.log_nbytes[:1]) + self.residual[0]
        priced = start + np.log(expected(np.exp(log_nbytes)) / expected(least))
        return bound * priced + (1.0 - bound) * by_law

    def _beyond(self, expected: Expected, log_nbytes: Vector) -> Vector:
        top = self.log_nbytes[-1]
        known = np.array([max(top - _LOG_2, self.log_nbytes[0]), top])
        nbytes, times = np.exp(known), np.exp(self.log_time(known))
        slope = (times[1] - times[0]) / max(nbytes[1] - nbytes[0], 1.0)
        slope = float(np.clip(slope, 0.0, times[1] / nbytes[1]))
        followed = np.log(times[1] + slope * (np.exp(log_nbytes) - nbytes[1]))
        differs = np.log(times[1]) - np.log(expected(nbytes[1:]))[0]
        remaining_frac = 0.5 ** ((log_nbytes - top) / _LOG_2 / _FORGET_OCTAVES)
        priced = np.log(expected(np.exp(log_nbytes))) + differs * remaining_frac
        bound = self.top_share()
        return bound * followed + (1.0 - bound) * priced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Knots:
    """Distinct payloads, ``(payloads,)``; ``of_row`` is the payload of each row, ``(rows,)``."""

    log_nbytes: Vector
    log_time: Vector
    weight: Vector
    of_row: NDArray[np.int64]
    row_log_time: Vector


def fit_curve(
    samples: Samples, prior: Law, *, sigma_log: float, expected: Expected | None = None
) -> Curve:
    """Fit the curve of a group; ``prior`` counts as one more sample of each of the law's constants.

    ``sigma_log`` is the standard deviation of the constants' logarithms from the prior's.
    """
    knots = _knots(samples)
    law = _law_of(knots, np.ones(len(knots.log_nbytes), dtype=np.bool_), prior, sigma_log)
    window, errors = _best_window(knots, law)
    number = len(knots.log_nbytes)
    lower_half = None
    if number >= _LEAST_HALVED:
        keep = np.arange(number) < number // 2
        half_law = _law_of(knots, keep, prior, sigma_log)
        lower_half = _smooth_curve(knots, keep, half_law, window, expected)
    curve = _smooth_curve(knots, np.ones(number, dtype=np.bool_), law, window, expected)
    return replace(
        curve,
        held_out_errors=errors,
        lower_half=lower_half,
    )


def fit_law(
    fixed: Vector, nbytes: Vector, log_time: Vector, weight: Vector, prior: Law, *, sigma_log: float
) -> Law:
    """Fit the constants of ``time = fixed * fixed_s + nbytes * byte_s`` robustly, in log time.

    Gauss-Newton on the logarithms of both constants with soft-L1 weights; the prior's constants are
    one more sample each. All vectors are ``(rows,)``.

    >>> n = np.array([1.0, 10.0, 100.0, 1e3])
    >>> found = fit_law(np.ones(4), n, np.log(2 + 0.5 * n), np.ones(4),
    ...                 Law(fixed_s=1.0, byte_s=1.0), sigma_log=1e3)
    >>> round(found.fixed_s, 3), round(found.byte_s, 3)
    (2.0, 0.5)
    """
    center = np.log([prior.fixed_s, prior.byte_s])
    columns = np.stack([fixed, nbytes])

    def errors(theta: Vector) -> tuple[Vector, Vector, float]:
        """Return the deviations of the samples, the shares of both constants, and the cost to
        minimise."""
        costs = columns * np.exp(theta)[:, None]
        total = costs.sum(axis=0)
        error = (log_time - np.log(total)) / SAMPLE_SIGMA_LOG
        data = np.sum(weight * (np.sqrt(1.0 + error**2) - 1.0))
        return error, costs / total, float(data + 0.5 * np.sum(((theta - center) / sigma_log) ** 2))

    theta, (error, shares, cost) = center, errors(center)
    for _ in range(_ITERATIONS):
        robust = weight / np.sqrt(1.0 + error**2) / SAMPLE_SIGMA_LOG
        pull = (center - theta) / sigma_log**2
        hessian = (shares * robust) @ shares.T / SAMPLE_SIGMA_LOG + np.eye(2) / sigma_log**2
        step = _solved(hessian, (shares * robust) @ error + pull)
        step = np.clip(step, -_LARGEST_STEP_LOG, _LARGEST_STEP_LOG)
        lower = errors(theta + step)
        while lower[2] > cost and np.max(np.abs(step)) > _LEAST_STEP_LOG:
            step = step / 2.0
            lower = errors(theta + step)
        if np.max(np.abs(step)) <= _LEAST_STEP_LOG:
            break
        theta, (error, shares, cost) = theta + step, lower
    fixed_s, byte_s = np.exp(theta)
    return Law(fixed_s=float(fixed_s), byte_s=float(byte_s))


def _solved(matrix: NDArray[np.float64], right: Vector) -> Vector:
    """Solve two equations with a positive definite matrix."""
    share = matrix[1, 0] / matrix[0, 0]
    second = (right[1] - share * right[0]) / (matrix[1, 1] - share * matrix[0, 1])
    return np.array([right[0] / matrix[0, 0] - share * second, second])


def _smooth_curve(
    knots: _Knots, keep: NDArray[np.bool_], law: Law, window: int, expected: Expected | None
) -> Curve:
    x = knots.log_nbytes[keep]
    return Curve(
        law=law,
        log_nbytes=x,
        residual=_running_median(knots.log_time[keep] - law.log_time(x), window),
        held_out_errors=np.empty(0),
        expected=expected,
        lower_half=None,
    )


def _knots(samples: Samples) -> _Knots:
    order = np.lexsort((samples.time_s, np.maximum(samples.nbytes, 1.0)))
    log_time = np.log(samples.time_s[order])
    nbytes, first, of_row, counts = np.unique(
        np.maximum(samples.nbytes[order], 1.0),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    low, high = first + (counts - 1) // 2, first + counts // 2
    return _Knots(
        log_nbytes=np.log(nbytes),
        log_time=0.5 * (log_time[low] + log_time[high]),
        weight=np.add.reduceat(samples.weight[order], first),
        of_row=of_row,
        row_log_time=log_time,
    )


def _law_of(knots: _Knots, keep: NDArray[np.bool_], prior: Law, sigma_log: float) -> Law:
    nbytes = np.exp(knots.log_nbytes[keep])
    return fit_law(
        np.ones(len(nbytes)),
        nbytes,
        knots.log_time[keep],
        knots.weight[keep],
        prior,
        sigma_log=sigma_log,
    )


def _best_window(knots: _Knots, law: Law) -> tuple[int, Vector]:
    """Return the running-median window that predicts held-out payloads best, and its errors,
    ``(rows,)``."""
    if len(knots.log_nbytes) < 2:
        return 1, np.empty(0)
    windows = next((w for least, w in _WINDOWS if len(knots.log_nbytes) >= least), (1,))
    errors = [_held_out_errors(knots, law, window) for window in windows]
    best = first_minimum([float(np.mean(np.abs(e))) for e in errors])
    return windows[best], errors[best]


def _held_out_errors(knots: _Knots, law: Law, window: int) -> Vector:
    x, predicted = knots.log_nbytes, np.empty(len(knots.log_nbytes))
    residual = knots.log_time - law.log_time(x)
    folds = min(len(x), _FOLDS)
    for fold in range(folds):
        keep = np.arange(len(x)) % folds != fold
        smooth = _running_median(residual[keep], window)
        predicted[~keep] = law.log_time(x[~keep]) + np.interp(x[~keep], x[keep], smooth)
    return predicted[knots.of_row] - knots.row_log_time


def _running_median(values: Vector, window: int) -> Vector:
    """Return the median over ``window`` neighbours (odd); the ends are repeated."""
    if window == 1 or len(values) < window:
        return values
    padded = np.pad(values, window // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
