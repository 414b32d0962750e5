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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..._forerun_autoload import is_off
from ...calib.arguments.kept_arguments import MASK, kept_command
from ...calib.errors import ConfigError
from ...calib.shell import joined
from ...calib.workload.config_json import encode, encode_fields
from ...calib.workload.run_options import OnAdvice, RunOptions
from ..directory.launch_files import launch_id
from ..options.flags import FLAGS, split
from .log_lines import answer, complain, finish, hold_standard_descriptors, say
from .resubmit import Script, read_template, relaunch
from .run_options import SCRIPT
from .slurm import Allocation, allocation, num_jobs, time_option
from .wrapped import Outcome, WrapOptions, Wrapped

_DEFAULTS = RunOptions()
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126

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
    template = _guarded("read the template", lambda: _template(args), "")
    code = _dry_run(args, options) if args.dry_run else _launch(args, options, template)
    finish()
    return code


def _launch(args: argparse.Namespace, options: WrapOptions, template: str) -> int:
    try:
        outcome = Wrapped(options).run()
    except FileNotFoundError:
        return _no_start(args, f"{args.command[0]}: not found; give a program on PATH", _NOT_FOUND)
    except OSError as err:
        why = f"{args.command[0]}: {err.strerror or err}; give a program that can be started"
        return _no_start(args, why, _NOT_EXECUTABLE)
    code = outcome.exit_code(args.stop_exit_code)

    def conclude() -> None:
        suggestion = suggest(outcome, options, args.job_time)
        script = _guarded(
            "write the script",
            lambda: _resubmit(args, options, outcome, suggestion, template),
            None,
        )
        _say_end(outcome, code, suggestion)
        if args.json:
            answer(json.dumps(_told(options, outcome, code, suggestion, script)))

    with suppress(KeyboardInterrupt):
        _guarded("tell how it ended", conclude, None)
    return code


def _guarded(what: str, work: Callable[[], _Found], otherwise: _Found) -> _Found:
    """A fault of ours is told and changes neither training nor the exit code."""
    try:
        return work()
    except Exception as err:
        say(f"cannot {what} ({type(err).__name__}: {err})")
        return otherwise


def wrap_options(
    args: argparse.Namespace, environ: Mapping[str, str], now_unix_s: float
) -> WrapOptions:
    """What the options, the flags inside the command and the scheduler say together."""
    own = split([word for word in args.command if word != "--"]).own
    directory = args.directory or Path(_last(own, "dir", str(_DEFAULTS.directory)))
    granted = _guarded("read the limit", lambda: allocation(environ, now_unix_s), Allocation())
    if args.time_limit is not None:
        granted = Allocation(
            job_id=granted.job_id,
            start_unix_s=now_unix_s,
            end_unix_s=now_unix_s + args.time_limit,
            source="--time-limit",
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
        is_limit_fixed=args.time_limit is not None,
    )


def suggest(outcome: Outcome, options: WrapOptions, wall_s: float | None) -> Suggestion | None:
    """The time of the next job; None where the run is done or was never forecast."""
    is_done = outcome.child_code == 0 and outcome.stopped is None and not outcome.asked
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


def _template(args: argparse.Namespace) -> str:
    """What ``--resubmit-template`` names; one that cannot be used is told of before the start."""
    path = args.resubmit_template
    if path is None:
        return ""
    try:
        return read_template(path)
    except (OSError, ConfigError) as err:
        why = (err.strerror or err) if isinstance(err, OSError) else err
        say(f"--resubmit-template {path}: {why}; the script will be written without it")
        return ""


def _resubmit(
    args: argparse.Namespace,
    options: WrapOptions,
    outcome: Outcome,
    suggestion: Suggestion | None,
    template: str,
) -> Path | None:
    """Write the script where there is advice; a problem is told and changes nothing."""
    is_stop = outcome.stopped is not None and outcome.stopped.is_advised
    if not is_stop and args.resubmit_template is None and args.resubmit_script is None:
        return None
    advised = (outcome.stopped.command if outcome.stopped else ()) or outcome.ending.advised
    again = relaunch(options.command, advised)
    if not again:
        if advised:
            say(f"the advised layout, for your own script: {joined(advised)}")
            if any(MASK in word for word in advised):
                say(f"{MASK} replaces a value that was not kept; write your own there")
        return None
    script = Script(
        again=again,
        wrapper=tuple(_wrapper()),
        reason=outcome.stopped.reason if outcome.stopped else "the advised layout",
        time=suggestion.time if suggestion else "",
        launch_id=outcome.folder.name,
        directory=options.directory,
        template=template,
    )
    wanted = args.resubmit_script or options.directory / SCRIPT
    written = [path for path in (outcome.folder / SCRIPT, wanted) if _is_written(script, path)]
    if written:
        say(f"to continue in the advised layout, start {written[-1]}")
    return written[-1] if written else None


