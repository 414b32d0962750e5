"""Boosted trees over shapes: what many samples say, kinks and preferred sizes included.

The samples are dealt into folds by shape and one booster is trained without each; their mean
predicts, and each sample's residual comes from the booster that did not see it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xgboost import XGBRegressor

_SEED = 0
_MANY = 600
"""Samples from which four boosters of eighty trees are worth their time over two of forty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """Boosters of one pool."""

    boosters: tuple[XGBRegressor, ...]
    left_out: NDArray[np.float64]
    """Residual of each sample from the booster that did not see its shape."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over the boosters, ``(rows,)``."""
        found = [booster.predict(features) for booster in self.boosters]
        return np.mean(found, axis=0, dtype=np.float64)


def fit_trees(
    features: NDArray[np.float64],
    values: NDArray[np.float64],
    weight: NDArray[np.float64],
    shape: NDArray[np.int64],
) -> Trees:
    """Fit for the least absolute error, which a few slow repeats of a shape do not move.

    ``shape`` numbers the distinct shapes: repeats of one stay on one side of a fold.
    """
    num_folds, num_trees, rate = (4, 80, 0.15) if len(values) >= _MANY else (2, 40, 0.25)
    order = np.random.default_rng(_SEED).permutation(int(shape.max()) + 1)
    fold = order[shape] % num_folds
    left_out = np.empty(len(values))
    boosters = []
    for k in range(num_folds):
        out = fold == k
        booster = _booster(num_trees, rate).fit(
            features[~out], values[~out], sample_weight=weight[~out]
        )
        left_out[out] = values[out] - booster.predict(features[out])
        boosters.append(booster)
    return Trees(boosters=tuple(boosters), left_out=left_out)


def _booster(num_trees: int, rate: float) -> XGBRegressor:
    return XGBRegressor(
        n_estimators=num_trees,
        learning_rate=rate,
        max_depth=6,
        min_child_weight=2,
        colsample_bynode=0.6,
        max_bin=64,
        objective="reg:absoluteerror",
        tree_method="hist",
        n_jobs=1,
        random_state=_SEED,
    )
