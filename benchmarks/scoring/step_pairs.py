"""Pairs of rows that differ in one switch: the ratio of their steps, measured and modelled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.records.step_rows import StepRow
from forerun.calib.steps.step_tables import table_steps

SIGN_FRAC = 0.05
"""Measured differences beyond this must be predicted in sign; smaller ones are noise of
releases."""
WITHIN_LOG = 0.05
"""Tolerance of the log of a ratio."""


def score_pairs(rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Return each two rows of one pair with the logs of their ratio, from priors alone.

    Resumed runs are the same layout and no pair; flagged rows count, since a flag on one row of a
    pair also applies to the other.
    """
    paired = [row for row in rows if row.pair and row.measured_s > 0]
    predicted_s = {
        row.row_id: float(table_steps(row).median_times([row.config])[0]) for row in paired
    }
    return [
        {
            "pair": one.pair,
            "rows": [one.row_id, other.row_id],
            "measured_log": round(math.log(other.measured_s / one.measured_s), 6),
            "modelled_log": round(math.log(predicted_s[other.row_id] / predicted_s[one.row_id]), 6),
        }
        for one, other in _pairs(paired)
    ]


def is_right_in_sign(pair: dict[str, Any]) -> bool:
    """Return True if the sign is right, or the measured difference is too small to tell."""
    measured, modelled = pair["measured_log"], pair["modelled_log"]
    return abs(measured) <= math.log1p(SIGN_FRAC) or measured * modelled > 0


def is_near(pair: dict[str, Any]) -> bool:
    """Return True if the logs differ by at most ``WITHIN_LOG``, and the two predictions differ."""
    off = abs(pair["measured_log"] - pair["modelled_log"])
    return off <= WITHIN_LOG and pair["modelled_log"] != 0.0


def pairs_text(pairs: Sequence[dict[str, Any]]) -> str:
    """Return a table by pair: number of ratios, right signs and near ones, and the mean error."""
    names = dict.fromkeys(pair["pair"] for pair in pairs)
    lines = []
    for name in names:
        pair_rows = [pair for pair in pairs if pair["pair"] == name]
        off = [abs(pair["measured_log"] - pair["modelled_log"]) for pair in pair_rows]
        right, near = sum(map(is_right_in_sign, pair_rows)), sum(map(is_near, pair_rows))
        counts = [str(len(pair_rows)), str(right), str(near)]
        lines.append([name, *counts, f"{sum(off) / len(off):.3f}"])
    head = ["rows that differ in one switch", "ratios", "right in sign", "within 0.05", "mean"]
    return markdown_table(head, lines)


def _pairs(rows: Sequence[StepRow]) -> Iterator[tuple[StepRow, StepRow]]:
    for one, other in itertools.combinations(rows, 2):
        if one.pair == other.pair and one.config != other.config:
            yield one, other
