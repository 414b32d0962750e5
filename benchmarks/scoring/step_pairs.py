"""Rows that differ in one switch alone: the ratio of their steps, measured and modelled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from forerun.benchmarks.markdown_text import markdown_table
from forerun.calib.records import StepRow
from forerun.calib.steps import table_steps

SIGN_FRAC = 0.05
"""Measured differences beyond this have to be told in sign; below is the noise of releases."""
WITHIN_LOG = 0.05
"""How near the log of a ratio has to be."""


def score_pairs(rows: Sequence[StepRow]) -> list[dict[str, Any]]:
    """Each two rows of one pair with the logs of their ratio, from priors alone.

    Runs that were resumed are the same layout again and no pair; rows that are flagged count, since
    what speaks against one of a pair speaks against the other.
    """
    told = [row for row in rows if row.pair and row.measured_s > 0]
    found = {row.row_id: float(table_steps(row).median_times([row.config])[0]) for row in told}
    return [
        {
            "pair": one.pair,
            "rows": [one.row_id, other.row_id],
            "measured_log": round(math.log(other.measured_s / one.measured_s), 6),
            "modelled_log": round(math.log(found[other.row_id] / found[one.row_id]), 6),
        }
        for one, other in _pairs(told)
    ]


def is_right_in_sign(pair: dict[str, Any]) -> bool:
    """True too where the measured difference is too small to tell."""
    measured, modelled = pair["measured_log"], pair["modelled_log"]
    return abs(measured) <= math.log1p(SIGN_FRAC) or measured * modelled > 0


def is_near(pair: dict[str, Any]) -> bool:
    """Whether the logs differ by no more than ``WITHIN_LOG``, and the rows have two answers."""
    off = abs(pair["measured_log"] - pair["modelled_log"])
    return off <= WITHIN_LOG and pair["modelled_log"] != 0.0


def pairs_text(pairs: Sequence[dict[str, Any]]) -> str:
    """A table by pair: how many ratios, how many right in sign and near, and the mean error."""
    names = dict.fromkeys(pair["pair"] for pair in pairs)
    lines = []
    for name in names:
        own = [pair for pair in pairs if pair["pair"] == name]
        off = [abs(pair["measured_log"] - pair["modelled_log"]) for pair in own]
        right, near = sum(map(is_right_in_sign, own)), sum(map(is_near, own))
        counts = [str(len(own)), str(right), str(near)]
        lines.append([name, *counts, f"{sum(off) / len(off):.3f}"])
    head = ["rows that differ in one switch", "ratios", "right in sign", "within 0.05", "mean"]
    return markdown_table(head, lines)


def _pairs(rows: Sequence[StepRow]) -> Iterator[tuple[StepRow, StepRow]]:
    for one, other in itertools.combinations(rows, 2):
        if one.pair == other.pair and one.config != other.config:
            yield one, other
