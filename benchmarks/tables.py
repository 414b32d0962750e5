"""Markdown of the figures that ``models.py`` collects; percent, forward / backward in a cell."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from collectives import ALPHA_BETA, OURS
from operators import CHOSEN, WITHOUT_REFUSED, Floor

PRIOR, PAPER, CONSTANT = "ours with a prior", "paper's recipe", "constant efficiency"
METHODS = (PAPER, CONSTANT, OURS)
LINEARS = ", linears"
PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Percent of forward and backward: what was reached before, and what is to be reached."""

    before: tuple[float, float] | None
    bar: tuple[float, float]


BARS = {
    "random": Bar(before=(3.3, 2.6), bar=(3.0, 2.4)),
    "small_to_large": Bar(before=(6.3, 5.8), bar=(5.5, 5.5)),
    "few_8": Bar(before=(6.3, 5.8), bar=(5.8, 5.8)),
    "few_8" + LINEARS: Bar(before=(4.8, 3.55), bar=(4.5, 3.5)),
    "few_24": Bar(before=(5.1, 4.6), bar=(4.7, 4.4)),
    CHOSEN: Bar(before=(4.1, 3.8), bar=(4.2, 3.8)),
    "leave_tp": Bar(before=(4.3, 4.0), bar=(4.0, 4.0)),
}
"""Means over the 18 operators of the A100 of Zhang et al."""
_SCORED_TWICE = ("small_to_large" + WITHOUT_REFUSED, "few_8" + WITHOUT_REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorScores:
    """What one table came to."""

    table: str
    figures: pd.DataFrame
    """Rows of ``operators.figures``."""
    linears: frozenset[str]
    """Names of the operators that are matrix products."""
    floor: Floor

    @property
    def is_paper(self) -> bool:
        """True for the table that the bars are of."""
        return "ett_fwd_bwd" in self.table

    def rows(self, method: str, protocol: str) -> pd.DataFrame:
        """The figures of a method; with ``LINEARS`` at the end of the protocol those of linears."""
        name = protocol.removesuffix(LINEARS)
        found = self.figures[
            (self.figures["method"] == method) & (self.figures["protocol"] == name)
        ]
        return found[found["operator"].isin(self.linears)] if name != protocol else found


def paper_text(scores: OperatorScores) -> str:
    """Errors beside bars and baselines, intervals, and errors of each operator."""
    protocols = [p for p in _protocols(scores) if WITHOUT_REFUSED not in p or p in _SCORED_TWICE]
    protocols.insert(protocols.index("few_8") + 1, "few_8" + LINEARS)
    floor = _pair(scores.floor.forward_frac, scores.floor.backward_frac)
    head = ["protocol", *METHODS, "median", "reached before", "bar", "met", "floor"]
    errors, intervals = [], []
    for protocol in protocols:
        ours = scores.rows(OURS, protocol)
        cells = [_phases(scores.rows(m, protocol), "mape_frac") for m in METHODS]
        cells += [_phases(ours, "median_ape_frac"), *_bar(protocol, ours), floor]
        errors.append([protocol, *cells])
        intervals.append([protocol, *(_interval(scores.rows(m, protocol)) for m in METHODS)])
    prior = scores.rows(PRIOR, "few_8" + LINEARS)
    if len(prior):
        cells = [_phases(prior, "mape_frac"), _phases(prior, "median_ape_frac")]
        cells += [*_bar("few_8" + LINEARS, prior), floor]
        errors.append(["few_8" + LINEARS + ", with a prior", "", "", *cells])
        intervals.append(["few_8" + LINEARS + ", with a prior", "", "", _interval(prior)])
    return "\n\n".join(
        [
            f"Errors on `{scores.table}`, mean over operators:",
            _table(head, errors),
            "Coverage of the 90 % intervals (worst operator and phase), at mean half-width:",
            _table(["protocol", *METHODS], intervals),
            "Each operator, ours: error (coverage):",
            _by_operator(scores, [p for p in protocols if p in BARS and LINEARS not in p]),
        ]
    )


def others_text(found: Sequence[OperatorScores]) -> str:
    """One row for each protocol of each table."""
    head = ["table", "protocol", "groups", PAPER, CONSTANT, OURS, *PHASES]
    head += ["median", "floor", "coverage (worst), half-width"]
    rows = []
    for scores in found:
        for protocol in (p for p in _protocols(scores) if WITHOUT_REFUSED not in p):
            ours = scores.rows(OURS, protocol)
            means = [_percent(scores.rows(m, protocol)["mape_frac"].mean()) for m in METHODS]
            phases = [_percent(_phase(ours, p)["mape_frac"].mean()) for p in PHASES]
            cells = [scores.table, protocol, str(len(ours)), *means, *phases]
            cells += [_percent(ours["median_ape_frac"].mean()), _percent(scores.floor.all_frac)]
            rows.append([*cells, _interval(ours)])
    return _table(head, rows)


def collective_text(figures: pd.DataFrame) -> str:
    """One row for each table and protocol."""
    head = ["table", "protocol", "n", ALPHA_BETA, OURS, "coverage, half-width", "floor"]
    rows = []
    for (table, protocol), found in figures.groupby(["table", "protocol"], sort=False):
        by_model = found.set_index("model")
        ours = by_model.loc[OURS]
        cells = [str(table), str(protocol), str(ours["n"])]
        cells += [" / ".join(map(_percent, by_model.loc[m, _SIZES])) for m in (ALPHA_BETA, OURS)]
        cells.append(
            f"{_percent(ours['coverage_90_frac'])}, {_percent(ours['interval_width_frac'])}"
        )
        rows.append([*cells, _percent(ours["floor_frac"])])
    return _table(head, rows)


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
            found = scores.rows(OURS, protocol)
            found = found[found["operator"] == operator]
            errors, inside = (_phases(found, c) for c in ("mape_frac", "coverage_90_frac"))
            cells.append(f"{errors} ({inside})" if len(found) else "-")
        floors = [scores.floor.by_group.get(f"{operator}/{p}", np.nan) for p in PHASES]
        rows.append([operator, *cells, _pair(*floors)])
    return _table(["operator", *protocols, "floor"], rows)


def _bar(protocol: str, ours: pd.DataFrame) -> list[str]:
    """What was reached before, the bar, and whether each phase meets it to the digit shown."""
    found = BARS.get(protocol.removesuffix(WITHOUT_REFUSED))
    if found is None:
        return ["", "", ""]
    values = [round(100 * _phase(ours, p)["mape_frac"].mean(), 1) for p in PHASES]
    met = ["yes" if v <= b else "no" for v, b in zip(values, found.bar, strict=True)]
    before = " / ".join(f"{v:g}" for v in found.before) if found.before else ""
    return [before, " / ".join(f"{v:g}" for v in found.bar), " / ".join(met)]


def _interval(rows: pd.DataFrame) -> str:
    inside, width = rows["coverage_90_frac"], rows["interval_width_frac"]
    return f"{_percent(inside.mean())} ({_percent(inside.min())}), {_percent(width.mean())}"


def _phase(rows: pd.DataFrame, phase: str) -> pd.DataFrame:
    return rows[rows["phase"] == phase]


def _phases(rows: pd.DataFrame, column: str) -> str:
    return _pair(*(_phase(rows, phase)[column].mean() for phase in PHASES))


def _pair(forward: float, backward: float) -> str:
    return f"{_percent(forward)} / {_percent(backward)}"


def _percent(frac: float) -> str:
    if not np.isfinite(frac):
        return "-"
    return f"{100 * frac:.1f}" if abs(frac) < 1 else f"{100 * frac:.0f}"


def _table(head: Iterable[str], rows: Iterable[Collection[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(r)} |" for r in (head, ["---"] * len(head), *rows))
