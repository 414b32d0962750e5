"""``forerun validate``: how right the models are on tables of measurements."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from ...calib.errors import CalibrationError, ConfigError
from ...calib.importers.own_format import read_table, table_kind
from ...calib.units import format_frac
from ...calib.validation.collectives import COLLECTIVE_PROTOCOLS, validate_collectives
from ...calib.validation.operators import OPERATOR_PROTOCOLS, implausible, validate_operators
from ...calib.validation.scores import FIGURES, joined, noise_floors, score_rows
from ..known.table_files import read_frame, table_names
from ..options.cluster_files import read_cluster
from ..report.table import ReportTable, console, show_table
from .outcome import ExitCode, grouped, print_json, tell

OPERATORS = "operators"
_NUM_REASONS = 3
_FIGURE_TITLES = ("MAPE", "median", "p90", "bias", "90 % covers", "half-width")


def validate(args: argparse.Namespace) -> int:
    """Print the scores of every protocol that the tables can carry."""
    if args.what in ("steps", "design"):
        from .validate_steps import validate_design, validate_steps

        return validate_steps(args) if args.what == "steps" else validate_design(args)
    if args.seeds < 1:
        raise ConfigError(f"--seeds {args.seeds} is below 1; give how many random draws to pool")
    is_operators = args.what == OPERATORS
    run = _protocols_of(args)
    needs = OPERATOR_PROTOCOLS if is_operators else COLLECTIVE_PROTOCOLS
    chosen = tuple(dict.fromkeys(args.protocol or needs))
    for protocol in chosen:
        if protocol not in needs:
            raise ConfigError(
                f"--protocol {protocol} is not a protocol of {args.what}; choose from "
                f"{', '.join(needs)}"
            )
    rows: list[dict[str, object]] = []
    floors: dict[tuple[str, str], str] = {}
    for name, frame in _read(args.files, args.what).items():
        _tell_flags(name, frame)
        if is_operators:
            _tell_implausible(name, frame)
        parts = _each_protocol(run, name, frame, chosen, range(args.seeds))
        found = score_rows(joined(parts), name)
        carried = {row["protocol"] for row in found}
        for protocol in (p for p in chosen if p not in carried):
            tell(f"{name}: {protocol} is left out; it needs {needs[protocol]}")
        rows += found
        if is_operators:
            floors |= _floors(name, frame)
    if not rows:
        raise CalibrationError(f"no protocol can be scored; {chosen[0]} needs {needs[chosen[0]]}")
    if args.json:
        print_json({"results": rows})
    else:
        for table in _report(rows, floors):
            show_table(table, console())
    return ExitCode.ANSWER


def _protocols_of(args: argparse.Namespace) -> Callable[..., pd.DataFrame]:
    """What scores the tables; of collectives with what a cluster file states."""
    path: Path | None = args.cluster
    if args.what == OPERATORS:
        if path is not None:
            raise ConfigError("--cluster is for collectives; leave it out with operators")
        return validate_operators
    if path is None:
        return validate_collectives
    return partial(validate_collectives, cluster=read_cluster(path))


def _each_protocol(
    run: Callable[..., pd.DataFrame],
    name: str,
    frame: pd.DataFrame,
    chosen: Sequence[str],
    seeds: Sequence[int],
) -> Iterator[pd.DataFrame]:
    """The scored rows of each protocol that has any; a terminal is told which one runs."""
    for place, protocol in enumerate(chosen, start=1):
        if sys.stderr.isatty():  # tens of seconds each on a large table
            tell(f"{name}: {protocol} ({place} of {len(chosen)})")
        found = run(frame, seeds=seeds, protocols=[protocol])
        if len(found):
            yield found


def _read(paths: Sequence[Path], what: str) -> dict[str, pd.DataFrame]:
    tables = {}
    for path, name in zip(paths, table_names(paths), strict=True):
        tables[name] = read_table(read_frame(path), name)
        holds = table_kind(tables[name])
        if holds != what:
            raise ConfigError(f"{name} holds {holds}; use forerun validate {holds} {path}")
    return tables


def _tell_flags(name: str, frame: pd.DataFrame) -> None:
    flagged = frame.loc[frame["flag"] != "", "flag"]
    if len(flagged):
        reasons = flagged.value_counts()
        tell(
            f"{name}: {len(flagged)} of {len(frame)} rows are flagged, and are neither fitted nor "
            f"scored; most frequent reason: {reasons.index[0]} ({reasons.iloc[0]})"
        )


def _tell_implausible(name: str, frame: pd.DataFrame) -> None:
    found = implausible(frame)
    for is_doubtful, text in (
        (False, "rows that are scored, but train no model"),
        (True, "rows that look wrong but are fitted, because they are most of their operator"),
    ):
        counts: Counter[str] = Counter()
        for refusal in (r for r in found if r.is_doubtful is is_doubtful):
            counts[f"{refusal.name} {refusal.reason.value}"] += refusal.num_refused
        if counts:
            shown = [f"{number} {what}" for what, number in counts.most_common(_NUM_REASONS)]
            more = f", and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
            tell(f"{name}: {text}: {', '.join(shown)}{more}")


def _floors(table: str, frame: pd.DataFrame) -> dict[tuple[str, str], str]:
    """How far repeats of a shape differ, in words, by table and group."""
    return {
        (table, str(group)): f"{_percent(mean_frac)} ({_percent(median_frac)})"
        for group, mean_frac, median_frac in noise_floors(frame).itertuples(name=None)
    }


def _report(
    rows: Sequence[Mapping[str, object]], floors: Mapping[tuple[str, str], str]
) -> Iterator[ReportTable]:
    """One table a file and protocol, ``all`` first."""
    for (table, protocol), members in grouped(rows, "table", "protocol").items():
        yield ReportTable(
            key=f"{table}/{protocol}",
            title=f"{table}: {protocol}",
            columns=("group", "rows", *_FIGURE_TITLES, "noise mean (median)"),
            rows=tuple(
                (
                    row["group"],
                    str(row["n"]),
                    *(_percent(row[name]) for name in FIGURES),
                    floors.get((table, row["group"]), ""),
                )
                for row in members
            ),
        )


def _percent(value: object) -> str:
    return format_frac(float(str(value)))
