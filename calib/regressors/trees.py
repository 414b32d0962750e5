"""Trees over shapes: what many samples say, kinks and preferred sizes included.

Boosted trees of XGBoost where it is installed, else a forest of scikit-learn.  One model of all
samples predicts.  Two lesser ones, each trained on one half of the shapes, tell how far it may be
wrong: every sample's residual comes from the one that did not see its shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from .choices import on_grid
from .forest import fit_forest

_SEED = 0
"""Any: the same rows give the same trees."""
_NUM_FOLDS = 2
"""Halves: each shape is left out once, at the price of two more fits."""
_MANY = 1000
"""Samples from which more and slower steps are worth their time."""
_ROUNDING = 1e-9
"""Relative; a threshold lies on neither side of a value by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """The trees of one pool."""

    name: str
    """``xgboost`` or ``forest``."""
    model: _Model
    left_out: NDArray[np.float64]
    """Residual of each sample from a model that did not see its shape."""

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values, ``(rows,)``."""
        return np.asarray(self.model.predict(features), dtype=np.float64)


def fit_trees(
    features: NDArray[np.float64],
    values: NDArray[np.float64],
    weight: NDArray[np.float64],
    shape: NDArray[np.int64],
) -> Trees:
    """Fit so that a few slow repeats of a shape do not move the model.

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
        model = _fit(features[~out], values[~out], weight[~out], shape[~out], check)
        left_out[out] = values[out] - model.predict(features[out])
    model = _fit(features, values, weight, shape, steps)
    return Trees(name=tree_model(), model=model, left_out=left_out)


def tree_model() -> str:
    """Which model learns many shapes here: ``xgboost``, or ``forest`` where that cannot be used."""
    return "forest" if xgboost() is None else "xgboost"


@cache
def xgboost() -> Any:
    """The library; None where it cannot be used.  Imported where many shapes are first met."""
    try:
        import xgboost as library
    except Exception as err:
        # Absent, or what it links to is; a library that is gone raises an error of its own, which
        # cannot be imported to be named here.
        is_its_own = type(err).__module__.partition(".")[0] == "xgboost"
        if not (is_its_own or isinstance(err, (ImportError, OSError))):
            raise
        return None
    return library


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boosted:
    """Boosted trees of XGBoost."""

    raw: NDArray[np.uint8]
    """As the library writes them."""
    fitted: Any = field(default=None, metadata={"is_kept": False})
    """The library's own object; not in a file."""

    def predict(self, features: NDArray[np.float64], /) -> NDArray[np.floating]:
        """Values, ``(rows,)``; ``CalibrationError`` where the library is gone."""
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
    """For each sample the median of its shape by weight, ``(rows,)``.

    >>> _medians(np.array([1.0, 2.0, 9.0, 4.0]), np.ones(4), np.array([0, 0, 0, 1])).tolist()
    [2.0, 2.0, 2.0, 4.0]
    """
    order = np.lexsort((values, shape))
    _, first, group = np.unique(shape[order], return_index=True, return_inverse=True)
    group = group.reshape(-1)
    summed = np.cumsum(weight[order])
    below = (summed - weight[order])[first]
    share = (summed - below[group]) / np.add.reduceat(weight[order], first)[group]
    # Where the weights below and above a gap are equal, its middle.
    low, high = (
        values[order][first + np.add.reduceat(share < half, first)]
        for half in (0.5 - _ROUNDING, 0.5 + _ROUNDING)
    )
    found = np.empty(len(values))
    found[order] = ((low + high) / 2)[group]
    return found
