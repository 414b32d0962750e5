"""A pool finds planted rates, and learns beside them what each member does otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_machine import PlantedMachine, batch, random_shapes, stacked, timed

from forerun.calib.fit._pools import PoolModel, Support, fit_pool
from forerun.calib.fit.batches import Timed
from forerun.calib.regressors.robust import robust_sigma
from forerun.calib.regressors.trees import tree_model
from forerun.calib.workload.operators import OperatorKind, Phase

K = OperatorKind
P = Phase
UNITS = 108
MACHINE = PlantedMachine(efficiency={K.LINEAR_FC1: 0.8, K.LINEAR_FC2: 0.65})
# Seven launches make the planted constant.
START = np.log([MACHINE.floor_s / 7, 1 / MACHINE.flop_per_s, 1 / MACHINE.bytes_per_s])
SIGMA = np.array([1.0, 0.3, 0.9])
FC1, FC2 = "linear_fc1/forward", "linear_fc2/forward"


def _linear(
    number: int, *, kind: K = K.LINEAR_FC1, seed: int = 0, noise: float = 0.02, **options: int
) -> Timed:
    rng = np.random.default_rng(seed)
    return MACHINE.measure(
        batch(kind, P.FORWARD, random_shapes(rng, number, 3, **options)), rng, noise=noise
    )


def _fit(samples: dict[str, Timed]) -> PoolModel:
    return fit_pool(samples, start=START, sigma=SIGMA, num_units=UNITS)


def _errors(pool: PoolModel, name: str, samples: Timed) -> np.ndarray:
    residual = pool.predict(name, samples.batch)
    return np.abs(residual.law + residual.detail - np.log(MACHINE.time_s(samples.batch)))


@pytest.mark.parametrize(("number", "most"), [(6, 0.06), (10, 0.04), (24, 0.03), (80, 0.03)])
def test_unseen_shapes_are_predicted(number: int, most: float) -> None:
    pool = _fit({FC1: _linear(number)})
    assert np.median(_errors(pool, FC1, _linear(50, seed=1))) < most


def test_the_law_carries_larger_shapes() -> None:
    """Errors are below 0.08 if loads overlap products, as in the law, and below 0.2 if not."""
    small, large = _linear(20, highest=2048), _linear(30, seed=1, lowest=4096, highest=16384)
    assert np.median(_errors(_fit({FC1: small}), FC1, large)) < 0.2
    residual = _fit({FC1: _with_hidden_bytes(small)}).predict(FC1, large.batch)
    error = residual.law + residual.detail - np.log(_with_hidden_bytes(large).time_s)
    assert np.median(np.abs(error)) < 0.08


def _with_hidden_bytes(of: Timed) -> Timed:
    """The same rows where FLOP hide the bytes."""
    rows, size_in, size_out = of.batch.sizes.T
    flop_s = 2 * rows * size_in * size_out / MACHINE.flop_per_s
    moved = rows * size_in + size_in * size_out + rows * size_out
    bytes_s = of.batch.element_nbytes * moved / MACHINE.bytes_per_s
    work_s = np.maximum(flop_s, bytes_s) / MACHINE.efficiency[K.LINEAR_FC1]
    noise = of.time_s / MACHINE.time_s(of.batch)
    return timed(of.batch, (MACHINE.floor_s + work_s) * noise)


def test_members_of_different_efficiency_are_told_apart() -> None:
    pool = _fit({FC1: _linear(16), FC2: _linear(16, kind=K.LINEAR_FC2, seed=5)})
    for name, kind in ((FC1, K.LINEAR_FC1), (FC2, K.LINEAR_FC2)):
        assert np.median(_errors(pool, name, _linear(40, kind=kind, seed=9))) < 0.04


def test_a_member_with_one_shape_profits_from_the_other() -> None:
    one = _linear(1, kind=K.LINEAR_FC2, seed=5, lowest=2048)
    samples = _linear(40, kind=K.LINEAR_FC2, seed=9, lowest=1024)
    pooled = _fit({FC1: _linear(30), FC2: one})
    assert np.median(_errors(pooled, FC2, samples)) < 0.08
    # Its products run a fifth slower than those of the other member.
    assert np.median(_errors(pooled, FC1, samples)) > 0.12


@pytest.mark.parametrize(
    ("number", "model", "has_forest"),
    [
        (8, "gaussian process", False),
        (24, "gaussian process", True),
        (63, "gaussian process", True),
        (64, tree_model(), False),
    ],
)
def test_shapes_decide_on_the_regressor(number: int, model: str, has_forest: bool) -> None:
    timed = _linear(number)
    for samples in (timed, stacked(timed, timed)):
        pool = _fit({FC1: samples})
        assert (pool.model, pool.regressors.forest is not None) == (model, has_forest)
        assert pool.num_shapes == pool.shapes_of[FC1] == number


def test_repeats_of_one_shape_are_one_shape() -> None:
    one = _linear(1)
    rng = np.random.default_rng(0)
    of = batch(K.LINEAR_FC1, P.FORWARD, np.repeat(one.batch.sizes, 100, axis=0))
    pool = _fit({FC1: MACHINE.measure(of, rng, noise=0.05)})
    assert (pool.num_shapes, pool.model) == (1, "gaussian process")
    assert _errors(pool, FC1, one)[0] < 0.03


def test_octaves_count_doublings_outside_the_measured_range() -> None:
    rows = batch(K.NORM, P.FORWARD, [(512, 1024), (2048, 1024), (1024, 4096)])
    pool = _fit({"norm/forward": MACHINE.measure(rows)})
    shapes = batch(K.NORM, P.FORWARD, [(1024, 2048), (512, 1024), (256, 2048), (1024, 32768)])
    residual = pool.predict("norm/forward", shapes)
    assert residual.octaves == pytest.approx([0, 0, 1, 3], abs=1e-6)
    assert residual.sigma_log[3] > residual.sigma_log[0]


@given(
    points=st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=2), min_size=1, max_size=8),
    point=st.lists(st.floats(-9, 9), min_size=2, max_size=2),
)
def test_support_is_a_box(points: list[list[float]], point: list[float]) -> None:
    box = Support.of(np.array(points))
    assert box.octaves_outside(np.array(points)) == pytest.approx(np.zeros(len(points)))
    low, high = np.min(points, axis=0), np.max(points, axis=0)
    nearest = np.clip(point, low, high)
    (result,) = box.octaves_outside(np.array([point]))
    assert result == pytest.approx(np.abs(np.array(point) - nearest).max())


def test_deviation_holds_planted_noise() -> None:
    quiet, loud = (_fit({FC1: _linear(40, noise=noise)}) for noise in (0.01, 0.1))
    shapes = _linear(40, seed=1).batch
    narrow, wide = (np.median(p.predict(FC1, shapes).sigma_log) for p in (quiet, loud))
    assert 0.01 <= narrow < 0.04
    assert 0.08 <= wide < 0.2
    assert loud.detail_sigma[FC1] == pytest.approx(0.1, rel=0.35)
    assert quiet.detail_sigma[FC1] < 0.04


@pytest.mark.parametrize("number", [10, 24, 80])
def test_left_out_residuals_are_as_large_as_errors_on_new_shapes(number: int) -> None:
    """Each shape is off by its own factor, which nothing but its own sample tells."""
    pool = _fit({FC1: _linear(number, noise=0.1)})
    samples = _linear(200, seed=1, noise=0.1)
    residual = pool.predict(FC1, samples.batch)
    error = np.sqrt(np.mean((np.log(samples.time_s) - residual.law - residual.detail) ** 2))
    residuals = pool.held_out_residuals[FC1]
    assert residuals.shape == (number,)
    sampling = 3 / np.sqrt(2 * number)
    assert np.sqrt(np.mean(residuals**2)) == pytest.approx(error, rel=sampling)


def test_an_operator_of_no_member_is_further_off_than_one_of_them() -> None:
    pool = _fit({FC1: _linear(16), FC2: _linear(16, kind=K.LINEAR_FC2, seed=5)})
    shapes = _linear(20, seed=9).batch
    known, unknown = pool.predict(FC1, shapes), pool.predict("", shapes)
    assert np.all(np.isinf(unknown.octaves))
    assert np.all(unknown.sigma_log > known.sigma_log)
    # Between the two members, which lie 0.8 / 0.65 apart.
    middle = np.median(unknown.law + unknown.detail - np.log(MACHINE.time_s(shapes)))
    assert -0.03 < middle < np.log(0.8 / 0.65) + 0.03


def test_order_of_members_changes_nothing() -> None:
    one, two = _linear(16), _linear(16, kind=K.LINEAR_FC2, seed=5)
    shapes = _linear(20, seed=9).batch
    first, second = _fit({FC1: one, FC2: two}), _fit({FC2: two, FC1: one})
    for name in (FC1, FC2):
        assert np.array_equal(
            first.predict(name, shapes).detail, second.predict(name, shapes).detail
        )


def test_wild_residuals_are_cut() -> None:
    residuals = 0.1 * np.random.default_rng(0).normal(size=2000)
    assert robust_sigma(residuals) == pytest.approx(0.1, rel=0.05)
    residuals[::50] = 5.0
    assert robust_sigma(residuals) == pytest.approx(0.1, rel=0.25)
    assert robust_sigma(np.zeros(10)) == 0.005


def test_samples_of_little_weight_hardly_count() -> None:
    fresh = _linear(30)
    stale = timed(fresh.batch, 1.4 * fresh.time_s, weight=0.02)
    pool = _fit({FC1: stacked(stale, fresh)})
    assert np.median(_errors(pool, FC1, _linear(40, seed=1))) < 0.05
