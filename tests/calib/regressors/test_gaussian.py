"""The process against scikit-learn's, and against refits without one sample."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Matern

from forerun.calib.regressors.gaussian import GaussianProcess, Inputs, fit_gaussian, stacked

_CONSTANT = 0.2
"""Standard deviation of the process's constant."""
Points = NDArray[np.float64]


def _inputs(points: Points, *, trend: bool = True, member: int = 0) -> Inputs:
    """Points whose coordinates are their trend features too."""
    return Inputs(
        coordinates=points,
        trend=points if trend else np.zeros((len(points), 0)),
        member=np.full(len(points), member),
    )


def _points(number: int, *, seed: int = 0, num_axes: int = 2) -> Points:
    return np.random.default_rng(seed).uniform(-2, 2, (number, num_axes))


def _smooth(points: Points) -> NDArray[np.float64]:
    return 0.15 * np.sin(points[:, 0]) + 0.05 * points[:, -1]


def _measured(
    number: int, *, noise: float = 0.01, seed: int = 0
) -> tuple[Points, NDArray[np.float64]]:
    points = _points(number, seed=seed)
    rng = np.random.default_rng(seed + 100)
    return points, _smooth(points) + noise * rng.normal(size=number)


def _reference(
    fitted: GaussianProcess, points: Points, values: NDArray[np.float64], weight: NDArray
) -> GaussianProcessRegressor:
    """The same covariance in scikit-learn, fitted on the given rows."""
    trend, shape, octaves, noise, _, _ = np.exp(fitted.theta)
    kernel = (
        ConstantKernel(_CONSTANT**2)
        + ConstantKernel(trend**2) * DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
        + ConstantKernel(shape**2) * Matern(length_scale=octaves, nu=1.5)
    )
    model = GaussianProcessRegressor(kernel, alpha=noise**2 / weight, optimizer=None)
    return model.fit(points, values)


def test_prediction_is_that_of_scikit_learn() -> None:
    points, values = _measured(30)
    weight = np.random.default_rng(5).uniform(0.3, 1.0, 30)
    fitted = fit_gaussian(_inputs(points), values, weight)
    assert np.all(np.abs(fitted.held_out_residuals) < 2 * fitted.held_out_sigma), (
        "no sample was reweighed"
    )
    queries = _points(50, seed=9) * 2
    mean, sigma = fitted.predict(_inputs(queries))
    expected, deviation = _reference(fitted, points, values, weight).predict(
        queries, return_std=True
    )
    assert mean == pytest.approx(expected, abs=1e-9)
    assert sigma == pytest.approx(np.hypot(deviation, np.exp(fitted.theta[3])), rel=1e-6)


def test_left_out_residuals_are_those_of_refits_without_one_sample() -> None:
    points, values = _measured(15, seed=3)
    weight = np.random.default_rng(5).uniform(0.3, 1.0, 15)
    fitted = fit_gaussian(_inputs(points), values, weight)
    assert np.all(np.abs(fitted.held_out_residuals) < 2 * fitted.held_out_sigma), (
        "no sample was reweighed"
    )
    for i in range(15):
        rest = np.arange(15) != i
        refit = _reference(fitted, points[rest], values[rest], weight[rest])
        mean, deviation = refit.predict(points[i : i + 1], return_std=True)
        noise = np.exp(fitted.theta[3]) / np.sqrt(weight[i])
        assert fitted.held_out_residuals[i] == pytest.approx(values[i] - mean[0], abs=1e-9)
        assert fitted.held_out_sigma[i] == pytest.approx(np.hypot(deviation[0], noise), rel=1e-6)


def test_tuning_finds_a_likelier_covariance() -> None:
    points, values = _measured(40, noise=0.003)
    fitted = fit_gaussian(_inputs(points), values, np.ones(40))
    quiet, loud = (
        fit_gaussian(_inputs(points), _smooth(points) + s * noise, np.ones(40)).theta[3]
        for noise in [np.random.default_rng(0).normal(size=40)]
        for s in (0.003, 0.06)
    )
    assert np.exp(quiet) < 0.015 < 0.04 < np.exp(loud)
    # Past this number the start is used as it is: tuning costs the cube of it.
    many = fit_gaussian(_inputs(_points(101)), _smooth(_points(101)), np.ones(101))
    few = fit_gaussian(_inputs(points[:3]), values[:3], np.ones(3))
    assert np.array_equal(many.theta, few.theta)
    tuned, start = (
        _reference(f, points, values, np.ones(40)).log_marginal_likelihood_value_
        for f in (fitted, many)
    )
    assert tuned > start


