"""Scores of predictions: error, bias, coverage of the 90 % interval and its width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

ALL_GROUPS = "all"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Predictions of one group in one protocol beside what was measured, all seeds together."""

    table: str
    protocol: str
    group: str
    measured_s: NDArray[np.float64]
    """``(rows,)``, as the three below."""
    predicted_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    """Low end of the 90 % interval."""
    high_s: NDArray[np.float64]

    def figures(self) -> dict[str, float]:
        """The six figures of the group; errors are ``(predicted - measured) / measured``, the
        width is half the interval over the prediction.

        >>> one = np.array([1.0])
        >>> Scored(table="t", protocol="random", group="g", measured_s=one, predicted_s=1.1 * one,
        ...     low_s=0.9 * one, high_s=1.3 * one).figures()["bias_frac"]  # doctest: +ELLIPSIS
        0.1...
        """
        error = (self.predicted_s - self.measured_s) / self.measured_s
        is_inside = (self.low_s <= self.measured_s) & (self.measured_s <= self.high_s)
        width = (self.high_s - self.low_s) / 2 / self.predicted_s
        values = (
            np.mean(np.abs(error)),
            np.median(np.abs(error)),
            np.quantile(np.abs(error), 0.9),
            np.mean(error),
            np.mean(is_inside),
            np.mean(width),
        )
        return {name: float(value) for name, value in zip(FIGURES, values, strict=True)}


FIGURES = (
    "mape_frac",
    "median_ape_frac",
    "p90_ape_frac",
    "bias_frac",
    "coverage_90_frac",
    "interval_width_frac",
)


def score_rows(scored: Sequence[Scored]) -> list[dict[str, object]]:
    """One JSON row per table, protocol and group, before them one with the group ``all``.

    ``all`` weighs every group equally: each figure is the mean over the groups, ``n`` their sum.
    """
    by_protocol: dict[tuple[str, str], list[Scored]] = {}
    for one in scored:
        if len(one.measured_s):
            by_protocol.setdefault((one.table, one.protocol), []).append(one)
    rows: list[dict[str, object]] = []
    for (table, protocol), members in by_protocol.items():
        figures = [one.figures() for one in members]
        mean = {name: float(np.mean([f[name] for f in figures])) for name in FIGURES}
        count = sum(len(one.measured_s) for one in members)
        rows.append(_row(table, protocol, ALL_GROUPS, count, mean))
        rows += [
            _row(table, protocol, one.group, len(one.measured_s), found)
            for one, found in zip(members, figures, strict=True)
        ]
    return rows


def joined(parts: Sequence[Scored]) -> list[Scored]:
    """Parts of the same table, protocol and group made one, in the order they first appear."""
    groups: dict[tuple[str, str, str], list[Scored]] = {}
    for part in parts:
        groups.setdefault((part.table, part.protocol, part.group), []).append(part)
    return [
        Scored(
            table=table,
            protocol=protocol,
            group=group,
            measured_s=_joined(members, lambda m: m.measured_s),
            predicted_s=_joined(members, lambda m: m.predicted_s),
            low_s=_joined(members, lambda m: m.low_s),
            high_s=_joined(members, lambda m: m.high_s),
        )
        for (table, protocol, group), members in groups.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """How far repeats of one shape lie from their median: no predictor can do better."""

    group: str
    num_rows: int
    mean_frac: float
    median_frac: float


def noise_floors(frame: pd.DataFrame) -> list[NoiseFloor]:
    """Of each group of a canonical operator table, where any shape was measured more than once.

    Mean and median of ``|t - median of its shape| / median`` over the rows of repeated shapes.
    """
    frame = frame[frame["flag"] == ""]
    name = frame["group"] + "/" + frame["phase"]
    keys = [name, frame["device"], frame["shape"], frame["element_nbytes"]]
    grouped = frame["time_s"].groupby(keys)
    median, count = grouped.transform("median"), grouped.transform("size")
    spread = ((frame["time_s"] - median).abs() / median)[count > 1]
    return [
        NoiseFloor(
            group=str(group),
            num_rows=len(values),
            mean_frac=float(values.mean()),
            median_frac=float(values.median()),
        )
        for group, values in spread.groupby(name, sort=False)
    ]


def _joined(
    members: Sequence[Scored], values: Callable[[Scored], NDArray[np.float64]]
) -> NDArray[np.float64]:
    return np.concatenate([values(member) for member in members])


def _row(
    table: str, protocol: str, group: str, count: int, figures: Mapping[str, float]
) -> dict[str, object]:
    rounded = {name: round(float(value), 6) for name, value in figures.items()}
    return {"table": table, "protocol": protocol, "group": group, "n": count, **rounded}
