"""``forerun validate``: accuracy of the models on tables of measurements."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...calib.errors import CalibrationError, ConfigError
from ...calib.units import format_frac
from ..options import read_cluster
from .arguments import CLUSTER, ExitCode, declare, print_json, print_notes

if TYPE_CHECKING:
    import pandas as pd

    from ...calib import validation
    from ...calib.records import StepTable
    from ..views import ReportTable

_DESCRIPTION = (
    "Fits on one part of each table, scores on the rest. Protocols of operators: random, leave_tp; "
    "of collectives: random, leave_span; of steps: leave_one_out. At most 2,000 samples of an "
    "operator train and 2,000 are scored for each seed, drawn by the seed. steps: whole steps of "
    "layouts. design: the layouts that would be most worth measuring. Columns: "
    "recipes/published/FORMAT.md."
)
_ARGUMENTS = f"""
what              what to validate; design: which layouts to measure
files FILE        .csv[.gz], .parquet
--protocol NAME   only this protocol (may be repeated)
--seeds N         number of random draws to pool (default 5)
--calibrate-on K  steps: number of rows that calibrate; the rest is scored
--draws N         steps: draws of these rows (default 20)
--operators FILE  steps: tables of operators and collectives of the same devices
--rows K          design: number of layouts to name (default 10)
--cluster FILE    collectives, steps: {CLUSTER}"""
_NUM_REASONS = 3
_FLAGGED = "flagged, and neither fitted nor scored"
_SCORES = {
    **{"group": "group", "is_synthetic": "synthetic", "n": "rows", "mape_frac": "MAPE"},
    **{"median_ape_frac": "median", "p90_ape_frac": "p90", "bias_frac": "bias"},
    **{"coverage_90_frac": "covers", "interval_width_frac": "width", "kendall_tau": "tau"},
    **{"regret_median_frac": "regret", "regret_p95_frac": "p95 of it"},
    **{"memory_mape_frac": "memory", "noise_frac": "noise"},
}
Row = dict[str, Any]
JsonAndTables = tuple[dict[str, Any], "Iterator[ReportTable]"]
"""Answer as JSON and as tables."""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``validate``."""
    sub.description = _DESCRIPTION
    declare(
        sub,
        _ARGUMENTS,
        what={"choices": ("operators", "collectives", "steps", "design")},
        files={"nargs": "+"},
        protocol={"action": "append"},
        operators={"nargs": "+", "default": []},
        calibrate_on={"type": int},
        **{n: {"type": int, "default": d} for n, d in (("seeds", 5), ("draws", 20), ("rows", 10))},
    )


def run(args: argparse.Namespace) -> int:
    """Print the scores of every protocol that the tables allow, or the layouts to measure next."""
    from ..views import console, show_table

    _check(args)
    value, tables = {"steps": _steps, "design": _design}.get(args.what, _parts)(args)
    if args.json:
        print_json(value)
    else:
        for table in tables:
            show_table(table, console())
    return ExitCode.ANSWER


def _check(args: argparse.Namespace) -> None:
    from ...calib import validation

    for name, least in (("seeds", 1), ("draws", 1), ("rows", 1), ("calibrate_on", 0)):
        value: int | None = getattr(args, name)
        if value is not None and value < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is below {least}; give a larger number")
    if args.what == "operators" and args.cluster is not None:
        raise ConfigError("--cluster is for collectives; leave it out with operators")
    needs = validation.PROTOCOLS.get(args.what, {})
    for protocol in (args.protocol or ()) if needs else ():
        if protocol not in needs:
            more = ", or give --calibrate-on" if args.what == "steps" else ""
            raise ConfigError(
                f"--protocol {protocol} is not a protocol of {args.what}; choose from "
                f"{', '.join(needs)}{more}"
            )


def _parts(args: argparse.Namespace) -> JsonAndTables:
    """Return the scores of operator or collective models."""
    from ...calib import validation
    from ...calib.importers import read_table, table_kind
    from ..known import read_frame, table_names

    is_operators, needs = args.what == "operators", validation.PROTOCOLS[args.what]
    run = validation.score_operators
    if not is_operators:
        network = partial(validation.fit_network, cluster=read_cluster(args.cluster))
        run = partial(validation.score_collectives, fit=network)
    rows: list[Row] = []
    noise: dict[tuple[str, str], float] = {}
    for path, name in zip(args.files, table_names(args.files), strict=True):
        frame = read_table(read_frame(path), name)
        if (holds := table_kind(frame)) != args.what:
            raise ConfigError(f"{name} holds {holds}; use forerun validate {holds} {path}")
        _print_counts(name, len(frame), _FLAGGED, frame["flag"])
        if is_operators:
            _print_implausible(name, frame)
            floors = validation.noise_floors(frame)["mean_frac"]
            noise |= {(name, str(group)): floor for group, floor in floors.items()}
        for protocol in dict.fromkeys(args.protocol or needs):
            scored = run(frame, protocol, range(args.seeds))
            if scored.empty:
                print_notes(f"{name}: {protocol} is left out; it needs {needs[protocol]}")
            rows += validation.score_rows(scored, name)
    if not rows:
        protocol, need = next(iter(needs.items()))
        raise CalibrationError(f"no protocol can be scored; {protocol} needs {need}")
    rows_with_noise = (
        {**row, "noise_frac": noise.get((row["table"], row["group"]))} for row in rows
    )
    return {"results": rows}, _tables(
        "{}: {} (percent)", _SCORES, rows_with_noise, "table", "protocol"
    )


