"""Extremely randomised trees (Geurts et al., 2006): a second opinion beside the process.

Where the process is smooth they are not, and the mean of both in log time is better than either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .choices import on_grid

_SEED = 0
"""Any: the same rows give the same trees."""
_NUM_TREES = 40
"""20 or 80 move errors by 0.1 points at most, and each tree costs a walk per answer
(benchmarks/sensitivity.py)."""
_LEAF = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Trees of one pool, their nodes one after the other."""

    roots: NDArray[np.int64]
    lower: NDArray[np.int64]
    """The node where the feature is at most the threshold; -1 at a leaf."""
    upper: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    value: NDArray[np.float64]
    fitted: Sequence[_Tree] = field(default=(), metadata={"is_kept": False})
    """The same trees as scikit-learn walks them, faster where many are asked; not in a file."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mean over the trees, ``(rows,)``; without the checks that cost more than the trees."""
        rows = features.astype(np.float32)
        total = np.zeros(len(rows))
        for tree in self.fitted:
            total += tree.predict(rows)[:, 0]
        if not self.fitted:
            for values in self._walked(rows):
                total += values
        return total / len(self.roots)

    def _walked(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """The leaf's value of each row, ``(trees, rows)``."""
        nodes = np.repeat(self.roots[:, np.newaxis], len(rows), axis=1)
        every = np.arange(len(rows))
        while (inner := self.lower[nodes] != _LEAF).any():
            asked = rows[every, self.feature[nodes]]
            below = np.where(asked <= self.threshold[nodes], self.lower[nodes], self.upper[nodes])
            nodes = np.where(inner, below, nodes)
        return self.value[nodes]


class _Tree(Protocol):
    """What of scikit-learn's trees is used."""

    def predict(self, rows: NDArray[np.float32], /) -> NDArray[np.float64]: ...


def fit_forest(
    features: NDArray[np.float64], values: NDArray[np.float64], weight: NDArray[np.float64]
) -> Forest:
    """Fit all trees on all samples.

    Splits into the same halves are exactly as good as each other, since values are taken to a
    millionth: the order of features decides between them, not the last digits.
    """
    from sklearn.ensemble import ExtraTreesRegressor  # dearer than an answer of a fit that was kept

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
