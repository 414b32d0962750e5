"""``forerun compare``: every forecast that was made, held against what happened."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ...calib.errors import ConfigError, RecordError
from ...calib.forecast import Coverage, Evaluation, Settled
from ...calib.units import format_frac, format_time
from ...hooks.process import FORECAST
from ..directory.bounded_files import read_object
from ..directory.forecast_log import FORECASTS, finish_line, read_forecasts
from ..directory.run_folders import nothing_in, top_of
from ..report.table import ReportTable, console, show_table
from .outcome import ExitCode, print_json, tell

NUM_ROWS = 12
"""Forecasts of a run that a table shows."""


def compare(args: argparse.Namespace) -> int:
    """Print how the forecasts did; 1 where a first one was off by more than ``--fail-over``."""
    over = args.fail_over
    if over is not None and not 0 <= over < math.inf:
        raise ConfigError(f"--fail-over {over} is not a share; give 0 or more, such as 0.02")
    tracks, problems = found_tracks(args.directories)
    if not tracks:
        raise RecordError("; ".join(dict.fromkeys(problems)))
    tell(*problems)
    if args.json:
        print_json({"runs": [track.to_json() for track in tracks]})
    else:
        show(tracks)
    firsts = [abs(track.first.of_total_frac) for track in tracks if track.first is not None]
    is_over = over is not None and any(error_frac > over for error_frac in firsts)
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def found_tracks(directories: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """Runs that have ended, in these directories or below them; and what could not be read.

    Of a directory that is the folder of one launch, its runs alone.
    """
    tracks: list[Evaluation] = []
    problems: list[str] = []
    for directory in directories:
        top, own = top_of(directory)
        homes = [top] if (top / FORECASTS).exists() else _homes_below(directory)
        if not homes:
            problems.append(nothing_in(directory) or _without_forecasts(directory, top))
        for home in homes:
            logged = read_forecasts(home)
            problems += logged.problems
            for run_id in logged.made:
                if own and run_id not in own:
                    continue
                found = logged.track(run_id)
                if found is None:
                    problems.append(
                        f"run {run_id!r} in {home} has not ended, or was lost: its forecasts are "
                        f"not scored; forerun status {home} says where it is"
                    )
                else:
                    tracks.append(found)
    return tracks, problems


def _without_forecasts(directory: Path, top: Path) -> str:
    """Why a directory has none: what its newest answer says, where there is one."""
    said = read_object(top / FORECAST) or {}
    if reason := said.get("reason_no_finish"):
        return f"{directory}: the finish was not forecast, {reason}"
    return (
        f"{directory} holds records but no {FORECASTS}: its runs made no forecast; give "
        f"--calibrate-total-steps=N at the next launch; forerun report {directory} analyses the "
        "records"
    )


def show(tracks: Sequence[Evaluation]) -> None:
    """One line for each run; then, for a single one, its forecasts."""
    out = console()
    show_table(_runs(tracks), out)
    out.print()
    show_table(_coverage(tracks), out)
    if len(tracks) == 1 and tracks[0].errors:
        out.print()
        show_table(_errors(tracks[0]), out)
        print(finish_line(tracks[0]))


def _homes_below(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob(f"*/{FORECASTS}"))


def _runs(tracks: Sequence[Evaluation]) -> ReportTable:
    rows = [
        (
            track.run_id,
            format_time(track.total_s),
            str(track.num_forecasts),
            "" if track.first is None else f"step {track.first.iteration}",
            "not reached" if track.first is None else _signed(track.first.of_total_frac),
            *(_from(row) for row in track.settled),
        )
        for track in tracks
    ]
    return ReportTable(
        key="runs",
        title="Finish: forecast against what happened",
        columns=(
            *("run", "took", "forecasts", "first at", "first error"),
            *(f"within {format_frac(row.within_frac)} from" for row in tracks[0].settled),
        ),
        rows=tuple(rows),
    )


def _from(row: Settled) -> str:
    return "" if row.stays_from_iteration is None else f"step {row.stays_from_iteration}"


def _coverage(tracks: Sequence[Evaluation]) -> ReportTable:
    rows = [
        (f"{format_frac(finish[0].nominal_frac)}", _held(finish), _held(steps))
        for finish, steps in zip(
            zip(*(track.finish for track in tracks), strict=True),
            zip(*(track.steps for track in tracks), strict=True),
            strict=True,
        )
    ]
    return ReportTable(
        key="coverage",
        title="How often intervals held, over all runs",
        columns=("nominal", "finish", "single steps"),
        rows=tuple(rows),
    )


def _held(rows: Sequence[Coverage]) -> str:
    num, num_inside = sum(row.num for row in rows), sum(row.num_inside for row in rows)
    return f"{format_frac(num_inside / num)} of {num}" if num else ""


def _errors(track: Evaluation) -> ReportTable:
    every = max(1, math.ceil(len(track.errors) / NUM_ROWS))
    kept = [*track.errors[:-1:every], track.errors[-1]]
    rows = [
        (
            str(error.iteration),
            f"{error.error_s:+.1f} s",
            _signed(error.of_total_frac),
            _signed(error.of_left_frac),
            "yes" if error.is_inside else "no",
        )
        for error in kept
    ]
    return ReportTable(
        key="errors",
        title=f"Forecasts of {track.run_id}",
        columns=("made after step", "error", "of the whole run", "of what was left", "in 90 %"),
        rows=tuple(rows),
    )


def _signed(frac: float) -> str:
    return format_frac(frac, signed=True)