def _steps(args: argparse.Namespace) -> JsonAndTables:
    """Return the scores of the step model, based on the operator tables if there are any."""
    from ...calib import validation
    from ...calib.importers import read_table
    from ...calib.steps import TableSteps
    from ..known import read_frame, table_names

    names = zip(args.operators, table_names(args.operators), strict=True)
    tables = [read_table(read_frame(path), name) for path, name in names]
    model = TableSteps(tables, read_cluster(args.cluster))
    results: dict[str, list[Row]] = {"results": [], "worst": [], "rows": [], "skipped": []}
    for table in _step_tables(args):
        for skip in table.skipped:
            skipped_row = {"table": table.name, "row_id": skip.row_id, "reason": skip.reason}
            results["skipped"].append(skipped_row)
        if folds := list(_folds(table, args)):
            scored = validation.concat_scored(validation.score_folds(table.rows, folds, model.fit))
            results["results"] += validation.step_results(scored, table.name)
            worst_rows = validation.worst_rows(scored)
            results["worst"] += [{"table": table.name, **row} for row in worst_rows]
            results["rows"] += validation.step_rows(scored, table.name)
    if not results["results"]:
        raise CalibrationError(
            "no protocol can be scored; give a table with more usable rows of a machine than "
            "--calibrate-on"
        )
    scores = _tables("{}: {} (percent)", _SCORES, results["results"], "table", "protocol")
    columns = {"row_id": "row", "layout": "layout", "error_frac": "mean error"}
    worst = _tables("{}: worst rows (percent)", columns, results["worst"], "table")
    return {"model": model.name, **results}, chain(scores, worst)


def _design(args: argparse.Namespace) -> JsonAndTables:
    """Return the most informative rows of each machine, with the expected error afterwards."""
    from ...calib import validation
    from ...calib.steps import design, expected_sigma_log

    design_rows: list[Row] = []
    for table in _step_tables(args):
        for machine, positions in validation.machines(table.rows).items():
            machine_rows = [table.rows[i] for i in positions]
            chosen = design(machine_rows, min(args.rows, len(machine_rows)))
            for place, row in enumerate((machine_rows[i] for i in chosen), start=1):
                sigma = expected_sigma_log(machine_rows, chosen[:place])
                head = {"table": table.name, "machine": machine, "place": place}
                which = {"row_id": row.row_id, "group": row.group}
                which |= {"layout": validation.layout_text(row)}
                design_rows.append({**head, **which, "expected_error_frac": round(sigma, 6)})
    if not design_rows:
        raise CalibrationError("no table has a usable row; give one with layouts")
    columns = {"layout": "layout", "group": "of", "row_id": "row"}
    columns |= {"expected_error_frac": "expected error afterwards"}
    title = "{}: what to measure on {} (percent)"
    return {"results": design_rows}, _tables(title, columns, design_rows, "table", "machine")


def _step_tables(args: argparse.Namespace) -> Iterator[StepTable]:
    from ...calib.importers import read_steps
    from ..known import read_frame, table_names

    for path, name in zip(args.files, table_names(args.files), strict=True):
        table = read_steps(read_frame(path), name)
        total = len(table.rows) + len(table.skipped)
        _print_counts(name, total, _FLAGGED, (row.flag for row in table.rows))
        reasons = (row.reason for row in table.skipped)
        _print_counts(name, total, "that are not a layout Forerun can describe", reasons)
        if table.unused:
            print_notes(f"{name}: nothing reads the columns {', '.join(table.unused)}")
        yield table


def _folds(table: StepTable, args: argparse.Namespace) -> Iterator[validation.Fold]:
    """Yield the folds; by default priors alone, and leave-one-out."""
    from ...calib import validation

    counts: list[int | None] = [] if args.calibrate_on is None else [args.calibrate_on]
    counts += [None] if args.protocol else []
    for count in counts or (0, None):
        folds = list(validation.step_folds(table.rows, count, args.draws))
        if not folds:
            print_notes(f"{table.name}: no machine has more than {count or 1} usable rows")
        yield from folds


def _print_counts(name: str, total: int, what: str, reasons: Iterable[str]) -> None:
    counts = Counter(filter(None, reasons))
    if counts:
        counted_reasons = [
            f"{reason} ({number})" for reason, number in counts.most_common(_NUM_REASONS)
        ]
        more = (
            f" and {len(counts) - len(counted_reasons)} more"
            if len(counts) > len(counted_reasons)
            else ""
        )
        print_notes(
            f"{name}: {counts.total()} of {total} rows {what}: {'; '.join(counted_reasons)}{more}"
        )


def _print_implausible(name: str, frame: pd.DataFrame) -> None:
    from ...calib import validation

    findings = sorted(validation.implausible(frame), key=lambda one: -one.num_refused)
    for one in findings[:_NUM_REASONS]:
        fate = "are fitted, since most are alike" if one.is_doubtful else "train no model"
        print_notes(f"{name}: {one.num_refused} rows of {one.name} {fate}: {one.reason.value}")


def _tables(
    title: str, columns: Mapping[str, str], rows: Iterable[Row], *by: str
) -> Iterator[ReportTable]:
    """Yield one table per group of rows with equal ``by`` values, without empty columns."""
    from ..views import ReportTable

    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(row[name]) for name in by)].append(row)
    for names, members in groups.items():
        filled_columns = [n for n in columns if any(row.get(n) is not None for row in members)]
        yield ReportTable(
            key="/".join(names),
            title=title.format(*names),
            columns=tuple(columns[name] for name in filled_columns),
            rows=tuple(
                tuple(_cell(name, row.get(name)) for name in filled_columns) for row in members
            ),
        )


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str | bool):
        return "yes" if value is True else value or ""
    if isinstance(value, int):
        return str(value)
    if name == "kendall_tau":
        return f"{value:.2f}"
    return format_frac(value, signed=name in ("bias_frac", "error_frac")).removesuffix(" %")
