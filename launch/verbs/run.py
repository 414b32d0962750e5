"""``forerun run -- torchrun ...``: clean shutdown, and an exit code for the scheduler."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..._forerun_autoload import is_off
from ...calib.arguments.passed_on import MASK, masked_command
from ...calib.errors import ConfigError
from ...calib.records.iso_times import LONGEST_S
from ...calib.shell import joined
from ...calib.workload.config_json import encode, encode_fields
from ...calib.workload.run_options import OnAdvice, RunOptions, duration
from ..batch_text import time_option
from ..options.flags import FLAGS, split
from ..store.launch_files import launch_id
from ..wrapper.log_lines import (
    finish,
    log_error,
    log_line,
    print_line,
    reserve_standard_descriptors,
)
from ..wrapper.resubmit import relaunch, script, try_write_script
from ..wrapper.slurm import GIVEN, Allocation, allocation, duration_s, num_jobs
from ..wrapper.wrapped import Outcome, WrapOptions, WrappedLaunch
from .arguments import declare

STOP_EXIT_CODE = 93
"""Exit code of a stop on advice, which must not be requeued."""
SCRIPT = "resubmit.sh"
_DESCRIPTION = (
    "Starts the command after --, passes SIGTERM, SIGINT and SIGHUP on once, takes SIGUSR1 and "
    "SIGUSR2 as a request to save and stop, and leaves no process behind. Exits with the command's "
    "code, 128+n if signal n ended it, 93 if it stopped on advice."
)
_ARGUMENTS = f"""
--directory DIR       the --calibrate-dir of a command inside a script
--stop-exit-code N    exit code of a stop on advice (default {STOP_EXIT_CODE})
--grace TIME          time from SIGTERM to SIGKILL (default 2m)
--stop-patience TIME  time from a request to save and stop to SIGTERM (default 5m)
--margin TIME         time to spare before the limit (default 5m)
--time-limit TIME     time limit from now on (default: what Slurm grants)
--job-time TIME       wall time of one job, to count the chained jobs that are left
--save-before-limit   save and stop before the limit, instead of only warning
--resubmit-script FILE  where to write the script with the advised layout, even without a stop
                        (default, only on an advised stop: DIR/{SCRIPT}); a file that Forerun did
                        not write is never replaced
--dry-run  only print what would run and what the scheduler grants
--json     one JSON value as the last line of standard output
"""
_TIMES = {
    "grace": 120.0,
    "stop_patience": 300.0,
    "margin": 300.0,
    "time_limit": None,
    "job_time": None,
}
_DEFAULTS = RunOptions()
_Result = TypeVar("_Result")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``run``; its command follows ``--``."""
    sub.usage, sub.description = "forerun run [options] -- COMMAND ...", _DESCRIPTION
    sub.set_defaults(takes_command=True)
    times = {name: {"type": _time, "default": default_s} for name, default_s in _TIMES.items()}
    code = {"type": _code, "default": STOP_EXIT_CODE}
    declare(sub, _ARGUMENTS, stop_exit_code=code, **times)


def _time(text: str) -> float:
    """Return seconds from a number with s, m, h or d, or Slurm's ``days-hours:minutes:seconds``."""
    try:
        time_s = duration(text)
    except ValueError:
        time_s = duration_s(text) or float("inf")
    if time_s < LONGEST_S:
        return time_s
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a time; give one such as 600, 10m, 48h or 2-00:00:00"
    )


def _code(text: str) -> int:
    if re.fullmatch(r"\d{1,3}", text, re.ASCII) and 1 <= int(text) <= 125:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} cannot be chosen as exit code; give 1 to 125")


def run(args: argparse.Namespace) -> int:
    """Start and watch the command; return the exit code."""
    if not args.command:
        raise ConfigError(
            "no command to run; give one after --, as in: forerun run -- torchrun ..."
        )
    reserve_standard_descriptors()
    options = wrap_options(args, os.environ, time.time())
    _log_limit(options.allocation)
    code = _dry_run(args, options) if args.dry_run else _launch(args, options)
    finish()
    return code


