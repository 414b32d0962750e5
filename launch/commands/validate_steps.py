"""``forerun validate steps`` and ``forerun validate design``: models of whole steps on tables."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...calib.errors import CalibrationError, ConfigError
from ...calib.importers.own_format import read_table
from ...calib.importers.own_steps import read_steps
from ...calib.records.step_rows import StepRow, StepTable
from ...calib.steps.design import design, expected_sigma_log
from ...calib.steps.table_steps import TableSteps
from ...calib.units import format_frac
from ...calib.validation.scores import joined
from ...calib.validation.step_protocols import (
    LEAVE_ONE_OUT,
    STEP_PROTOCOLS,
    Fold,
    calibrate_on,
    machines,
    named,
)
from ...calib.validation.step_scores import (
    layout_text,
    step_results,
    step_rows,
    worst_rows,
)
from ...calib.validation.steps import score_folds
from ..known.table_files import read_frame, table_names
from ..options.cluster_files import read_cluster
from ..report.table import ReportTable, console, show_table
from .outcome import ExitCode, grouped, print_json, tell

# What fits on a screen beside the summary; the rest is in --json.
_NUM_GROUPS = 12
_NUM_REASONS = 5
_COLUMNS = {
    "mape_frac": "MAPE",
    "median_ape_frac": "median",
    "p90_ape_frac": "p90",
    "bias_frac": "bias",
    "coverage_90_frac": "covers",
    "interval_width_frac": "width",
    "kendall_tau": "tau",
    "regret_median_frac": "regret",
    "regret_p95_frac": "p95 of it",
    "memory_mape_frac": "memory",
}
_LABEL_CHARS = 36


def validate_steps(args: argparse.Namespace) -> int:
    """Print the scores of the step model on every table."""
    _check(args)
    model = _model(args)
    results: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    worst: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for table in _tables(args):
        skipped += [
            {"table": table.name, "row_id": row.row_id, "reason": row.reason}
            for row in table.skipped
        ]
        folds = score_folds(table.rows, _folds(table, args), model)
        if not folds:
            continue
        scored = joined(folds)
        results += step_results(scored, table.name)
        rows += step_rows(scored, table.name)
        worst += [{"table": table.name, **row} for row in worst_rows(scored)]
    if not results:
        raise CalibrationError(
            "no protocol can be scored; give a table with more usable rows of a machine than "
            "--calibrate-on"
        )
    if args.json:
        found = {"results": results, "worst": worst, "rows": rows}
        print_json({"model": model.name, **found, "skipped": skipped})
    else:
        for shown in _report(model.name, results, worst):
            show_table(shown, console())
    return ExitCode.ANSWER


def validate_design(args: argparse.Namespace) -> int:
    """Print which rows of each machine would teach most, and how sure all would be afterwards."""
    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows} is below 1; give how many layouts to measure")
    found: list[dict[str, Any]] = []
    for table in _tables(args):
        for machine, positions in machines(table.rows).items():
            own = [table.rows[i] for i in positions]
            chosen = design(own, min(args.rows, len(own)))
            head = {"table": table.name, "machine": machine}
            found += [
                {**head, **_designed(own, chosen, place)} for place in range(1, len(chosen) + 1)
            ]
    if not found:
        raise CalibrationError("no table has a usable row; give one with layouts")
    if args.json:
        print_json({"results": found})
    else:
        for shown in _design_report(found):
            show_table(shown, console())
    return ExitCode.ANSWER


def _designed(rows: Sequence[StepRow], chosen: Sequence[int], place: int) -> dict[str, Any]:
    row = rows[chosen[place - 1]]
    return {
        "place": place,
        "row_id": row.row_id,
        "group": row.group,
        "layout": layout_text(row),
        "expected_error_frac": round(expected_sigma_log(rows, chosen[:place]), 6),
    }


def _check(args: argparse.Namespace) -> None:
    if args.draws < 1:
        raise ConfigError(f"--draws {args.draws} is below 1; give how many random draws to pool")
    if args.calibrate_on is not None and args.calibrate_on < 0:
        raise ConfigError(f"--calibrate-on {args.calibrate_on} is below 0; give a number of rows")
    for protocol in args.protocol or ():
        if protocol not in STEP_PROTOCOLS:
            raise ConfigError(
                f"--protocol {protocol} is not a protocol of steps; choose from "
                f"{', '.join(STEP_PROTOCOLS)}, or give a number of rows with --calibrate-on"
            )


def _model(args: argparse.Namespace) -> TableSteps:
    """The calibrated step model, on the operator tables where there are any."""
    named = zip(args.operators, table_names(args.operators), strict=True)
    tables = [read_table(read_frame(path), name) for path, name in named]
    return TableSteps(tables, read_cluster(args.cluster))


def _tables(args: argparse.Namespace) -> Iterator[StepTable]:
    for path, name in zip(args.files, table_names(args.files), strict=True):
        table = read_steps(read_frame(path), name)
        _tell_left_out(table)
        yield table


def _folds(table: StepTable, args: argparse.Namespace) -> Iterator[Fold]:
    """Without a choice: priors alone, and one row left out at a time."""
    chosen = list(dict.fromkeys(args.protocol or ()))
    counts = [] if args.calibrate_on is None else [args.calibrate_on]
    if not chosen and not counts:
        chosen, counts = [LEAVE_ONE_OUT], [0]
    for count in counts:
        folds = list(calibrate_on(table.rows, count, args.draws))
        if not folds:
            tell(f"{table.name}: no machine has more than {count} usable rows")
        yield from folds
    for protocol in chosen:
        folds = list(named(table.rows, protocol))
        if not folds:
            tell(f"{table.name}: {protocol} is left out; it needs {STEP_PROTOCOLS[protocol]}")
        yield from folds


def _tell_left_out(table: StepTable) -> None:
    flags = Counter(row.flag for row in table.rows if row.flag)
    reasons = Counter(row.reason for row in table.skipped)
    for text, counts in (
        ("flagged, and neither fitted nor scored", flags),
        ("that are not a layout Forerun can describe", reasons),
    ):
        if counts:
            told = [f"{reason} ({number})" for reason, number in counts.most_common(_NUM_REASONS)]
            more = f" and {len(counts) - len(told)} more" if len(counts) > len(told) else ""
            total = len(table.rows) + len(table.skipped)
            shown = "; ".join(told)
            tell(f"{table.name}: {sum(counts.values())} of {total} rows {text}: {shown}{more}")
    if table.unused:
        tell(f"{table.name}: nothing reads the columns {', '.join(table.unused)}")


def _report(
    name: str,
    results: Sequence[Mapping[str, Any]],
    worst: Sequence[Mapping[str, Any]],
) -> Iterator[ReportTable]:
    """A table for each file and protocol, with its groups; then the worst rows."""
    for (table, protocol), (whole, *own) in grouped(results, "table", "protocol").items():
        label = name + (" (synthetic)" if whole.get("is_synthetic") else "")
        lines = [_cells(label, whole)]
        lines += [_cells(f"  {row['group']}", row) for row in own[:_NUM_GROUPS]]
        if len(own) > _NUM_GROUPS:
            lines.append(_cells(f"  and {len(own) - _NUM_GROUPS} more groups (--json)", {}))
        yield ReportTable(
            key=f"{table}/{protocol}",
            title=f"{table}: {protocol} (percent)",
            columns=("model or group", "rows", *_COLUMNS.values()),
            rows=tuple(lines),
        )
    for (table,), rows in grouped(worst, "table").items():
        yield ReportTable(
            key=f"{table}/worst",
            title=f"{table}: worst rows",
            columns=("row", "layout", "mean error"),
            rows=tuple(
                (row["row_id"], row["layout"], format_frac(row["error_frac"], signed=True))
                for row in rows
            ),
        )


def _cells(label: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    values = [_cell(column, row.get(column)) for column in _COLUMNS]
    shown = label if len(label) <= _LABEL_CHARS else label[: _LABEL_CHARS - 2] + ".."
    return (shown, str(row.get("n", "")), *values)


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    if column == "kendall_tau":
        return f"{value:.2f}"
    return format_frac(value, signed=column == "bias_frac").removesuffix(" %")


def _design_report(found: Sequence[Mapping[str, Any]]) -> Iterator[ReportTable]:
    for (table, machine), rows in grouped(found, "table", "machine").items():
        yield ReportTable(
            key=f"{table}/{machine}",
            title=f"{table}: what to measure on {machine}",
            columns=("layout", "of", "row", "expected error afterwards"),
            rows=tuple(
                (
                    row["layout"],
                    row["group"],
                    row["row_id"],
                    format_frac(row["expected_error_frac"]),
                )
                for row in rows
            ),
        )
