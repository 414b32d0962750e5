"""Efficiency of one operator kind and phase: the law's time over the measured one, in log.

Learning the ratio and not the time is what lets few samples go far: trees that learn time cannot
leave the range that they have seen, trees that learn efficiency leave that to the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor
from xgboost import XGBRegressor

from .features import LAW_COLUMN

FEWEST_FOR_FOREST = 4
FEWEST_FOR_BOOSTING = 25
_NUM_TREES = 20
_NUM_FOLDS = 3
_SEED = 0
_HALF_TRUST_SHAPES = 1.0
"""Shapes at which a forest's detail counts half; below, the median efficiency leads."""


class Shape(Protocol):
    """What a fitted regressor answers: log efficiency relative to the median, ``(rows,)``."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Regressor:
    """A fitted model of log efficiency."""

    name: str
    """``median``, ``forest`` or ``xgboost``."""
    center: float
    """Weighted median of log efficiency."""
    detail: Shape | None
    trust: float
    held_out: NDArray[np.float64]
    """Residual of each sample when it was left out, in log; empty below two samples."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log efficiency less ``center``, ``(rows,)``."""
        if self.detail is None:
            return np.zeros(len(features))
        return self.trust * np.asarray(self.detail.predict(features), dtype=np.float64)


def fit_regressor(
    features: NDArray[np.float64], log_efficiency: NDArray[np.float64], weight: NDArray[np.float64]
) -> Regressor:
    """Fit by the number of distinct shapes: median, forest from 4, monotone boosting from 25."""
    center = weighted_median(log_efficiency, weight)
    target, number = log_efficiency - center, len(log_efficiency)
    if number < FEWEST_FOR_FOREST:
        return Regressor(
            name="median",
            center=center,
            detail=None,
            trust=0.0,
            held_out=_held_out_median(log_efficiency, weight),
        )
    if number < FEWEST_FOR_BOOSTING:
        trust = number / (number + _HALF_TRUST_SHAPES)
        forest = _forest().fit(features, target, sample_weight=weight)
        held_out = target - trust * _out_of_bag(forest, features)
        return Regressor(
            name="forest", center=center, detail=forest, trust=trust, held_out=held_out
        )
    detail = _boosting(features.shape[1]).fit(features, target, sample_weight=weight)
    return Regressor(
        name="xgboost",
        center=center,
        detail=detail,
        trust=1.0,
        held_out=_held_out_boosting(features, target, weight),
    )


def weighted_median(values: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    """Where half of the weight is reached; the mean of two values where it is reached exactly.

    >>> weighted_median(np.array([3.0, 1.0, 2.0]), np.ones(3))
    2.0
    """
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    low = order[np.searchsorted(total, total[-1] / 2 * (1 - 1e-12))]
    high = order[min(np.searchsorted(total, total[-1] / 2 * (1 + 1e-12)), len(order) - 1)]
    return float((values[low] + values[high]) / 2)


def _forest() -> RandomForestRegressor:
    return RandomForestRegressor(n_estimators=_NUM_TREES, random_state=_SEED, n_jobs=1)


def _boosting(num_columns: int) -> XGBRegressor:
    constraints = [0] * num_columns
    constraints[LAW_COLUMN] = 1
    return XGBRegressor(
        n_estimators=100,
        max_depth=4,
        learning_rate=0.1,
        min_child_weight=0.5,
        reg_lambda=0.3,
        monotone_constraints=tuple(constraints),
        tree_method="exact",
        n_jobs=1,
        random_state=_SEED,
    )


def _held_out_median(
    log_efficiency: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    if len(log_efficiency) < 2:
        return np.empty(0)
    rows = np.arange(len(log_efficiency))
    return np.array(
        [
            log_efficiency[i] - weighted_median(log_efficiency[rows != i], weight[rows != i])
            for i in rows
        ]
    )


def _out_of_bag(
    forest: RandomForestRegressor, features: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Mean of the trees that did not see a row; 0, the median, where all of them did."""
    total, number = np.zeros(len(features)), np.zeros(len(features))
    rows = features.astype(np.float32)
    for tree, seen in zip(forest.estimators_, forest.estimators_samples_, strict=True):
        out = np.ones(len(features), bool)
        out[seen] = False
        total[out] += tree.tree_.predict(rows[out]).ravel()
        number[out] += 1
    return total / np.maximum(number, 1)


def _held_out_boosting(
    features: NDArray[np.float64], target: NDArray[np.float64], weight: NDArray[np.float64]
) -> NDArray[np.float64]:
    fold = np.random.default_rng(_SEED).permutation(len(target)) % _NUM_FOLDS
    residual = np.empty(len(target))
    for k in range(_NUM_FOLDS):
        out = fold == k
        model = _boosting(features.shape[1]).fit(
            features[~out], target[~out], sample_weight=weight[~out]
        )
        residual[out] = target[out] - model.predict(features[out])
    return residual