def test_interpolates_a_smooth_function() -> None:
    points, values = _measured(60, noise=0.002)
    fitted = fit_gaussian(_inputs(points, trend=False), values, np.ones(60))
    at, _ = fitted.predict(_inputs(points, trend=False))
    assert np.abs(at - values).max() < 0.01
    between = 0.8 * _points(100, seed=7)
    mean, _ = fitted.predict(_inputs(between, trend=False))
    assert np.median(np.abs(mean - _smooth(between))) < 0.006


def test_deviation_grows_away_from_the_samples() -> None:
    points, values = _measured(30)
    fitted = fit_gaussian(_inputs(points, trend=False), values, np.ones(30))
    ray = np.linspace(2, 20, 30)[:, None] * np.ones((1, 2))
    mean, sigma = fitted.predict(_inputs(ray, trend=False))
    assert np.all(np.diff(sigma) > -1e-12)
    shape, noise = np.exp(fitted.theta[1]), np.exp(fitted.theta[3])
    # Far out the samples tell of the constant only; the prior bounds the doubt.
    assert np.hypot(shape, noise) <= sigma[-1] <= np.sqrt(shape**2 + noise**2 + _CONSTANT**2)
    assert mean[-1] == pytest.approx(mean[-2], abs=1e-3)


def test_a_linear_trend_carries_outside() -> None:
    points = _points(40, num_axes=1)
    fitted = fit_gaussian(_inputs(points), 0.3 * points[:, 0], np.ones(40))
    mean, _ = fitted.predict(_inputs(np.array([[6.0]])))
    assert mean[0] == pytest.approx(1.8, rel=0.1)


def test_a_wild_sample_loses_its_weight() -> None:
    points, values = _measured(30)
    wild = values.copy()
    wild[4] += 1.0
    fitted = fit_gaussian(_inputs(points), wild, np.ones(30))
    at = points[4:5]
    (result,), _ = fitted.predict(_inputs(at))
    (naive,) = np.atleast_1d(_reference(fitted, points, wild, np.ones(30)).predict(at))
    error = abs(result - _smooth(at)[0])
    others, _ = fitted.predict(_inputs(np.delete(points, 4, axis=0)))
    assert np.median(np.abs(others - np.delete(_smooth(points), 4))) < 0.03
    assert error < 0.15
    assert error < abs(naive - _smooth(at)[0])


def test_samples_of_little_weight_are_followed_less() -> None:
    points = np.linspace(-2, 2, 20)[:, None]
    values = 0.1 * np.where(np.arange(20) % 2, 1.0, -1.0)
    heavy = np.where(np.arange(20) % 2, 1.0, 0.01)
    mean, _ = fit_gaussian(_inputs(points), values, heavy).predict(_inputs(points))
    assert mean.mean() > 0.05
    mean, _ = fit_gaussian(_inputs(points), values, heavy[::-1]).predict(_inputs(points))
    assert mean.mean() < -0.05


def test_members_of_a_pool_share_what_they_have_in_common() -> None:
    """Two operators run alike up to a constant; the second was measured once."""
    points, values = _measured(40, noise=0.003)
    point, offset = np.array([[1.0, 1.0]]), 0.04
    pooled = fit_gaussian(
        stacked([_inputs(points), _inputs(point, member=1)]),
        np.append(values, _smooth(point) + offset),
        np.ones(41),
    )
    alone = fit_gaussian(_inputs(point), _smooth(point) + offset, np.ones(1))
    queries = _points(40, seed=8)
    truth = _smooth(queries) + offset

    def error(fitted: GaussianProcess, member: int) -> float:
        return float(np.median(np.abs(fitted.predict(_inputs(queries, member=member))[0] - truth)))

    assert error(pooled, 1) < 0.03
    assert error(pooled, 1) < 0.5 * error(alone, 0)
    assert error(pooled, 1) < error(pooled, 0), "the member's own sample counts"
    known, unknown = (pooled.predict(_inputs(point, member=m))[1][0] for m in (1, 2))
    assert unknown > known


def test_fitting_twice_gives_the_same() -> None:
    points, values = _measured(50)
    first, second = (fit_gaussian(_inputs(points), values, np.ones(50)) for _ in range(2))
    assert np.array_equal(first.theta, second.theta)
    assert np.array_equal(first.solved, second.solved)