def _launch(args: argparse.Namespace, options: WrapOptions) -> int:
    try:
        outcome = WrappedLaunch(options).run()
    except OSError as err:
        code, why = 126, f"{err.strerror or err}; give a program that can be started"
        if isinstance(err, FileNotFoundError):
            code, why = 127, "not found; give a program on PATH"
        log_error(f"{args.command[0]}: {why}")
        if args.json:
            command = list(masked_command(args.command))
            failure = {"schema": 1, "command": command, "exit_code": code}
            print_line(json.dumps(failure))
        return code
    code = outcome.exit_code(args.stop_exit_code)
    with suppress(KeyboardInterrupt):
        _guarded("tell how it ended", lambda: _conclude(args, options, outcome, code))
    return code


def _conclude(args: argparse.Namespace, options: WrapOptions, outcome: Outcome, code: int) -> None:
    """Write the resubmission script, log lines, and the answer as JSON."""
    job = suggest(outcome, options, args.job_time)
    text = job["time"] if job else ""
    path = _guarded("write the script", lambda: _resubmit(args, options, outcome, text))
    _log_end(outcome, code, job)
    if args.json:
        end = {
            "exit_code": code,
            "child_code": outcome.child_code,
            "wall_s": outcome.wall_s,
            "asked": outcome.request_reason,
            "signals": [int(number) for number in outcome.signals],
            "num_killed": outcome.num_ended,
            "num_left": len(outcome.surviving_pids),
            "stop": encode(outcome.ending.stopped),
            "suggestion": job,
            "resubmit": None if path is None else str(path),
        }
        print_line(json.dumps({**_plan(options), **end}))


def _guarded(what: str, work: Callable[[], _Result]) -> _Result | None:
    """Return the result of ``work``; a fault of ours is logged and gives None, without effect on
    training or exit code."""
    try:
        return work()
    except Exception as err:
        log_line(f"cannot {what} ({type(err).__name__}: {err})")
        return None


def wrap_options(
    args: argparse.Namespace, environ: Mapping[str, str], now_unix_s: float
) -> WrapOptions:
    """Combine the options, the flags inside the command and the scheduler's limit."""
    calibrate_flags = split([word for word in args.command if word != "--"]).flags
    directory = args.directory or Path(_last(calibrate_flags, "dir", str(_DEFAULTS.directory)))
    granted = _guarded("read the limit", lambda: allocation(environ, now_unix_s)) or Allocation()
    if args.time_limit is not None:
        span = {"start_unix_s": now_unix_s, "end_unix_s": now_unix_s + args.time_limit}
        granted = replace(granted, source=GIVEN, remaining_s=None, **span)
    advice = _last(calibrate_flags, "on-advice", _DEFAULTS.on_advice.value)
    has_session = bool(calibrate_flags) or args.directory is not None
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


def suggest(outcome: Outcome, options: WrapOptions, wall_s: float | None) -> dict[str, Any] | None:
    """Return the length of the next job; None if the run is done or was never forecast.

    ``job_s`` is the remaining time plus start-up, a save and the margin.  ``num_jobs`` is the
    number of chained jobs of ``wall_s``; None if not even one step would fit, or ``wall_s`` is
    unknown.
    """
    ending, forecast = outcome.ending, outcome.ending.forecast
    is_done = outcome.child_code == 0 and ending.stopped is None and not outcome.request_reason
    if forecast is None or is_done:
        return None
    remaining_s = forecast.remaining_after_s(ending.forecast_age_s)
    lost_s = ending.startup_s + ending.longest_save_s + options.margin_s
    wall_s = wall_s or options.allocation.length_s
    job = {
        "left_p95_s": remaining_s,
        "job_s": remaining_s + lost_s,
        "time": time_option(remaining_s + lost_s),
    }
    count = None if wall_s is None else num_jobs(remaining_s, wall_s, lost_s)
    return {**job, "wall_s": wall_s, "num_jobs": count}


