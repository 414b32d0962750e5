"""Sizes that were met in one step or two, judged together with those beside them.

Routed tokens give operators and exchanges another size in nearly every pass.  Each of these sizes
is then one event: what a neighbour on the machine cost it, or waiting, cannot be told from its time
as the median over steps tells it elsewhere.  The middle of the nearest sizes can.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..workload import GroupRole, OperatorKind
from .columns import parse_shape
from .reduce import MAD_TO_SIGMA, MEDIAN_OVER_MEAN, spread_of_error

_FEW_STEPS = 4
"""A median over as many is not moved by one bad step; below, sizes need their neighbours."""
_NUM_NEAR, _NUM_NEAR_EXCHANGES = 9, 17
"""Sizes that are taken together: four of them may be disturbed before what is taken of them is."""
_LEAST_NEAR = 4
"""Fewer sizes than this tell nothing of each other."""
_REACH_LOG = np.log(2.0)
"""Sizes more than a doubling apart may run on other kernels."""
_MOST_FOR_SLOPE = 200
"""Pairs of so many sizes; more tell the slope no better."""
_ROWS_AT: dict[str, int] = {
    OperatorKind.GROUPED_LINEAR.value: 1,
    OperatorKind.LINEAR_FC1.value: 0,
    OperatorKind.LINEAR_FC2.value: 0,
    OperatorKind.ACTIVATION.value: 0,
    OperatorKind.PERMUTE.value: 0,
}
"""Operators of layers of experts, and where their shape has the rows that arrived."""
_ROLES = (GroupRole.EP.value, GroupRole.EXPERT_TP.value, GroupRole.EXPERT_TP_EP.value)
_LIKE = ["run_id", "window", "kind", "phase", "element_nbytes", "stage", "role", "num_ranks"]
_LIKE += ["span", "num_nodes", "is_bound", "is_probe"]

Vector = NDArray[np.float64]


def with_neighbours(samples: pd.DataFrame) -> pd.DataFrame:
    """The rows of ``samples``; times of routed sizes that few steps had are those of the sizes near
    them, and ``spread_log`` is what leaves the error of that.

    Of operators it is their median.  Exchanges of one size are of two kinds, there and back, and a
    step pays for both: there it is the mean of the middle half.

    All other rows stay as they are.  Along a size, time is taken to grow as a power between 0 and
    1, by the median slope between sizes (Theil 1950, Sen 1968).
    """
    size = _routed_sizes(samples)
    varied = samples[size > 0].assign(size=size[size > 0], rest=_rest_of_shape(samples[size > 0]))
    times, spreads = samples["time_s"].copy(), samples["spread_log"].copy()
    for _, rows in varied.groupby([*_LIKE, "rest"], sort=True):
        is_few = (rows["num_steps"] < _FEW_STEPS).to_numpy()
        if is_few.sum() < _LEAST_NEAR:
            continue
        time_s, error_log = _judged(rows)
        times.loc[rows.index[is_few]] = time_s[is_few]
        spreads.loc[rows.index[is_few]] = spread_of_error(rows, error_log)[is_few]
    return samples.assign(time_s=times, spread_log=spreads)


def _judged(rows: pd.DataFrame) -> tuple[Vector, Vector]:
    """Time of each size by those near it, and the error of its log; both ``(rows,)``."""
    size, log_time = np.log(rows["size"].to_numpy(float)), np.log(rows["time_s"].to_numpy(float))
    level = log_time - _slope(size, log_time) * size
    order = np.argsort(size, kind="stable")
    if (rows["row"] == "collective").all():
        held = _levels_near(size[order], level[order], _NUM_NEAR_EXCHANGES)
        middle = _middle_mean(held)
    else:
        held = _levels_near(size[order], level[order], _NUM_NEAR)
        middle = np.nanmedian(held, axis=1)
    deviation = MAD_TO_SIGMA * np.nanmedian(np.abs(held - middle[:, np.newaxis]), axis=1)
    number = np.isfinite(held).sum(axis=1)
    found, errors = np.empty(len(rows)), np.empty(len(rows))
    found[order] = np.exp(log_time[order] + middle - level[order])
    errors[order] = MEDIAN_OVER_MEAN * deviation / np.sqrt(number)
    return found, errors


def _middle_mean(held: NDArray[np.float64]) -> Vector:
    """Log of the mean time of each row's middle half; a quarter may be disturbed before it is."""
    ordered, number = np.sort(held, axis=1), np.isfinite(held).sum(axis=1, keepdims=True)
    cut = number // 4
    place = np.arange(held.shape[1])
    is_kept = (place >= cut) & (place < number - cut)
    sums = np.where(is_kept, np.exp(ordered), 0.0).sum(axis=1)
    return np.log(sums / is_kept.sum(axis=1))


def _levels_near(size: Vector, level: Vector, most: int) -> NDArray[np.float64]:
    """Levels of the nearest of ascending sizes, ``(rows, near)``, NaN where there are fewer; a size
    with hardly any others beside it has its own alone."""
    number = len(size)
    beside = np.arange(1 - most, most)
    places = np.arange(number)[:, np.newaxis] + beside
    is_there = (places >= 0) & (places < number)
    places = places.clip(0, number - 1)
    apart = np.where(is_there, np.abs(size[places] - size[:, np.newaxis]), np.inf)
    near = np.argsort(apart, axis=1, kind="stable")[:, :most]
    is_near = np.take_along_axis(apart, near, axis=1) <= _REACH_LOG
    held = np.where(is_near, level[np.take_along_axis(places, near, axis=1)], np.nan)
    is_alone = is_near.sum(axis=1) < _LEAST_NEAR
    held[is_alone] = np.nan
    held[is_alone, 0] = level[is_alone]
    return held


def _slope(size: Vector, log_time: Vector) -> float:
    """Median slope of log time along log size between all pairs, 0 to 1."""
    if len(size) > _MOST_FOR_SLOPE:
        kept = np.linspace(0, len(size) - 1, _MOST_FOR_SLOPE).round().astype(int)
        order = np.argsort(size, kind="stable")[kept]
        size, log_time = size[order], log_time[order]
    first, second = np.triu_indices(len(size), 1)
    apart = size[second] - size[first]
    is_apart = np.abs(apart) > 0
    slopes = (log_time[second] - log_time[first])[is_apart] / apart[is_apart]
    return float(np.clip(np.median(slopes), 0.0, 1.0)) if len(slopes) else 0.0


def _routed_sizes(samples: pd.DataFrame) -> NDArray[np.int64]:
    """Rows that arrived or bytes that were exchanged; 0 for what is not routed."""
    out = np.zeros(len(samples), dtype=np.int64)
    kinds, shapes = samples["kind"].tolist(), samples["shape"].tolist()
    roles, nbytes = samples["role"].tolist(), samples["nbytes"].tolist()
    for place, (kind, shape, role) in enumerate(zip(kinds, shapes, roles, strict=True)):
        if kind in _ROWS_AT:
            out[place] = parse_shape(shape)[_ROWS_AT[kind]]
        elif role in _ROLES:
            out[place] = nbytes[place]
    return out


def _rest_of_shape(samples: pd.DataFrame) -> list[str]:
    found = []
    for kind, shape in zip(samples["kind"], samples["shape"], strict=True):
        sizes = shape.split("x")
        if kind in _ROWS_AT:
            sizes[_ROWS_AT[kind]] = ""
        found.append("x".join(sizes))
    return found