def _is_written(script: Script, path: Path) -> bool:
    try:
        script.write(path, os.environ)
    except OSError as err:
        say(f"{path}: {err.strerror or err}")
        return False
    return True


def _wrapper() -> list[str]:
    """Our own words of this launch, as far as they can be known: those before ``--``.

    The program as it was started, so that the script needs no environment to be activated.
    """
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else ["run"]
    is_script = Path(sys.argv[0]).name == "forerun"
    return [*([sys.argv[0]] if is_script else [sys.executable, "-m", "forerun"]), *own]


def _dry_run(args: argparse.Namespace, options: WrapOptions) -> int:
    if args.json:
        answer(json.dumps({"schema": 1, **_plan(options)}))
        return 0
    answer(joined(kept_command(options.command)))
    answer(f"calibrate directory: {options.directory}")
    answer(f"requests to save and stop: {'to the session' if options.listens else 'SIGTERM'}")
    answer(f"before the limit: {'save and stop' if options.saves_before_limit else 'warn'}")
    return 0


def _plan(options: WrapOptions) -> dict[str, Any]:
    granted = encode_fields(options.allocation)
    return {
        "command": list(kept_command(options.command)),
        "directory": str(options.directory),
        "launch_id": options.launch_id,
        "listens": options.listens,
        "saves_before_limit": options.saves_before_limit,
        "allocation": {name: value for name, value in granted.items() if name != "left_s"},
    }


def _told(
    options: WrapOptions,
    outcome: Outcome,
    code: int,
    suggestion: Suggestion | None,
    script: Path | None,
) -> dict[str, Any]:
    return {
        "schema": 1,
        **_plan(options),
        "exit_code": code,
        "child_code": outcome.child_code,
        "wall_s": outcome.wall_s,
        "asked": outcome.asked,
        "signals": [int(number) for number in outcome.signals],
        "num_killed": outcome.num_ended,
        "num_left": len(outcome.left),
        "stop": encode(outcome.stopped),
        "suggestion": encode(suggestion),
        "resubmit": None if script is None else str(script),
    }


def _say_limit(granted: Allocation) -> None:
    if granted.end_unix_s is not None:
        left_h = (granted.end_unix_s - time.time()) / 3600.0
        say(f"limit in {left_h:.2f} h ({granted.source})")
    elif granted.job_id:
        known = (
            f"no time limit ({granted.source})"
            if granted.source
            else ("its limit is not known: no scontrol or squeue here; give --time-limit")
        )
        say(f"Slurm job {granted.job_id}: {known}")


def _say_end(outcome: Outcome, code: int, suggestion: Suggestion | None) -> None:
    if outcome.signals:
        say(f"passed on: {', '.join(signal.Signals(n).name for n in outcome.signals)}")
    if outcome.num_ended:
        say(f"{outcome.num_ended} processes did not end in time and were killed")
    if outcome.left:
        say(f"processes that could not be ended: {', '.join(map(str, outcome.left))}")
    if outcome.stopped is not None:
        found = outcome.stopped
        say(
            f"stopped after iteration {found.iteration}: {found.reason}; exit code {code} (of the "
            f"command: {outcome.child_code})"
        )
    if suggestion is None:
        return
    text = f"left {suggestion.left_p95_s / 3600.0:.2f} h (P95): next job --time={suggestion.time}"
    if suggestion.wall_s is not None:
        wall = f"{suggestion.wall_s / 3600.0:.3g} h"
        count = suggestion.num_jobs
        text += f" · {count} jobs of {wall}" if count else f" · a job of {wall} is too short"
    say(text)


def _no_start(args: argparse.Namespace, text: str, code: int) -> int:
    complain(text)
    if args.json:
        told = {"schema": 1, "command": list(kept_command(args.command)), "exit_code": code}
        answer(json.dumps(told))
    return code


def _last(own: Sequence[str], name: str, default: str) -> str:
    """The value of the last flag of that name."""
    options = tuple(f"{flag}-{name}=" for flag in FLAGS)
    found = [word.partition("=")[2] for word in own if word.startswith(options)]
    return found[-1] if found else default