def _resubmit(
    args: argparse.Namespace, options: WrapOptions, outcome: Outcome, time_text: str
) -> Path | None:
    """Write the script if there is advice; problems are only logged."""
    stop = outcome.ending.stopped
    if args.resubmit_script is None and not (stop and stop.is_advised):
        return None
    advised = (stop.command if stop else ()) or outcome.ending.advised
    next_command = relaunch(options.command, advised)
    if not next_command:
        if advised:
            log_line(f"the advised layout, for your own script: {joined(advised)}")
        if any(MASK in word for word in advised):
            log_line(f"{MASK} replaces a value that was not recorded; write your own there")
        return None
    reason = stop.reason if stop else "the advised layout"
    text = script([*_wrapper(), "--", *next_command], reason, time_text, os.environ)
    wanted = args.resubmit_script or options.directory / SCRIPT
    written = [path for path in (outcome.folder / SCRIPT, wanted) if try_write_script(text, path)]
    if written:
        log_line(f"to continue in the advised layout, start {written[-1]}")
    return written[-1] if written else None


def _wrapper() -> list[str]:
    """Return our part of this launch's command line, as far as known: the words before ``--``.

    The program is given as it was started, so that the script needs no activated environment.
    """
    wrapper_words = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else ["run"]
    is_script = Path(sys.argv[0]).name == "forerun"
    safe_path = ["-P"] * (sys.version_info >= (3, 11))
    program = [sys.argv[0]] if is_script else [sys.executable, *safe_path, "-m", "forerun"]
    return [*program, *wrapper_words]


def _dry_run(args: argparse.Namespace, options: WrapOptions) -> int:
    lines = (
        joined(masked_command(options.command)),
        f"calibrate directory: {options.directory}",
        f"requests to save and stop: {'to the session' if options.listens else 'SIGTERM'}",
        f"before the limit: {'save and stop' if options.saves_before_limit else 'warn'}",
    )
    for line in [json.dumps(_plan(options))] if args.json else lines:
        print_line(line)
    return 0


def _plan(options: WrapOptions) -> dict[str, Any]:
    names = ("launch_id", "listens", "saves_before_limit")
    granted = encode_fields(options.allocation)
    return {
        "schema": 1,
        "command": list(masked_command(options.command)),
        "directory": str(options.directory),
        **{name: getattr(options, name) for name in names},
        "allocation": {name: value for name, value in granted.items() if name != "remaining_s"},
    }


def _log_limit(granted: Allocation) -> None:
    job = f"Slurm job {granted.job_id}:"
    if granted.end_unix_s is not None:
        log_line(f"limit in {(granted.end_unix_s - time.time()) / 3600.0:.2f} h ({granted.source})")
    elif granted.source:
        log_line(f"{job} no time limit ({granted.source})")
    elif granted.job_id:
        log_line(f"{job} its limit is not known: no scontrol or squeue here; give --time-limit")


def _log_end(outcome: Outcome, code: int, job: dict[str, Any] | None) -> None:
    stop = outcome.ending.stopped
    if outcome.signals:
        log_line(f"passed on: {', '.join(signal.Signals(n).name for n in outcome.signals)}")
    if outcome.num_ended:
        log_line(f"{outcome.num_ended} processes did not end in time and were killed")
    if outcome.surviving_pids:
        log_line(
            f"processes that could not be ended: {', '.join(map(str, outcome.surviving_pids))}"
        )
    if stop is not None:
        codes = f"exit code {code} (of the command: {outcome.child_code})"
        log_line(f"stopped after iteration {stop.iteration}: {stop.reason}; {codes}")
    if job is not None:
        text = f"left {job['left_p95_s'] / 3600.0:.2f} h (P95): next job --time={job['time']}"
        if job["wall_s"] is not None:
            wall, count = f"{job['wall_s'] / 3600.0:.3g} h", job["num_jobs"]
            text += f" · {count} jobs of {wall}" if count else f" · a job of {wall} is too short"
        log_line(text)


def _last(calibrate_flags: Sequence[str], name: str, default: str) -> str:
    """Return the value of the last flag of that name, or the default."""
    options = tuple(f"{flag}-{name}=" for flag in FLAGS)
    values = [word.partition("=")[2] for word in calibrate_flags if word.startswith(options)]
    return values[-1] if values else default
