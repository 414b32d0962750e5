"""Boosted trees over shapes: what many samples say, kinks and preferred sizes included.

One booster of all samples predicts.  Two lesser ones, each trained on one half of the shapes, tell
how far it may be wrong: every sample's residual comes from the one that did not see its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xgboost import XGBRegressor

from .choices import on_grid

_SEED = 0
_NUM_FOLDS = 2
_MANY = 1000
"""Samples from which more and slower steps are worth their time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """The booster of one pool."""

    booster: XGBRegressor
    left_out: NDArray[np.float64]
    """Residual of each sample from a booster that did not see its shape."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values, ``(rows,)``."""
        return np.asarray(self.booster.predict(features), dtype=np.float64)


def fit_trees(
    features: NDArray[np.float64],
    values: NDArray[np.float64],
    weight: NDArray[np.float64],
    shape: NDArray[np.int64],
) -> Trees:
    """Fit for the least absolute error, which a few slow repeats of a shape do not move.

    ``shape`` numbers the distinct shapes: repeats of one stay on one side of a fold.  Values are
    taken to a millionth, so that last digits decide on no split.
    """
    values = on_grid(values)
    steps = (150, 0.1) if len(values) >= _MANY else (60, 0.2)
    check = (80, 0.15) if len(values) >= _MANY else (40, 0.25)
    order = np.random.default_rng(_SEED).permutation(int(shape.max()) + 1)
    fold = order[shape] % _NUM_FOLDS
    left_out = np.empty(len(values))
    for k in range(_NUM_FOLDS):
        out = fold == k
        booster = _booster(*check)
        booster.fit(features[~out], values[~out], sample_weight=weight[~out])
        left_out[out] = values[out] - booster.predict(features[out])
    booster = _booster(*steps)
    booster.fit(features, values, sample_weight=weight)
    return Trees(booster=booster, left_out=left_out)


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
