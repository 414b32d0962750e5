"""The step model on published step times: the acceptance table, as Markdown and JSON.

    python benchmarks/steps.py DATA_DIR [--draws 20] [--model NAME] [--only TEXT]
        [--also JSON] [--json OUT] [--markdown OUT]

DATA_DIR holds the public tables (``e2e_*``, ``ops_*``, ``coll_*``); what is missing there is looked
for in ``recipes/published``.  Baselines run on the same rows and folds.  ``--also`` adds lines that
other benchmarks measured (a list of objects with title, protocol, reference, bar, ours, met).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from marks import markdown_table, write_between
from step_acceptance import CLAIMS, FIGURE_NAMES, Bar, Claim
from threadpoolctl import threadpool_limits

from forerun.calib.published.readers import PublishedTable, read_published
from forerun.calib.published.steps import read_steps
from forerun.calib.samples.step_rows import StepRow, StepTable
from forerun.calib.steps.design import design
from forerun.calib.validation.step_baselines import BASELINES
from forerun.calib.validation.step_models import CalibratedSteps
from forerun.calib.validation.step_protocols import Fold
from forerun.calib.validation.step_scores import order_only, step_results, worst_rows
from forerun.calib.validation.steps import StepModel, StepsScored, score_folds

RECIPES = Path(__file__).parent.parent / "recipes" / "published"
LEGEND = """\
Percent, but for tau.  Errors are mean absolute percentage errors of step time over the scored rows
of all draws; signed bias, coverage of the 90 % interval and its mean half-width are ours.  Rows
calibrate and are scored within one machine (device, cluster, stack, precision).  Subsets of the
calibration size are all run where there are no more than 256, else drawn.  Kendall's tau is
scipy's tau-b within a group of one model, number of GPUs and global batch with four scored rows or
more; regret is the time of the layout chosen over the best one, minus 1, median (p95).  *Synthetic*
rows are a simulator's output and test composition, not accuracy.  *Implied* times are computed from
published predictions and errors."""
Factory = Callable[[tuple[PublishedTable, ...]], StepModel]


def models() -> dict[str, Factory]:
    """Every model by name, ours first."""
    found: dict[str, Factory] = {CalibratedSteps.name: CalibratedSteps}
    return found | {baseline.name: lambda _, chosen=baseline: chosen for baseline in BASELINES}


def main() -> None:
    arguments = _arguments()
    known = models()
    chosen = arguments.model
    if chosen not in known:
        sys.exit(f"--model {chosen} is none of {', '.join(known)}")
    lines: list[dict[str, Any]] = []
    worst: dict[str, list[dict[str, Any]]] = {}
    with threadpool_limits(1):
        for claim in CLAIMS:
            if arguments.only and arguments.only.lower() not in claim.title.lower():
                continue
            line, rows = _line(claim, chosen, known, arguments)
            lines.append(line)
            worst.setdefault(f"{claim.title}, {claim.protocol}", rows)
            print(f"{claim.title}, {claim.protocol}: {line['seconds']:.0f} s", file=sys.stderr)
    also = json.loads(arguments.also.read_text(encoding="utf-8")) if arguments.also else []
    text = _text(arguments, chosen, lines, also, worst)
    print(text)
    if arguments.markdown:
        write_between(arguments.markdown, "steps.py", text)
    if arguments.json:
        told = {"schema": 1, "model": chosen, "results": lines, "worst": worst, "also": also}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The acceptance table of the step model.")
    parser.add_argument("data", type=Path, metavar="DATA_DIR", help="public tables, CSV")
    parser.add_argument("--draws", type=int, default=20, help="random calibrations (20)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=CalibratedSteps.name,
        help="which to hold to the bars (ours)",
    )
    parser.add_argument("--only", metavar="TEXT", help="lines whose set holds this text")
    parser.add_argument("--also", type=Path, metavar="JSON", help="lines of other benchmarks")
    parser.add_argument("--json", type=Path, metavar="OUT", help="all figures")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="file to write the table to")
    return parser.parse_args()


def _line(
    claim: Claim, chosen: str, known: Mapping[str, Factory], arguments: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of the model and of the baselines for one claim, and the model's worst rows."""
    begin = time.process_time()
    rows = claim.usable(_table(arguments.data, claim.table).rows)
    folds = claim.folds(rows, arguments.draws, design)
    operators = tuple(_operators(arguments.data, name) for name in claim.operators)
    scored = _scored(claim, rows, folds, known[chosen](operators), chosen)
    ours = _whole(scored, claim)
    baselines = {
        baseline.name: (order_only if getattr(baseline, "orders_only", False) else dict)(
            _whole(_scored(claim, rows, folds, baseline, baseline.name), claim)
        )
        for baseline in BASELINES
    }
    line = {
        "title": claim.title,
        "table": claim.table,
        "protocol": claim.protocol,
        "reference": claim.reference,
        "bars": [{"figure": b.figure, "limit": b.limit} for b in claim.bars],
        "met": [bar.is_met(ours.get(bar.figure)) for bar in claim.bars],
        "ours": ours,
        "baselines": baselines,
        "seconds": time.process_time() - begin,
    }
    return line, worst_rows(scored)


