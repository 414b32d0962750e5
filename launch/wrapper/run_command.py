"""``forerun run -- torchrun ...``: the exit code that a scheduler can act on, and clean ends."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ..._forerun_autoload import is_off
from ...calib.arguments import MASK, kept_command
from ...calib.errors import ConfigError
from ...calib.shell import joined
from ...calib.workload import OnAdvice, RunOptions, encode, encode_fields
from ..directory.launch_files import launch_id
from ..options.flags import FLAGS, split
from .log_lines import answer, complain, finish, hold_standard_descriptors, say
from .resubmit import is_written, relaunch, script
from .run_options import SCRIPT
from .slurm import GIVEN, Allocation, allocation, num_jobs, time_option
from .wrapped import Outcome, WrapOptions, Wrapped

_DEFAULTS = RunOptions()
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """How long the next job should be."""

    left_p95_s: float
    job_s: float
    """What is left, start-up, a save and the margin."""
    time: str
    wall_s: float | None = None
    num_jobs: int | None = None
    """Jobs of ``wall_s`` in a chain; None where not even one step would fit, or none was given."""


def run(args: argparse.Namespace) -> int:
    """Start, watch, and answer for the command."""
    if not args.command:
        raise ConfigError(
            "no command to run; give one after --, as in: forerun run -- torchrun ..."
        )
    hold_standard_descriptors()
    options = wrap_options(args, os.environ, time.time())
    _say_limit(options.allocation)
    code = _dry_run(args, options) if args.dry_run else _launch(args, options)
    finish()
    return code


def _launch(args: argparse.Namespace, options: WrapOptions) -> int:
    try:
        outcome = Wrapped(options).run()
    except OSError as err:
        code, why = 126, f"{err.strerror or err}; give a program that can be started"
        if isinstance(err, FileNotFoundError):
            code, why = 127, "not found; give a program on PATH"
        complain(f"{args.command[0]}: {why}")
        if args.json:
            told = {"schema": 1, "command": list(kept_command(args.command)), "exit_code": code}
            answer(json.dumps(told))
        return code
    code = outcome.exit_code(args.stop_exit_code)
    with suppress(KeyboardInterrupt):
        _guarded("tell how it ended", lambda: _conclude(args, options, outcome, code))
    return code


def _conclude(args: argparse.Namespace, options: WrapOptions, outcome: Outcome, code: int) -> None:
    """Write the script, lines of the log, and the answer as JSON."""
    found = suggest(outcome, options, args.job_time)
    path = _guarded("write the script", lambda: _resubmit(args, options, outcome, found))
    _say_end(outcome, code, found)
    if args.json:
        told = {
            **_plan(options),
            "exit_code": code,
            "child_code": outcome.child_code,
            "wall_s": outcome.wall_s,
            "asked": outcome.asked,
            "signals": [int(number) for number in outcome.signals],
            "num_killed": outcome.num_ended,
            "num_left": len(outcome.left),
            "stop": encode(outcome.ending.stopped),
            "suggestion": encode(found),
            "resubmit": None if path is None else str(path),
        }
        answer(json.dumps(told))


def _guarded(what: str, work: Callable[[], _Found]) -> _Found | None:
    """None for a fault of ours, which is told and changes neither training nor the exit code."""
    try:
        return work()
    except Exception as err:
        say(f"cannot {what} ({type(err).__name__}: {err})")
        return None


def wrap_options(
    args: argparse.Namespace, environ: Mapping[str, str], now_unix_s: float
) -> WrapOptions:
    """What the options, the flags inside the command and the scheduler say together."""
    own = split([word for word in args.command if word != "--"]).own
    directory = args.directory or Path(_last(own, "dir", str(_DEFAULTS.directory)))
    granted = _guarded("read the limit", lambda: allocation(environ, now_unix_s)) or Allocation()
    if args.time_limit is not None:
        granted = replace(
            granted,
            start_unix_s=now_unix_s,
            end_unix_s=now_unix_s + args.time_limit,
            source=GIVEN,
            left_s=None,
        )
    advice = _last(own, "on-advice", _DEFAULTS.on_advice.value)
    has_session = bool(own) or args.directory is not None
    return WrapOptions(
        command=tuple(args.command),
        directory=directory,
        launch_id=launch_id(environ),
        allocation=granted,
        grace_s=args.grace,
        margin_s=args.margin,
        patience_s=args.stop_patience,
        listens=(has_session or environ.get("FORERUN_CALIBRATE") == "1") and not is_off(environ),
        saves_before_limit=args.save_before_limit or advice == OnAdvice.STOP.value,
    )


def suggest(outcome: Outcome, options: WrapOptions, wall_s: float | None) -> Suggestion | None:
    """The time of the next job; None where the run is done or was never forecast."""
    is_done = outcome.child_code == 0 and outcome.ending.stopped is None and not outcome.asked
    forecast = outcome.ending.forecast
    if forecast is None or is_done:
        return None
    left_s = forecast.left_s(outcome.ending.forecast_age_s)
    lost_s = outcome.ending.startup_s + forecast.longest_save_s + options.margin_s
    wall_s = wall_s or options.allocation.length_s
    return Suggestion(
        left_p95_s=left_s,
        job_s=left_s + lost_s,
        time=time_option(left_s + lost_s),
        wall_s=wall_s,
        num_jobs=None if wall_s is None else num_jobs(left_s, wall_s, lost_s),
    )


def _resubmit(
    args: argparse.Namespace, options: WrapOptions, outcome: Outcome, found: Suggestion | None
) -> Path | None:
    """Write the script where there is advice; a problem is told and changes nothing."""
    stop = outcome.ending.stopped
    if args.resubmit_script is None and not (stop and stop.is_advised):
        return None
    advised = (stop.command if stop else ()) or outcome.ending.advised
    again = relaunch(options.command, advised)
    if not again:
        if advised:
            say(f"the advised layout, for your own script: {joined(advised)}")
        if any(MASK in word for word in advised):
            say(f"{MASK} replaces a value that was not kept; write your own there")
        return None
    reason = stop.reason if stop else "the advised layout"
    text = script([*_wrapper(), "--", *again], reason, found.time if found else "", os.environ)
    wanted = args.resubmit_script or options.directory / SCRIPT
    written = [path for path in (outcome.folder / SCRIPT, wanted) if is_written(text, path)]
    if written:
        say(f"to continue in the advised layout, start {written[-1]}")
    return written[-1] if written else None


def _wrapper() -> list[str]:
    """Our own words of this launch, as far as they can be known: those before ``--``.

    The program as it was started, so that the script needs no environment to be activated.
    """
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else ["run"]
    is_script = Path(sys.argv[0]).name == "forerun"
    return [*([sys.argv[0]] if is_script else [sys.executable, "-m", "forerun"]), *own]


def _dry_run(args: argparse.Namespace, options: WrapOptions) -> int:
    if args.json:
        answer(json.dumps(_plan(options)))
        return 0
    answer(joined(kept_command(options.command)))
    answer(f"calibrate directory: {options.directory}")
    answer(f"requests to save and stop: {'to the session' if options.listens else 'SIGTERM'}")
    answer(f"before the limit: {'save and stop' if options.saves_before_limit else 'warn'}")
    return 0


def _plan(options: WrapOptions) -> dict[str, Any]:
    granted = encode_fields(options.allocation)
    return {
        "schema": 1,
        "command": list(kept_command(options.command)),
        "directory": str(options.directory),
        "launch_id": options.launch_id,
        "listens": options.listens,
        "saves_before_limit": options.saves_before_limit,
        "allocation": {name: value for name, value in granted.items() if name != "left_s"},
    }


def _say_limit(granted: Allocation) -> None:
    job = f"Slurm job {granted.job_id}:"
    if granted.end_unix_s is not None:
        say(f"limit in {(granted.end_unix_s - time.time()) / 3600.0:.2f} h ({granted.source})")
    elif granted.source:
        say(f"{job} no time limit ({granted.source})")
    elif granted.job_id:
        say(f"{job} its limit is not known: no scontrol or squeue here; give --time-limit")


def _say_end(outcome: Outcome, code: int, found: Suggestion | None) -> None:
    stop = outcome.ending.stopped
    if outcome.signals:
        say(f"passed on: {', '.join(signal.Signals(n).name for n in outcome.signals)}")
    if outcome.num_ended:
        say(f"{outcome.num_ended} processes did not end in time and were killed")
    if outcome.left:
        say(f"processes that could not be ended: {', '.join(map(str, outcome.left))}")
    if stop is not None:
        codes = f"exit code {code} (of the command: {outcome.child_code})"
        say(f"stopped after iteration {stop.iteration}: {stop.reason}; {codes}")
    if found is not None:
        text = f"left {found.left_p95_s / 3600.0:.2f} h (P95): next job --time={found.time}"
        if found.wall_s is not None:
            wall, count = f"{found.wall_s / 3600.0:.3g} h", found.num_jobs
            text += f" · {count} jobs of {wall}" if count else f" · a job of {wall} is too short"
        say(text)


def _last(own: Sequence[str], name: str, default: str) -> str:
    """The value of the last flag of that name."""
    options = tuple(f"{flag}-{name}=" for flag in FLAGS)
    found = [word.partition("=")[2] for word in own if word.startswith(options)]
    return found[-1] if found else default
