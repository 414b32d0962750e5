"""``forerun compare``: all forecasts of finished runs compared with the outcome."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...calib.errors import RecordError
from ...calib.forecast import Coverage, Evaluation
from ...calib.units import format_frac, format_time
from ...hooks.process import FORECAST
from ..store import (
    FORECASTS,
    finish_line,
    forecasts_path,
    missing_run_message,
    read_forecasts,
    read_object,
    top_of,
)
from .arguments import ExitCode, checked_share, declare, print_json, print_notes

NUM_ROWS = 12
"""Maximum number of forecasts of a run in a table."""
_DESCRIPTION = (
    "For each finished run of these directories: the error of the forecast finish over time, how "
    "often its intervals and those of single steps held, and from which step on the forecast was "
    "right."
)
_ARGUMENTS = """
directories DIR   the directory that --calibrate-dir named
--fail-over FRAC  exit 1 if the first forecast of a run was off by more than this share of the run
"""
_RUN = ("run", "took", "forecasts", "first at", "first error")
_ERROR = ("made after step", "error", "of the whole run", "of what was left", "in 90 %")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    sub.description = _DESCRIPTION
    declare(sub, _ARGUMENTS, directories={"nargs": "+"})


def run(args: argparse.Namespace) -> int:
    """Print forecast errors; return 1 if a first forecast was off by more than ``--fail-over``."""
    over = checked_share(args.fail_over, "0.02")
    tracks, problems = read_tracks(args.directories)
    if not tracks:
        raise RecordError("; ".join(dict.fromkeys(problems)))
    print_notes(*problems)
    if args.json:
        print_json({"runs": [track.to_json() for track in tracks]})
    else:
        show(tracks)
    firsts = [abs(track.first.of_total_frac) for track in tracks if track.first is not None]
    is_over = over is not None and any(error_frac > over for error_frac in firsts)
    return ExitCode.THRESHOLD if is_over else ExitCode.ANSWER


def read_tracks(directories: Sequence[Path]) -> tuple[list[Evaluation], list[str]]:
    """Return evaluations of finished runs in or below these directories, and problems.

    For the folder of one launch, only the runs of that launch.
    """
    tracks: list[Evaluation] = []
    problems: list[str] = []
    for directory in directories:
        top, launch_run_ids = top_of(directory)
        below = sorted(path.parent for path in directory.glob(f"*/{FORECASTS}"))
        homes = [top] if forecasts_path(top).exists() else below
        if not homes:
            problems.append(missing_run_message(directory) or _without_forecasts(directory, top))
        for home in homes:
            logged = read_forecasts(home)
            problems += logged.problems
            for run_id in logged.made:
                if launch_run_ids and run_id not in launch_run_ids:
                    continue
                if (track := logged.track(run_id)) is not None:
                    tracks.append(track)
                else:
                    problems.append(
                        f"run {run_id!r} in {home} has not ended, or was lost: its forecasts are "
                        f"not scored; forerun status {home} says where it is"
                    )
    return tracks, problems


def _without_forecasts(directory: Path, top: Path) -> str:
    """Return why a directory has no forecasts, from its newest answer if there is one."""
    if reason := (read_object(top / FORECAST) or {}).get("reason_no_finish"):
        return f"{directory}: the finish was not forecast, {reason}"
    return (
        f"{directory} holds records but no {FORECASTS}: its runs made no forecast; give "
        f"--calibrate-total-steps=N at the next launch; forerun report {directory} analyses the "
        "records"
    )


def show(tracks: Sequence[Evaluation]) -> None:
    """Print one line per run, coverage, and the forecasts of a single run."""
    from ..views import ReportTable, console, show_table  # slow to import

    def table(
        key: str, title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]
    ) -> None:
        table = ReportTable(key=key, title=title, columns=tuple(columns), rows=tuple(rows))
        show_table(table, out)

    out = console()
    within = (f"within {format_frac(row.within_frac)} from" for row in tracks[0].settled)
    table("runs", "Finish: forecast and actual", (*_RUN, *within), map(_run, tracks))
    out.print()
    pairs = zip(
        zip(*(track.finish for track in tracks), strict=True),
        zip(*(track.steps for track in tracks), strict=True),
        strict=True,
    )
    coverage_rows = (
        (format_frac(one[0].nominal_frac), _coverage_text(one), _coverage_text(two))
        for one, two in pairs
    )
    title = "Coverage of intervals over all runs"
    table("coverage", title, ("nominal", "finish", "single steps"), coverage_rows)
    if len(tracks) == 1 and tracks[0].errors:
        out.print()
        table("errors", f"Forecasts of {tracks[0].run_id}", _ERROR, _errors(tracks[0]))
        print(finish_line(tracks[0]))


def _run(track: Evaluation) -> tuple[str, ...]:
    first, since = track.first, [row.stays_from_iteration for row in track.settled]
    return (
        *(track.run_id, format_time(track.total_s), str(track.num_forecasts)),
        "" if first is None else f"step {first.iteration}",
        "not reached" if first is None else format_frac(first.of_total_frac, signed=True),
        *("" if iteration is None else f"step {iteration}" for iteration in since),
    )


def _coverage_text(rows: Sequence[Coverage]) -> str:
    num, num_inside = sum(row.num for row in rows), sum(row.num_inside for row in rows)
    return f"{format_frac(num_inside / num)} of {num}" if num else ""


def _errors(track: Evaluation) -> list[tuple[str, ...]]:
    every = max(1, math.ceil(len(track.errors) / NUM_ROWS))
    return [
        (
            *(str(error.iteration), f"{error.error_s:+.1f} s"),
            *(format_frac(f, signed=True) for f in (error.of_total_frac, error.of_left_frac)),
            "yes" if error.is_inside else "no",
        )
        for error in (*track.errors[:-1:every], track.errors[-1])
    ]
