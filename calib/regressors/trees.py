"""Trees over shapes, for many samples: they learn kinks and preferred sizes.

For few samples, extremely randomised trees (Geurts et al., 2006) complement the Gaussian process,
which is smooth where they are not; the mean of both in log time is better than either.

For many samples, boosted trees of XGBoost if it is installed, else that forest of scikit-learn. One
model of all samples predicts. Two smaller ones, each trained on one half of the shapes, estimate
its error: every sample's residual comes from the one that was not trained on its shape. Beyond the
largest sample, where trees are constant, half of the prediction is that of a line through the
larger half of samples: trees end in the mean of a few samples at the edge, and which these are
changes with every draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from .robust import on_grid

Vector = NDArray[np.float64]
_SEED = 0
"""Arbitrary fixed seed, for reproducibility."""
_NUM_TREES = 40
"""Number of trees. 20 or 80 change errors by 0.1 points at most, and each tree costs time per
prediction (benchmarks/RESULTS.md)."""
_LEAF = -1
_NUM_FOLDS = 2
"""Number of folds: each shape is held out once, at the price of two more fits."""
_MANY = 1000
"""Samples from which more and smaller boosting steps are worth their time."""
_ROUNDING = 1e-9
"""Relative tolerance, so that rounding does not decide on which side of a threshold a value is."""

_RIDGE = 30.0
"""Samples that the prior of zero slope is worth, in each direction: a tenth of the least number in
the larger half of a pool with trees."""
_FRAC = 0.5
"""Weight of the line beyond the samples: from small to large products of A100 and H100, trees alone
are off by 8.6 %, both together by 7.7, the line alone by more than either."""
_LEAST_DEVIATION = 1e-9
"""Lower bound of a feature's deviation; a constant feature has no slope."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Trees of one pool, with their nodes concatenated."""

    roots: NDArray[np.int64]
    lower: NDArray[np.int64]
    """Node for features of at most the threshold; -1 at a leaf."""
    upper: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    value: NDArray[np.float64]
    fitted: Sequence[_Tree] = field(default=(), metadata={"is_kept": False})
    """The trees as scikit-learn evaluates them, faster for many rows; not serialised."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean over the trees, ``(rows,)``, without scikit-learn's checks, which cost
        more than the trees."""
        rows = features.astype(np.float32)
        total = np.zeros(len(rows))
        for tree in self.fitted:
            total += tree.predict(rows)[:, 0]
        if not self.fitted:
            for values in self._walked(rows):
                total += values
        return total / len(self.roots)

    def _walked(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the leaf's value of each row, ``(trees, rows)``."""
        nodes = np.repeat(self.roots[:, np.newaxis], len(rows), axis=1)
        every = np.arange(len(rows))
        while (inner := self.lower[nodes] != _LEAF).any():
            feature_values = rows[every, self.feature[nodes]]
            below = np.where(
                feature_values <= self.threshold[nodes], self.lower[nodes], self.upper[nodes]
            )
            nodes = np.where(inner, below, nodes)
        return self.value[nodes]


class _Tree(Protocol):
    """The interface of scikit-learn's trees that is used."""

    def predict(self, rows: NDArray[np.float32], /) -> NDArray[np.float64]: ...


def fit_forest(
    features: NDArray[np.float64], values: NDArray[np.float64], weight: NDArray[np.float64]
) -> Forest:
    """Fit all trees on all samples.

    Values are rounded to a millionth, so that splits into the same halves score exactly equal: the
    order of features decides between them, not the last digits.
    """
    from sklearn.ensemble import ExtraTreesRegressor  # slow to import

    model = ExtraTreesRegressor(n_estimators=_NUM_TREES, random_state=_SEED, n_jobs=1)
    model.fit(features, on_grid(values), sample_weight=weight.astype(np.float32))
    trees = [one.tree_ for one in model.estimators_]
    roots = np.cumsum([0, *(tree.node_count for tree in trees)])[:-1]

    def joined(name: str) -> NDArray[np.int64]:
        parts = [getattr(tree, name) for tree in trees]
        return np.concatenate(
            [
                np.where(part == _LEAF, _LEAF, part + root)
                for part, root in zip(parts, roots, strict=True)
            ]
        )

    return Forest(
        roots=roots,
        lower=joined("children_left"),
        upper=joined("children_right"),
        feature=np.maximum(np.concatenate([tree.feature for tree in trees]), 0),
        threshold=np.concatenate([tree.threshold for tree in trees]),
        value=np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        fitted=trees,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """The trees of one pool."""

    name: str
    """``xgboost`` or ``forest``."""
    model: _Model
    held_out_residuals: NDArray[np.float64]
    """Residual of each sample from a model that was not trained on its shape."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return predicted values, ``(rows,)``."""
        return np.asarray(self.model.predict(features), dtype=np.float64)


def fit_trees(
    features: NDArray[np.float64],
    values: NDArray[np.float64],
    weight: NDArray[np.float64],
    shape: NDArray[np.int64],
) -> Trees:
    """Fit trees robustly to a few slow repeats of a shape.

    ``shape`` numbers the distinct shapes: repeats of one stay in one fold. Values are rounded to a
    millionth, so that last digits decide no split.
    """
    values = on_grid(values)
    steps = (150, 0.1) if len(values) >= _MANY else (60, 0.2)
    check = (80, 0.15) if len(values) >= _MANY else (40, 0.25)
    order = np.random.default_rng(_SEED).permutation(int(shape.max()) + 1)
    fold = order[shape] % _NUM_FOLDS
    held_out_residuals = np.empty(len(values))
    for k in range(_NUM_FOLDS):
        out = fold == k
        model = _fit(features[~out], values[~out], weight[~out], shape[~out], check)
        held_out_residuals[out] = values[out] - model.predict(features[out])
    model = _fit(features, values, weight, shape, steps)
    return Trees(name=tree_model(), model=model, held_out_residuals=held_out_residuals)


def tree_model() -> str:
    """Return the model used for many shapes: ``xgboost``, or ``forest`` if that cannot be used."""
    return "forest" if xgboost() is None else "xgboost"


@cache
def xgboost() -> Any:
    """Return the library, imported on first use; None if it cannot be used."""
    try:
        import xgboost as library
    except Exception as err:
        # It is missing, or a library that it links to is; XGBoost then raises an error of its own,
        # whose class cannot be imported here.
        is_xgboost_error = type(err).__module__.partition(".")[0] == "xgboost"
        if not (is_xgboost_error or isinstance(err, (ImportError, OSError))):
            raise
        return None
    return library


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boosted:
    """Boosted trees of XGBoost."""

    raw: NDArray[np.uint8]
    """Bytes as the library serialises them."""
    fitted: Any = field(default=None, metadata={"is_kept": False})
    """The library's own object; not serialised."""

    def predict(self, features: NDArray[np.float64], /) -> NDArray[np.floating]:
        """Return values, ``(rows,)``; raise ``CalibrationError`` if the library is missing."""
        booster = self.fitted
        if booster is None:
            library = xgboost()
            if library is None:
                raise CalibrationError("these trees need xgboost; pip install xgboost-cpu")
            booster = library.Booster()
            booster.load_model(bytearray(self.raw.tobytes()))
        return np.asarray(booster.inplace_predict(features))


class _Model(Protocol):
    def predict(self, features: NDArray[np.float64], /) -> NDArray[np.floating]: ...


def _fit(
    features: NDArray[np.float64],
    values: NDArray[np.float64],
    weight: NDArray[np.float64],
    shape: NDArray[np.int64],
    steps: tuple[int, float],
) -> _Model:
    library = xgboost()
    if library is None:
        return fit_forest(features, _medians(values, weight, shape), weight)
    model = library.XGBRegressor(
        n_estimators=steps[0],
        learning_rate=steps[1],
        max_depth=6,
        min_child_weight=2,
        colsample_bynode=0.6,
        max_bin=64,
        objective="reg:absoluteerror",
        tree_method="hist",
        n_jobs=1,
        random_state=_SEED,
    )
    booster = model.fit(features, values, sample_weight=weight).get_booster()
    raw = np.frombuffer(bytes(booster.save_raw("ubj")), dtype=np.uint8)
    return Boosted(raw=raw, fitted=booster)


def _medians(
    values: NDArray[np.float64], weight: NDArray[np.float64], shape: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the weighted median of each sample's shape, ``(rows,)``.

    >>> _medians(np.array([1.0, 2.0, 9.0, 4.0]), np.ones(4), np.array([0, 0, 0, 1])).tolist()
    [2.0, 2.0, 2.0, 4.0]
    """
    order = np.lexsort((values, shape))
    _, first, group = np.unique(shape[order], return_index=True, return_inverse=True)
    group = group.reshape(-1)
    summed = np.cumsum(weight[order])
    below = (summed - weight[order])[first]
    share = (summed - below[group]) / np.add.reduceat(weight[order], first)[group]
    # If the weights below and above a gap are equal, use its middle.
    low, high = (
        values[order][first + np.add.reduceat(share < half, first)]
        for half in (0.5 - _ROUNDING, 0.5 + _ROUNDING)
    )
    medians = np.empty(len(values))
    medians[order] = ((low + high) / 2)[group]
    return medians


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Line:
    """A line of values over features, ``(features,)`` each, constant outside the samples' range."""

    intercept: float
    slopes: Vector
    """Change of the value per deviation of a feature."""
    middle: Vector
    deviation: Vector
    lowest: Vector
    highest: Vector

    def predict(self, features: NDArray[np.float64]) -> Vector:
        """Return values, ``(rows,)``."""
        inside = np.clip(features, self.lowest, self.highest)
        return self.intercept + (inside - self.middle) / self.deviation @ self.slopes

    def joined(self, features: NDArray[np.float64], by_trees: Vector) -> Vector:
        """Return the trees' values, ``(rows,)``, averaged with the line's from a doubling beyond
        their samples."""
        frac = _FRAC * np.minimum(self.octaves_beyond(features), 1.0)
        return by_trees + frac * (self.predict(features) - by_trees)

    def octaves_beyond(self, features: NDArray[np.float64]) -> Vector:
        """Return the doublings beyond the largest sample in the first feature, a natural log,
        ``(rows,)``."""
        return np.maximum(features[:, 0] - self.highest[0], 0.0) / np.log(2.0)


def fit_line(features: NDArray[np.float64], values: Vector) -> Line:
    """Fit the ridge line of the samples above the median in the first feature.

    >>> x = np.column_stack([np.arange(100.0), np.zeros(100)])
    >>> line = fit_line(x, 0.5 * np.maximum(x[:, 0], 50.0))
    >>> line.predict(np.array([[74.5, 0.0]])).tolist()
    [37.25]
    """
    middle, deviation = features.mean(axis=0), features.std(axis=0)
    deviation = np.maximum(deviation, _LEAST_DEVIATION)
    large = features[:, 0] >= np.median(features[:, 0])
    scaled = (features[large] - middle) / deviation
    center, level = scaled.mean(axis=0), float(values[large].mean())
    moved = scaled - center
    normal = moved.T @ moved + _RIDGE * np.eye(moved.shape[1])
    slopes = np.linalg.solve(normal, moved.T @ (values[large] - level))
    return Line(
        intercept=level - float(center @ slopes),
        slopes=slopes,
        middle=middle,
        deviation=deviation,
        lowest=features.min(axis=0),
        highest=features.max(axis=0),
    )
