"""``forerun report``: what a calibrated run says of itself; no torch needed."""

from __future__ import annotations

import argparse
import json
import sys
import time

from ..calib.analysis import Request, analyse
from ..calib.samples.table import SampleTable
from ..calib.unmodelled_run import analyse_steps
from .answers import REQUEST, artefacts
from .cli import ExitCode
from .loaded_runs import Loaded, load
from .report_table import console
from .report_tables import show
from .run_folders import object_of_run, top_of


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
    )
    if args.json:
        print(json.dumps({"schema": 1, "run_id": answer.run_id, **artefacts(answer)}, indent=2))
    else:
        show(answer, console())
    return ExitCode.THRESHOLD if answer.is_stop else ExitCode.ANSWER


def _report_steps(args: argparse.Namespace, loaded: Loaded) -> int:
    """The report of a run whose layout nobody knows, as beside training."""
    request = _request(args, loaded.table)
    answer = analyse_steps(loaded.table, request, num_steps=0)
    if args.json:
        value = {"schema": 1, "run_id": answer.run_id, "transcript": list(answer.transcript)}
        print(json.dumps(value, indent=2))
    else:
        for problem in loaded.problems:
            print(f"forerun: {problem}", file=sys.stderr)
        print("\n".join(answer.transcript))
    return ExitCode.ANSWER


def _request(args: argparse.Namespace, table: SampleTable) -> Request:
    """What the user had asked of the run, where that was kept."""
    top, own = top_of(args.directory)
    saved = object_of_run(top if own else args.directory, REQUEST, table.run_id)
    return Request(now_unix_s=time.time()) if saved is None else Request.from_json(saved)