_KNOWN: dict[tuple[str, ...], list[StepsScored]] = {}
"""What each model said of the folds of a table: lines that score parts of it share them."""


def _scored(
    claim: Claim, rows: Sequence[StepRow], folds: Sequence[Fold], model: StepModel, name: str
) -> list[StepsScored]:
    key = (claim.table, claim.protocol, claim.machine, *claim.operators, name)
    if key not in _KNOWN:
        _KNOWN[key] = score_folds(rows, folds, model)
    if claim.is_scored is None:
        return _KNOWN[key]
    cut = [_part(fold, claim.is_scored) for fold in _KNOWN[key]]
    return [fold for fold in cut if fold.rows]


def _part(scored: StepsScored, keep: Callable[[StepRow], bool]) -> StepsScored:
    places = [place for place, row in enumerate(scored.rows) if keep(row)]
    return replace(
        scored,
        rows=tuple(scored.rows[place] for place in places),
        reasons=tuple(scored.reasons[place] for place in places),
        predicted_s=scored.predicted_s[places],
        low_s=scored.low_s[places],
        high_s=scored.high_s[places],
        memory_nbytes=scored.memory_nbytes[places],
    )


def _whole(scored: Sequence[StepsScored], claim: Claim) -> dict[str, Any]:
    found = step_results(scored, claim.table)
    return found[0] if found else {"n": 0}


@lru_cache(maxsize=64)
def _table(data: Path, name: str) -> StepTable:
    return read_steps(_frame(data, name), name)


@lru_cache(maxsize=64)
def _operators(data: Path, name: str) -> PublishedTable:
    return read_published(_frame(data, name), name)


def _frame(data: Path, name: str) -> pd.DataFrame:
    for folder in (data, RECIPES):
        for ending in (".csv.gz", ".csv"):
            if (folder / (name + ending)).exists():
                return pd.read_csv(folder / (name + ending), low_memory=False)
    sys.exit(f"{name} is neither in {data} nor in {RECIPES}")


def _text(
    arguments: argparse.Namespace,
    chosen: str,
    lines: Sequence[Mapping[str, Any]],
    also: Sequence[Mapping[str, str]],
    worst: Mapping[str, Sequence[Mapping[str, Any]]],
) -> str:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    command = f"python benchmarks/steps.py DATA_DIR --draws {arguments.draws} --model '{chosen}'"
    head = ["set", "protocol", "n", "reached before", "bar", chosen, "met", "bias"]
    head += ["covers, width", *(f"{b.name}" for b in BASELINES)]
    rows = [_cells(line) for line in lines]
    rows += [
        [one["title"], one["protocol"], "", one["reference"], one["bar"], one["ours"], one["met"]]
        + [""] * (len(head) - 7)
        for one in also
    ]
    machine = f"{os.cpu_count()} cores of a shared x86-64 machine, one thread"
    parts = [f"`{command}`, {today}, {machine}.", LEGEND, markdown_table(head, rows)]
    parts += ["Worst ten rows of each line, mean signed error over draws:", _worst(worst)]
    return "\n\n".join(parts)


def _cells(line: Mapping[str, Any]) -> list[str]:
    ours = line["ours"]
    bars = [Bar(**b, is_least=b["figure"] == "kendall_tau") for b in line["bars"]]
    limits = "; ".join(
        f"{FIGURE_NAMES[b.figure]} {'>=' if b.is_least else '<='} {b.shown(b.limit)}".strip()
        for b in bars
    )
    interval = (
        f"{_percent(ours.get('coverage_90_frac'))}, {_percent(ours.get('interval_width_frac'))}"
    )
    return [
        line["title"],
        line["protocol"],
        str(ours["n"]),
        line["reference"],
        limits,
        _figures(bars, ours),
        " / ".join("yes" if met else "no" for met in line["met"]),
        _percent(ours.get("bias_frac"), is_signed=True),
        interval,
        *(_figures(bars, line["baselines"][b.name]) for b in BASELINES),
    ]


def _figures(bars: Sequence[Bar], found: Mapping[str, Any]) -> str:
    told = []
    for bar in bars:
        value = found.get(bar.figure)
        shown = "-" if value is None else bar.shown(value)
        told.append(f"{FIGURE_NAMES[bar.figure]} {shown}".strip())
    return "; ".join(told)


def _worst(worst: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = [
        [title, ", ".join(f"{r['row_id']} ({r['layout']}) {_signed(r)}" for r in found)]
        for title, found in worst.items()
        if found
    ]
    return markdown_table(["set", "rows"], rows)


def _signed(row: Mapping[str, Any]) -> str:
    return _percent(row["error_frac"], is_signed=True)


def _percent(value: float | None, *, is_signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f}" if is_signed else f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
