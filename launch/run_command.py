"""``forerun run -- torchrun ...``: the exit code that a scheduler can act on, and clean ends."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calib.errors import ConfigError
from ..calib.workload.kept_arguments import MASK, kept_command
from .flags import PREFIX, is_own
from .resubmit import relaunch, write_script
from .run_files import advised_command
from .run_options import SCRIPT
from .slurm import Allocation, allocation, num_jobs, time_option
from .wrapped import Outcome, Wishes, Wrapped, say, words

DIRECTORY = "forerun-out"
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


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
            "no command to run; give one behind --, as in: forerun run -- torchrun ..."
        )
    wishes = wishes_of(args, os.environ, time.time())
    _say_limit(wishes.allocation)
    if args.dry_run:
        return _dry_run(args, wishes)
    try:
        outcome = Wrapped(wishes).run()
    except FileNotFoundError:
        return _no_start(args, f"{args.command[0]}: not found; give a program on PATH", _NOT_FOUND)
    except OSError as err:
        why = f"{args.command[0]}: {err.strerror or err}; give a program that can be started"
        return _no_start(args, why, _NOT_EXECUTABLE)
    code = outcome.exit_code(args.stop_exit_code)
    suggestion = suggest(outcome, wishes, args.job_time)
    script = _resubmit(args, wishes, outcome, suggestion)
    _say_end(outcome, code, suggestion)
    if args.json:
        print(json.dumps(_told(wishes, outcome, code, suggestion, script)), flush=True)
    return code


def wishes_of(args: argparse.Namespace, environ: Mapping[str, str], now_unix_s: float) -> Wishes:
    """What the options, the flags inside the command and the scheduler say together."""
    own = [word for word in args.command if is_own(word)]
    directory = args.directory or Path(_last(own, "dir", DIRECTORY))
    granted = allocation(environ, now_unix_s)
    if args.time_limit is not None:
        granted = Allocation(
            job_id=granted.job_id,
            start_unix_s=now_unix_s,
            end_unix_s=now_unix_s + args.time_limit,
            source="--time-limit",
        )
    has_session = bool(own) or args.directory is not None
    return Wishes(
        command=tuple(args.command),
        directory=directory,
        allocation=granted,
        grace_s=args.grace,
        margin_s=args.margin,
        patience_s=args.stop_patience,
        listens=has_session or environ.get("FORERUN_CALIBRATE") == "1",
        saves_before_limit=args.save_before_limit or _last(own, "on-advice", "log") == "stop",
        is_limit_fixed=args.time_limit is not None,
    )


def suggest(outcome: Outcome, wishes: Wishes, wall_s: float | None) -> Suggestion | None:
    """The time of the next job; None where the run is done or was never forecast."""
    is_done = outcome.child_code == 0 and outcome.stopped is None and not outcome.asked
    if outcome.forecast is None or is_done:
        return None
    left_s = outcome.forecast.left_s(outcome.end_unix_s)
    lost_s = outcome.startup_s + outcome.forecast.longest_save_s + wishes.margin_s
    wall_s = wall_s or wishes.allocation.length_s
    return Suggestion(
        left_p95_s=left_s,
        job_s=left_s + lost_s,
        time=time_option(left_s + lost_s),
        wall_s=wall_s,
        num_jobs=None if wall_s is None else num_jobs(left_s, wall_s, lost_s),
    )


def _resubmit(
    args: argparse.Namespace, wishes: Wishes, outcome: Outcome, suggestion: Suggestion | None
) -> Path | None:
    """Write the script where there is advice; a problem is told and changes nothing."""
    is_stop = outcome.stopped is not None and outcome.stopped.is_advised
    if not is_stop and args.resubmit_template is None:
        return None
    stopped = outcome.stopped.command if outcome.stopped else ()
    advised = stopped or advised_command(wishes.directory, outcome.start_unix_s)
    again = relaunch(wishes.command, advised)
    if not again:
        if advised:
            say(f"advised, for a script that starts it itself: {shlex.join(advised)}")
            if any(MASK in word for word in advised):
                say(f"{MASK} stands for a value that is not kept; write your own in its place")
        return None
    path = args.resubmit_template or wishes.directory / SCRIPT
    reason = outcome.stopped.reason if outcome.stopped else "the advised layout"
    time_text = suggestion.time if suggestion else ""
    try:
        write_script(
            path, again, wrapper=_wrapper(), reason=reason, time=time_text, environ=os.environ
        )
    except OSError as err:
        say(f"{path}: {err.strerror or err}; the advised layout is in decision.json")
        return None
    say(f"to go on in the advised layout: {path}")
    return path


def _wrapper() -> list[str]:
    """Our own words of this launch, as far as they can be known: those before ``--``.

    The program as it was started, so that the script needs no environment to be activated.
    """
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else ["run"]
    is_script = Path(sys.argv[0]).name == "forerun"
    return [*([sys.argv[0]] if is_script else [sys.executable, "-m", "forerun"]), *own]


def _dry_run(args: argparse.Namespace, wishes: Wishes) -> int:
    if args.json:
        print(json.dumps({"schema": 1, **_plan(wishes)}))
        return 0
    print(shlex.join(kept_command(wishes.command)))
    print(f"calibrate directory: {wishes.directory}")
    print(f"requests to save and stop: {'to the session' if wishes.listens else 'SIGTERM'}")
    print(f"before the limit: {'save and stop' if wishes.saves_before_limit else 'warn'}")
    return 0


def _plan(wishes: Wishes) -> dict[str, Any]:
    granted = wishes.allocation
    return {
        "command": list(kept_command(wishes.command)),
        "directory": str(wishes.directory),
        "listens": wishes.listens,
        "saves_before_limit": wishes.saves_before_limit,
        "allocation": {
            "job_id": granted.job_id,
            "start_unix_s": granted.start_unix_s,
            "end_unix_s": granted.end_unix_s,
            "source": granted.source,
        },
    }


def _told(
    wishes: Wishes,
    outcome: Outcome,
    code: int,
    suggestion: Suggestion | None,
    script: Path | None,
) -> dict[str, Any]:
    return {
        "schema": 1,
        **_plan(wishes),
        "exit_code": code,
        "child_code": outcome.child_code,
        "wall_s": outcome.end_unix_s - outcome.start_unix_s,
        "asked": outcome.asked,
        "signals": [int(number) for number in outcome.signals],
        "num_killed": outcome.num_ended,
        "num_left": len(outcome.left),
        "stop": outcome.stopped.to_json() if outcome.stopped else None,
        "suggestion": None
        if suggestion is None
        else {name: getattr(suggestion, name) for name in suggestion.__dataclass_fields__},
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
        say(f"passed on: {words(outcome.signals)}")
    if outcome.num_ended:
        say(f"{outcome.num_ended} processes did not end in time and were killed")
    if outcome.left:
        say(f"could not be ended: processes {', '.join(map(str, outcome.left))}")
    if outcome.stopped is not None:
        found = outcome.stopped
        say(
            f"stopped after iteration {found.iteration}: {found.reason}; "
            f"exit {code} (the command's own: {outcome.child_code})"
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
    print(f"forerun: {text}", file=sys.stderr)
    if args.json:
        print(
            json.dumps(
                {"schema": 1, "command": list(kept_command(args.command)), "exit_code": code}
            )
        )
    return code


def _last(own: Sequence[str], name: str, default: str) -> str:
    """The value of the last flag of that name."""
    option = f"{PREFIX}{name}="
    found = [word.removeprefix(option) for word in own if word.startswith(option)]
    return found[-1] if found else default
