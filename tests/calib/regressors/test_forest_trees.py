"""Tree ensembles: deterministic, honest about shapes they have not seen, deaf to slow repeats."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.ensemble import ExtraTreesRegressor

from forerun.calib.regressors import trees as trees_module
from forerun.calib.regressors.robust import on_grid
from forerun.calib.regressors.trees import Boosted, fit_forest, fit_trees, tree_model

NUM_REPEATS = 4


@pytest.fixture(params=["xgboost", "forest"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of trees that is here: the forest always is."""
    if request.param == "forest":
        monkeypatch.setattr(trees_module, "xgboost", lambda: None)
    elif tree_model() != "xgboost":
        pytest.skip("xgboost is not installed")
    return request.param


def _grid(number: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 8, (number, 3))


def _steps(features: np.ndarray) -> np.ndarray:
    """A function with kinks, as tiles make them."""
    return 0.3 * np.floor(features[:, 0]) / 8 + np.where(features[:, 1] > 4, 0.2, 0.0)


def test_forest_predicts_what_its_library_predicts() -> None:
    features, weight = _grid(40), np.ones(40)
    forest = fit_forest(features, _steps(features), weight)
    queries = _grid(100, seed=1)
    library = ExtraTreesRegressor(n_estimators=40, random_state=0)
    library.fit(features, on_grid(_steps(features)), sample_weight=weight)
    assert forest.predict(queries) == pytest.approx(library.predict(queries), abs=1e-12)
    assert np.array_equal(replace(forest, fitted=()).predict(queries), forest.predict(queries))


def test_boosted_trees_predict_the_same_from_what_is_kept_of_them() -> None:
    if tree_model() != "xgboost":
        pytest.skip("xgboost is not installed")
    features, queries = _grid(400), _grid(100, seed=1)
    trees = fit_trees(features, _steps(features), np.ones(400), np.arange(400))
    assert isinstance(trees.model, Boosted)
    assert np.array_equal(
        replace(trees.model, fitted=None).predict(queries), trees.predict(queries)
    )


def test_forest_returns_its_samples_and_means_of_equal_shapes_by_weight() -> None:
    features = np.array([[0.0], [1.0], [1.0], [2.0]])
    values, weight = np.array([0.5, 0.0, 1.0, 0.7]), np.array([1.0, 1.0, 3.0, 1.0])
    result = fit_forest(features, values, weight).predict(features[[0, 1, 3]])
    assert result == pytest.approx([0.5, 0.75, 0.7])


def test_forest_never_leaves_the_range_of_its_samples() -> None:
    features = _grid(40)
    values = _steps(features)
    result = fit_forest(features, values, np.ones(40)).predict(10 * _grid(50, seed=1) - 40)
    assert values.min() - 1e-9 <= result.min() <= result.max() <= values.max() + 1e-9


def test_forest_is_deterministic() -> None:
    features, queries = _grid(40), _grid(100, seed=1)
    first, second = (
        fit_forest(features, _steps(features), np.ones(40)).predict(queries) for _ in range(2)
    )
    assert np.array_equal(first, second)


@pytest.mark.parametrize("number", [100, 1000])
def test_trees_are_deterministic(number: int, kind: str) -> None:
    features, queries = _grid(number), _grid(100, seed=1)
    shape = np.arange(number)
    first, second = (
        fit_trees(features, _steps(features), np.ones(number), shape) for _ in range(2)
    )
    assert np.array_equal(first.predict(queries), second.predict(queries))
    assert np.array_equal(first.held_out_residuals, second.held_out_residuals)


def test_trees_learn_kinks_and_tell_their_error(kind: str) -> None:
    features = _grid(400)
    values = _steps(features) + 0.02 * np.random.default_rng(2).normal(size=400)
    trees = fit_trees(features, values, np.ones(400), np.arange(400))
    assert trees.name == kind
    queries = _grid(400, seed=1)
    error = np.median(np.abs(trees.predict(queries) - _steps(queries)))
    assert error < 0.02
    # Measured shapes are noisy too, and each left-out booster saw half of them.
    held_out = np.median(np.abs(trees.held_out_residuals))
    assert error < held_out < 0.05


def _repeated() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shapes whose values have nothing to do with each other: only a repeat tells of a repeat."""
    rng = np.random.default_rng(4)
    shape = np.repeat(np.arange(80), NUM_REPEATS)
    values = rng.choice([-0.5, 0.5], 80)[shape]
    order = rng.permutation(len(shape))
    return _grid(80)[shape][order], values[order], shape[order]


def test_repeats_of_a_shape_stay_on_one_side_of_a_fold(kind: str) -> None:
    features, values, shape = _repeated()
    trees = fit_trees(features, values, np.ones(len(values)), shape)
    # An unseen shape is a coin toss: half of the residuals miss by the whole step.
    assert np.mean(np.abs(trees.held_out_residuals) > 0.5) > 0.3
    # Were repeats dealt apart, each would be known from the others.
    apart = fit_trees(features, values, np.ones(len(values)), np.arange(len(values)))
    assert np.mean(np.abs(apart.held_out_residuals) > 0.5) < 0.2  # XGBoost 3.2: 0.14, 3.4: 0.17


def test_repeats_of_a_shape_share_a_fold_whatever_their_order(kind: str) -> None:
    features, values, shape = _repeated()
    trees = fit_trees(features, values, np.ones(len(values)), shape)
    for number in range(80):
        residuals = trees.held_out_residuals[shape == number]
        assert np.ptp(residuals) < 1e-6, "one booster predicted all of them"


def test_a_few_slow_repeats_are_ignored(kind: str) -> None:
    rng = np.random.default_rng(6)
    points = _grid(100)
    shape = np.repeat(np.arange(100), NUM_REPEATS + 1)
    clean = _steps(points)[shape] + 0.005 * rng.normal(size=len(shape))
    slow = clean + np.where(np.arange(len(shape)) % (NUM_REPEATS + 1) == 0, np.log(3.0), 0.0)
    trees = fit_trees(points[shape], slow, np.ones(len(shape)), shape)
    bias = np.median(trees.predict(points) - _steps(points))
    # A mean would be off by a fifth of log 3, 22 %.
    assert abs(bias) < 0.05  # XGBoost 3.4: 0.031


def test_samples_of_little_weight_hardly_count(kind: str) -> None:
    features = np.repeat(_grid(80), 2, axis=0)
    values = np.tile([0.0, 1.0], 80)
    shape = np.repeat(np.arange(80), 2)
    for heavy, expected in ((0, 0.0), (1, 1.0)):
        weight = np.where(values == heavy, 1.0, 0.05)
        result = fit_trees(features, values, weight, shape).predict(features)
        assert np.median(result) == pytest.approx(expected, abs=0.1)
