"""Extremely randomised trees (Geurts et al., 2006): a second opinion beside the process.

Where the process is smooth they are not, and the mean of both in log time is better than either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from .choices import on_grid

_SEED = 0
_NUM_TREES = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Trees of one pool."""

    model: ExtraTreesRegressor

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over the trees, ``(rows,)``; without the checks that cost more than the trees."""
        rows = features.astype(np.float32)
        total = np.zeros(len(rows))
        for tree in self.model.estimators_:
            total += tree.tree_.predict(rows)[:, 0]
        return total / _NUM_TREES


def fit_forest(
    features: NDArray[np.float64], values: NDArray[np.float64], weight: NDArray[np.float64]
) -> Forest:
    """Fit all trees on all samples.

    Splits into the same halves are exactly as good as each other, since values are taken to a
    millionth: the order of features decides between them, not the last digits.
    """
    model = ExtraTreesRegressor(n_estimators=_NUM_TREES, random_state=_SEED, n_jobs=1)
    fitted = model.fit(features, on_grid(values), sample_weight=weight.astype(np.float32))
    return Forest(model=fitted)
