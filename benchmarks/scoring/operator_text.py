"""Markdown of the figures of ``models.py``; percent, forward / backward in a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from forerun.benchmarks.markdown_text import markdown_table
from forerun.benchmarks.scoring.collectives import OURS
from forerun.benchmarks.scoring.operators import CHOSEN, WITHOUT_REFUSED

PRIOR = "ours with a prior"
LINEARS, WITH_PRIOR = ", linears", " with a prior"
"""Suffixes of a protocol's name in a table."""
PHASES = ("forward", "backward")
PAPER_TABLE = "ett_fwd_bwd"
"""Part of the name of the table of Zhang et al., to which the bars apply."""


BARS = {
    "random": (3.0, 2.4),
    "small_to_large": (5.5, 5.5),
    "few_8": (5.8, 5.8),
    "few_8" + LINEARS + WITH_PRIOR: (4.5, 3.5),
    "few_24": (4.7, 4.4),
    CHOSEN: (4.2, 3.8),
    "leave_tp": (4.0, 4.0),
}
"""Percent of forward and backward, means over the 18 operators of the A100 of Zhang et al."""
INTERVALS = """\
Last: coverage of the 90 % intervals (worst operator and phase), and mean half-width.  Bars: 87 to
94 %, no operator under 75 %, half-width 13 in `few_8`, 10 in `few_24`, 19 under shift."""
_SCORED_TWICE = ("small_to_large" + WITHOUT_REFUSED, "few_8" + WITHOUT_REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorScores:
    """Scores of one table."""

    table: str
    figures: pd.DataFrame
    """Rows of ``operators.figures``."""
    linears: frozenset[str]
    """Names of the operators that are matrix products."""
    floors: Mapping[str, float]
    """Mean distance of repeats from the median of their shape, by ``<operator>/<phase>``."""

    @property
    def is_paper(self) -> bool:
        """True for the table to which the bars apply."""
        return PAPER_TABLE in self.table

    def rows(self, method: str, protocol: str) -> pd.DataFrame:
        """Return the figures of a method; only linears if the protocol ends in ``LINEARS``."""
        name = protocol.removesuffix(LINEARS)
        selected = self.figures[
            (self.figures["method"] == method) & (self.figures["protocol"] == name)
        ]
        return selected[selected["operator"].isin(self.linears)] if name != protocol else selected


def paper_text(scores: OperatorScores) -> str:
    """Return errors next to bars, intervals, and errors of each operator."""
    protocols = [p for p in _protocols(scores) if WITHOUT_REFUSED not in p or p in _SCORED_TWICE]
    named = [(p, p, OURS) for p in protocols]
    for after, row in enumerate((("few_8" + LINEARS, OURS), ("few_8" + LINEARS, PRIOR)), start=1):
        if "few_8" in protocols and len(scores.rows(row[1], row[0])):
            label = row[0] + (WITH_PRIOR if row[1] == PRIOR else "")
            named.insert(protocols.index("few_8") + after, (label, *row))
    head = ["protocol", OURS, "median", "bar", "met", "floor", "coverage (worst), half-width"]
    rows = []
    for label, protocol, method in named:
        ours = scores.rows(method, protocol)
        cells = [_phases(ours, "mape_frac"), _phases(ours, "median_ape_frac"), *_bar(label, ours)]
        rows.append([label, *cells, _floors(scores, ours), _interval(ours)])
    return "\n\n".join(
        [
            f"Errors on `{scores.table}`, mean over operators. {INTERVALS}",
            markdown_table(head, rows),
            "Each operator, ours: error (coverage):",
            _by_operator(scores, [p for p in protocols if p in BARS]),
        ]
    )


def others_text(operator_scores: Sequence[OperatorScores]) -> str:
    """Return one row for each protocol of each table."""
    head = ["table", "protocol", "groups", OURS, *PHASES]
    head += ["median", "floor", "coverage (worst), half-width"]
    rows = []
    for scores in operator_scores:
        for protocol in (p for p in _protocols(scores) if WITHOUT_REFUSED not in p):
            ours = scores.rows(OURS, protocol)
            mean = _percent(ours["mape_frac"].mean())
            phases = [_percent(_phase(ours, p)["mape_frac"].mean()) for p in PHASES]
            cells = [scores.table, protocol, str(len(ours)), mean, *phases]
            floor = pd.Series(scores.floors, dtype=np.float64).mean()
            cells += [_percent(ours["median_ape_frac"].mean()), _percent(floor)]
            rows.append([*cells, _interval(ours)])
    return markdown_table(head, rows)


def collective_text(figures: pd.DataFrame) -> str:
    """Return one row for each table and protocol."""
    head = ["table", "protocol", "n", OURS, "coverage, half-width", "floor"]
    rows = []
    for ours in figures.to_dict("records"):
        cells = [ours["table"], ours["protocol"], str(ours["n"])]
        cells.append(" / ".join(_percent(ours[size]) for size in _SIZES))
        inside, width = ours["coverage_90_frac"], ours["interval_width_frac"]
        cells.append(f"{_percent(inside)}, {_percent(width)}")
        rows.append([*cells, _percent(ours["floor_frac"])])
    return markdown_table(head, rows)


_SIZES = ["mape_frac", "large_mape_frac", "huge_mape_frac"]


def _protocols(scores: OperatorScores) -> list[str]:
    ours = scores.figures[scores.figures["method"] == OURS]
    return list(ours["protocol"].unique())


def _by_operator(scores: OperatorScores, protocols: Sequence[str]) -> str:
    ours = scores.figures[scores.figures["method"] == OURS]
    rows = []
    for operator in ours["operator"].unique():
        cells = []
        for protocol in protocols:
            operator_rows = scores.rows(OURS, protocol)
            operator_rows = operator_rows[operator_rows["operator"] == operator]
            errors, inside = (_phases(operator_rows, c) for c in ("mape_frac", "coverage_90_frac"))
            cells.append(f"{errors} ({inside})" if len(operator_rows) else "-")
        rows.append([operator, *cells, _floors(scores, ours[ours["operator"] == operator])])
    return markdown_table(["operator", *protocols, "floor"], rows)


def _floors(scores: OperatorScores, rows: pd.DataFrame) -> str:
    """Return the floor of the rows' operators."""
    names = rows["operator"] + "/" + rows["phase"]
    return _phases(rows.assign(floor=names.map(dict(scores.floors))), "floor")


def _bar(protocol: str, ours: pd.DataFrame) -> list[str]:
    """Return the bar, and if each phase meets it at the precision shown."""
    bar = BARS.get(protocol.removesuffix(WITHOUT_REFUSED))
    if bar is None:
        return ["", ""]
    values = [round(100 * _phase(ours, p)["mape_frac"].mean(), 1) for p in PHASES]
    met = ["yes" if v <= b else "no" for v, b in zip(values, bar, strict=True)]
    return [" / ".join(f"{v:.1f}" for v in bar), " / ".join(met)]


def _interval(rows: pd.DataFrame) -> str:
    inside, width = rows["coverage_90_frac"], rows["interval_width_frac"]
    return f"{_percent(inside.mean())} ({_percent(inside.min())}), {_percent(width.mean())}"


def _phase(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    return rows[rows["phase"] == phase]


def _phases(rows: pd.DataFrame, column: str) -> str:
    return " / ".join(_percent(_phase(rows, phase)[column].mean()) for phase in PHASES)


def _percent(frac: float) -> str:
    if not np.isfinite(frac):
        return "-"
    return f"{100 * frac:.1f}" if abs(frac) < 1 else f"{100 * frac:.0f}"
