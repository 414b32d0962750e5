"""``forerun report``: what a calibrated run says of itself; no torch needed."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.answers.analysis import Answer, Request, analyse, analyse_steps
from ...calib.answers.finish_line import moment
from ...calib.answers.transcript import prefixed
from ...calib.errors import RecordError
from ...calib.samples.table import SampleTable
from ..directory.bounded_files import number
from ..directory.forecast_log import end_of_run
from ..directory.run_folders import object_of_run, top_of
from ..known.runs import Loaded, load
from ..report.answers import CALIBRATION, REQUEST, artefacts
from ..report.run_tables import show
from ..report.table import console
from .outcome import ExitCode, print_json, tell


def report(args: argparse.Namespace) -> int:
    """Print what the run says of itself; 1 where the advice is to stop."""
    loaded = load(args.directory, args.run_id)
    if not loaded.table.is_described:
        return _report_steps(args, loaded)
    answer = analyse(
        loaded.table,
        _request(args, loaded.table),
        problems=loaded.problems,
        known=loaded.known,
        directory=str(args.directory),
    )
    answer = _with_the_past(args.directory, answer)
    if args.json:
        print_json({"run_id": answer.run_id, **artefacts(answer)})
    else:
        show(answer, console())
    return ExitCode.THRESHOLD if answer.is_stop else ExitCode.ANSWER


def _report_steps(args: argparse.Namespace, loaded: Loaded) -> int:
    """The report of a run whose layout nobody knows, as beside training."""
    request = _request(args, loaded.table)
    answer = analyse_steps(loaded.table, request, num_steps=0)
    if args.json:
        print_json({"run_id": answer.run_id, "transcript": list(answer.transcript)})
    else:
        tell(*loaded.problems)
        print("\n".join(answer.transcript))
    return ExitCode.ANSWER


def _with_the_past(directory: Path, answer: Answer) -> Answer:
    """With the finishes that were foretold while it trained, and its end, where these were kept."""
    top, _ = top_of(directory)
    kept: dict[str, Any] = {}
    with suppress(RecordError):  # a damaged file takes no answer from the records
        kept = object_of_run(top, CALIBRATION, answer.run_id) or {}
    rows = kept.get("history")
    finishes = {}
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, dict) and isinstance(row.get("window"), int):
            told = [number(row.get(f"finish_{name}_unix_s")) for name in ("before", "after")]
            finishes[row["window"]] = told[0] or None, told[1] or None
    ended_unix_s = end_of_run(top, answer.run_id)
    return replace(
        answer,
        history=answer.history.told(finishes),
        ended_unix_s=ended_unix_s,
        transcript=(*_past(answer, ended_unix_s), *answer.transcript),
    )


def _past(answer: Answer, ended_unix_s: float | None) -> list[str]:
    """Says of a run that is over as of when its lines are."""
    if ended_unix_s is None:
        return []
    at = moment(ended_unix_s, time.time())
    steps = answer.forecast.steps_done
    return prefixed([f"ended {at}; these lines are of iteration {steps}, when they were said"])


def _request(args: argparse.Namespace, table: SampleTable) -> Request:
    """What the user had asked of the run, where that was kept."""
    top, own = top_of(args.directory)
    saved = object_of_run(top if own else args.directory, REQUEST, table.run_id)
    return Request(now_unix_s=time.time()) if saved is None else Request.from_json(saved)
