"""Smoothing of sizes that occurred in only one step or two, over their neighbours.

Routed tokens give operators and exchanges another size in nearly every pass, so that each size is a
single event. A median over steps, which removes interference and waits elsewhere, is not available
for it; the middle of the nearest sizes is used instead.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..workload.collectives import GroupRole
from ..workload.operators import OperatorKind
from .columns import parse_shape
from .reduce import MAD_TO_SIGMA, MEDIAN_OVER_MEAN, spread_of_error

_FEW_STEPS = 4
"""Steps from which a median is robust to a bad step; below, sizes need their neighbours."""
_NUM_NEAR, _NUM_NEAR_EXCHANGES = 9, 17
"""Neighbouring sizes that are combined; the result is robust to four disturbed ones."""
_LEAST_NEAR = 4
"""Least number of sizes that are informative on each other."""
_REACH_LOG = np.log(2.0)
"""Sizes more than a doubling apart may run on other kernels."""
_MOST_FOR_SLOPE = 200
"""Sizes whose pairs are used for the slope; more do not improve it."""
_ROWS_AT: dict[str, int] = {
    OperatorKind.GROUPED_LINEAR.value: 1,
    OperatorKind.LINEAR_FC1.value: 0,
    OperatorKind.LINEAR_FC2.value: 0,
    OperatorKind.ACTIVATION.value: 0,
    OperatorKind.PERMUTE.value: 0,
}
"""Operators of expert layers, and the axis of their shape that has the rows that arrived."""
_ROLES = (GroupRole.EP.value, GroupRole.EXPERT_TP.value, GroupRole.EXPERT_TP_EP.value)
_LIKE = ["run_id", "window", "kind", "phase", "element_nbytes", "stage", "role", "num_ranks"]
_LIKE += ["span", "num_nodes", "is_bound", "is_probe"]

Vector = NDArray[np.float64]


def smooth_over_neighbours(samples: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``samples`` with routed sizes of few steps smoothed over neighbouring
    sizes, and with a matching ``spread_log``.

    Operators use the median. Exchanges of one size are of two kinds, dispatch and combine, and a
    step includes both, so that they use the mean of the middle half.

    All other rows are unchanged. Time is assumed to grow with a power of the size between 0 and 1,
    the median slope between sizes (Theil 1950, Sen 1968).
    """
    size = _routed_sizes(samples)
    varied = samples[size > 0].assign(size=size[size > 0], rest=_rest_of_shape(samples[size > 0]))
    times, spreads = samples["time_s"].copy(), samples["spread_log"].copy()
    for _, rows in varied.groupby([*_LIKE, "rest"], sort=True):
        is_few = (rows["num_steps"] < _FEW_STEPS).to_numpy()
        if is_few.sum() < _LEAST_NEAR:
            continue
        time_s, error_log = _smoothed_times(rows)
        times.loc[rows.index[is_few]] = time_s[is_few]
        spreads.loc[rows.index[is_few]] = spread_of_error(rows, error_log)[is_few]
    return samples.assign(time_s=times, spread_log=spreads)


def _smoothed_times(rows: pd.DataFrame) -> tuple[Vector, Vector]:
    """Return the time of each size from its neighbours, and the error of its log; both
    ``(rows,)``."""
    size, log_time = np.log(rows["size"].to_numpy(float)), np.log(rows["time_s"].to_numpy(float))
    level = log_time - _slope(size, log_time) * size
    order = np.argsort(size, kind="stable")
    if (rows["row"] == "collective").all():
        near_levels = _levels_near(size[order], level[order], _NUM_NEAR_EXCHANGES)
        middle = _middle_mean(near_levels)
    else:
        near_levels = _levels_near(size[order], level[order], _NUM_NEAR)
        middle = np.nanmedian(near_levels, axis=1)
    deviation = MAD_TO_SIGMA * np.nanmedian(np.abs(near_levels - middle[:, np.newaxis]), axis=1)
    number = np.isfinite(near_levels).sum(axis=1)
    times_s, errors = np.empty(len(rows)), np.empty(len(rows))
    times_s[order] = np.exp(log_time[order] + middle - level[order])
    errors[order] = MEDIAN_OVER_MEAN * deviation / np.sqrt(number)
    return times_s, errors


def _middle_mean(levels: NDArray[np.float64]) -> Vector:
    """Return the log of the mean time of each row's middle half, which is robust to a quarter of
    disturbed values."""
    ordered, number = np.sort(levels, axis=1), np.isfinite(levels).sum(axis=1, keepdims=True)
    cut = number // 4
    place = np.arange(levels.shape[1])
    is_middle = (place >= cut) & (place < number - cut)
    sums = np.where(is_middle, np.exp(ordered), 0.0).sum(axis=1)
    return np.log(sums / is_middle.sum(axis=1))


def _levels_near(size: Vector, level: Vector, most: int) -> NDArray[np.float64]:
    """Return the levels of the nearest of ascending sizes, ``(rows, near)``, NaN if there are
    fewer; an isolated size has only its own."""
    number = len(size)
    offsets = np.arange(1 - most, most)
    places = np.arange(number)[:, np.newaxis] + offsets
    is_there = (places >= 0) & (places < number)
    places = places.clip(0, number - 1)
    apart = np.where(is_there, np.abs(size[places] - size[:, np.newaxis]), np.inf)
    near = np.argsort(apart, axis=1, kind="stable")[:, :most]
    is_near = np.take_along_axis(apart, near, axis=1) <= _REACH_LOG
    near_levels = np.where(is_near, level[np.take_along_axis(places, near, axis=1)], np.nan)
    is_alone = is_near.sum(axis=1) < _LEAST_NEAR
    near_levels[is_alone] = np.nan
    near_levels[is_alone, 0] = level[is_alone]
    return near_levels


def _slope(size: Vector, log_time: Vector) -> float:
    """Return the median slope of log time along log size over all pairs, clipped to 0 to 1."""
    if len(size) > _MOST_FOR_SLOPE:
        sample_places = np.linspace(0, len(size) - 1, _MOST_FOR_SLOPE).round().astype(int)
        order = np.argsort(size, kind="stable")[sample_places]
        size, log_time = size[order], log_time[order]
    first, second = np.triu_indices(len(size), 1)
    apart = size[second] - size[first]
    is_apart = np.abs(apart) > 0
    slopes = (log_time[second] - log_time[first])[is_apart] / apart[is_apart]
    return float(np.clip(np.median(slopes), 0.0, 1.0)) if len(slopes) else 0.0


def _routed_sizes(samples: pd.DataFrame) -> NDArray[np.int64]:
    """Return the rows that arrived or bytes that were exchanged; 0 for rows that are not routed."""
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
    shape_texts = []
    for kind, shape in zip(samples["kind"], samples["shape"], strict=True):
        sizes = shape.split("x")
        if kind in _ROWS_AT:
            sizes[_ROWS_AT[kind]] = ""
        shape_texts.append("x".join(sizes))
    return shape_texts
