"""``forerun status``: current state of a directory's runs, once or until none is live."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from ...calib.errors import RecordError
from ...calib.forecast.evaluation import Ended
from ...calib.forecast.forecast_record import Forecast
from ...calib.plain_json import JsonObject
from ...calib.records.iso_times import Action, action_text, iso_time, stamped
from ...calib.records.run_values import LAUNCH, MARKER, RUNS
from ...calib.shell import printable_lines
from ...calib.units import format_time
from ...calib.workload.config_json import Encoded, encode_fields, encoded
from ...hooks.process.host_wandb import FORECAST
from ...hooks.process.interpreter import is_installed
from ..store.forecast_log import Logged, read_forecasts
from ..store.run_folders import (
    DECISION,
    began,
    decoded_or_empty,
    finite_number,
    followed,
    launch_folders,
    missing_run_message,
    read_object,
    top_of,
)
from ..store.status_file import STALE_S, STATUS, Phase, StatusFile, status_of
from .arguments import DIRECTORY, ExitCode, add_schema, declare, print_answer, print_notes

_DESCRIPTION = (
    "For each launch of the directory: live, ended, stopped (before its last step), lost (ended "
    "without notice) or logged (read from a log), its step, its end, the decision. Exits with 1 if "
    "the advice is to stop."
)
_ARGUMENTS = f"""
{DIRECTORY}
--run-id NAME  only this run (its beginning is enough) or launch
--watch        redraw it until no run is live, or Ctrl-C; without a terminal, print a line for each
               change, with --json a JSON value for each
"""


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of ``status``."""
    sub.description = _DESCRIPTION
    declare(sub, _ARGUMENTS)
    add_schema(sub, "status")


def run(args: argparse.Namespace) -> int:
    """Print the state of each launch, once or until no run is live; return 1 if one should stop."""
    return watch(args) if args.watch else status(args)


_DRIFT = "drift.json"
_READ = (STATUS, FORECAST, DECISION, _DRIFT, MARKER)


class State(Enum):
    """State of a run."""

    LIVE = "live"
    ENDED = "ended"
    """Reached its last step."""
    STOPPED = "stopped"
    """Ended before its last step, on advice or by itself."""
    LOST = "lost"
    """Disappeared without notice, or no longer reports."""
    LOGGED = "logged"
    """Read from a log before its last step; whether it still runs is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(Encoded):
    """State of a launch, by its newest run; None if unknown."""

    launch_id: str
    run_id: str
    directory: str
    """Folder of its answers."""
    state: State
    iteration: int | None
    """Steps done."""
    steps_total: int | None
    step_time_s: float | None
    """Median of the newest steps, else the forecast's step time."""
    step_low_s: float | None
    """Lower end of the 90 % interval of single steps."""
    step_high_s: float | None
    """Upper end of that interval."""
    finish_p50_unix_s: float | None
    finish_p95_unix_s: float | None
    """95th percentile of the end."""
    decision: str | None
    """``action`` of ``decision.json``."""
    reason: str
    """Reason of the decision or the stop."""
    drift: str
    """Newest drift of the step; empty without one."""
    heard_unix_s: float | None
    """Time of the last event from training."""
    age_s: float | None
    """Seconds since that event."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        local = _local(self.finish_p50_unix_s)
        text = local and local.isoformat(timespec="seconds")
        return encoded(**encode_fields(self), finish_p50_local=text)

    @property
    def is_stop_advised(self) -> bool:
        """True if the run should be stopped, or was."""
        return self.decision == Action.STOP.value and self.state in (State.LIVE, State.STOPPED)


def _local(unix_s: float | None) -> datetime | None:
    """Return a time in this machine's time zone; None if it is invalid."""
    try:
        return datetime.fromtimestamp(unix_s).astimezone() if unix_s else None
    except (ValueError, OverflowError, OSError):
        return None


def run_statuses(
    directory: Path, now_unix_s: float, run_id: str | None = None
) -> tuple[list[RunStatus], list[str]]:
    """Return the launches of a directory, the newest last, and unreadable files.

    For the folder of one launch, only that one; with ``run_id``, the launch of that run or of that
    name.  Raises ``RecordError`` if there is none.
    """
    top, launch_run_ids = top_of(directory)
    # Without launches, the answers of earlier versions.
    folders = [followed(directory)] if launch_run_ids else launch_folders(top)[::-1] or [top]
    logged = read_forecasts(top)
    problems = [*logged.problems]
    statuses = []
    for folder in folders:
        launch_id, names = _names(folder, logged, problems)
        if run_id is not None and run_id != launch_id:
            found = tuple(name for name in names if name.startswith(run_id))
            names = (run_id,) if run_id in names else found
        if names:
            launch = _Launch(folder, names, problems)
            statuses.append(launch.status(launch_id, logged, now_unix_s))
    if not statuses:
        raise RecordError(_nothing(directory, run_id))
    return statuses, [*dict.fromkeys(problems)]


def _nothing(directory: Path, run_id: str | None) -> str:
    if run_id is not None and not missing_run_message(directory):
        return f"{directory} has no run {run_id}; forerun status {directory} lists its runs"
    return missing_run_message(directory) or (
        f"{directory} has records but no answers yet: a run answers after its first window; "
        f"forerun report {directory} analyses the records"
    )


def _names(folder: Path, logged: Logged, problems: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the launch id of a folder and its runs, the newest last."""
    if folder.parent.name == RUNS:
        value = _object(folder / LAUNCH, problems)
        run_ids = value.get("run_ids")
        names = tuple(n for n in run_ids if isinstance(n, str)) if isinstance(run_ids, list) else ()
        return str(value.get("launch_id") or folder.name), names
    # Answers of versions without launch folders.
    stated_ids = (_object(folder / name, problems).get("run_id") for name in _READ)
    known = [*logged.made, *logged.ended, *(name for name in stated_ids if isinstance(name, str))]
    return "", tuple(dict.fromkeys(known))


def _object(path: Path, problems: list[str]) -> Mapping[str, Any]:
    """Return a file's JSON object; empty if missing; an unreadable file is added to
    ``problems``."""
    value = read_object(path)
    if value is None and os.path.lexists(path):
        problems.append(f"{path} cannot be read, skipped; delete it")
    return value or {}


class _Launch:
    """Files of a launch's newest run."""

    def __init__(self, folder: Path, names: tuple[str, ...], problems: list[str]) -> None:
        self._folder, self._run_id = folder, names[-1]
        values = {name: _object(folder / name, problems) for name in _READ}
        self._values = {
            name: value for name, value in values.items() if value.get("run_id") == self._run_id
        }
        self._ahead = decoded_or_empty(Forecast, self._values.get(FORECAST))
        self._now = status_of(self._values[STATUS]) if STATUS in self._values else None

    def status(self, launch_id: str, logged: Logged, now_unix_s: float) -> RunStatus:
        """Return the status at a time."""
        ahead, now, ended = self._ahead, self._now, logged.ended.get(self._run_id)
        done, total = self._steps(logged, ended)
        heard = ahead.now_unix_s if ended is None else ended.last_step_unix_s
        heard = heard if now is None else now.heard_unix_s
        state = self._state(now_unix_s, done, total, is_ended=ended is not None)
        has_future = state in (State.LIVE, State.LOGGED)
        step = ahead.step_time_s, ahead.single_low_s, ahead.single_high_s
        if now is not None and now.num_steps:
            step = now.step_time_s, now.step_low_s, now.step_high_s
        return RunStatus(
            launch_id=launch_id,
            run_id=self._run_id,
            directory=str(self._folder),
            state=state,
            iteration=done or None,
            steps_total=total or None,
            step_time_s=step[0] or None,
            step_low_s=step[1] or None,
            step_high_s=step[2] or None,
            finish_p50_unix_s=(ahead.finish_p50_unix_s or None) if has_future else None,
            finish_p95_unix_s=(ahead.finish_p95_unix_s or None) if has_future else None,
            **self._decision(),
            drift=self._drift(),
            heard_unix_s=heard or None,
            age_s=max(0.0, now_unix_s - heard) if heard else None,
        )

    def _steps(self, logged: Logged, ended: Ended | None) -> tuple[int, int]:
        """Return the number of steps done and of all steps; 0 if unknown."""
        now, ahead = self._now or StatusFile(), self._ahead
        known = [(now.iteration, now.steps_total)]
        if ended is not None:
            known.append((ended.iteration, ended.steps_total))
        if ahead.finish_p50_unix_s > 0:  # without a finish, no steps are left to count
            known.append((ahead.steps_done, ahead.steps_done + ahead.steps_left))
        else:
            known.append((ahead.steps_done, 0))
        for one in logged.made.get(self._run_id, ())[-1:]:
            known.append((one.steps_done, one.steps_done + one.steps_left))
        return max(0, *(done for done, _ in known)), next((n for _, n in known if n > 0), 0)

    def _state(self, now_unix_s: float, done: int, total: int, *, is_ended: bool) -> State:
        now = self._now
        if now is not None:
            is_ended = now.phase is Phase.ENDED
            if now.is_live(now_unix_s):
                return State.LIVE
        if 0 < total <= done:
            return State.ENDED
        if now is not None and now.phase is Phase.LOGGED:
            return State.LOGGED
        if MARKER in self._values or (is_ended and total):
            return State.STOPPED
        # The folder precedes the first files, so a new folder without files is not a lost run.
        is_new = 0 <= now_unix_s - began(self._folder)[0] < STALE_S
        if is_new and not (self._values or is_ended):
            return State.LIVE
        return State.ENDED if is_ended else State.LOST

    def _decision(self) -> dict[str, Any]:
        """Return the action, and the reason of the stop, else the decision's strongest reason."""
        value = self._values.get(DECISION, {})
        rows = _objects(value, "reasons")
        rows.sort(key=lambda one: (bool(one.get("is_met")), finite_number(one.get("probability"))))
        texts = [row.get("text") for row in rows] + [self._values.get(MARKER, {}).get("reason")]
        action = value.get("action")
        return {
            "decision": action if isinstance(action, str) else None,
            "reason": next((text for text in reversed(texts) if isinstance(text, str)), ""),
        }

    def _drift(self) -> str:
        """Return the newest drift line of this run."""
        events = _objects(self._values.get(_DRIFT, {}), "events")
        lines = [one.get("line") for one in events if one.get("run_id") == self._run_id]
        return next((line for line in reversed(lines) if isinstance(line, str)), "")


def _objects(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = value.get(name)
    return [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []


def text_lines(statuses: Sequence[RunStatus]) -> list[str]:
    """Return all known properties of one run, or one line for each of several."""
    return [*map(status_line, statuses)] if len(statuses) > 1 else _words(statuses[0])


def status_line(run_status: RunStatus) -> str:
    """Return one line on a launch, for a list of several."""
    return " · ".join(_words(run_status, is_one=False))


def _words(run_status: RunStatus, *, is_one: bool = True) -> list[str]:
    """Return the known properties, the first with the name; of one run also why, and no drift."""
    name = run_status.launch_id or run_status.run_id
    age_s = run_status.age_s
    words = (
        f"{f'run {run_status.run_id}' if is_one else name}: {run_status.state.value}",
        _progress(run_status),
        _step(run_status),
        _ends(run_status),
        _decision(run_status, has_reason=is_one),
        run_status.drift or "no drift" * is_one,
        "" if age_s is None else f"last update {_ago(age_s)} ago",
    )
    return [text for text in words if text]


def _progress(run_status: RunStatus) -> str:
    if run_status.iteration is None:
        return "no step yet" if run_status.state is State.LIVE else "no step"
    total = run_status.steps_total
    share = f" of {total} ({100 * min(1.0, run_status.iteration / total):.0f} %)" if total else ""
    step = "last update at step" if run_status.state is State.LOST else "step"
    return f"{step} {run_status.iteration}{share}"


def _step(run_status: RunStatus) -> str:
    if run_status.step_time_s is None:
        return ""
    text = f"{format_time(run_status.step_time_s)} per step"
    if run_status.step_low_s is None or run_status.step_high_s is None:
        return text
    ends = f"{format_time(run_status.step_low_s)} to {format_time(run_status.step_high_s)}"
    return f"{text} (90 % of steps: {ends})"


def _ends(run_status: RunStatus) -> str:
    if run_status.finish_p50_unix_s is None:
        return "no forecast yet" if run_status.state is State.LIVE else ""
    local = _local(run_status.finish_p50_unix_s)
    here = "" if local is None else f" ({local:%a %H:%M %Z} here)"
    text = f"ends {iso_time(run_status.finish_p50_unix_s)}{here}"
    if run_status.finish_p95_unix_s is None:
        return text
    return f"{text}, by {iso_time(run_status.finish_p95_unix_s)} with 95 %"


def _decision(run_status: RunStatus, *, has_reason: bool) -> str:
    if run_status.decision is None:
        return f"stopped: {run_status.reason}" if run_status.reason else ""
    if run_status.state in (State.ENDED, State.STOPPED) and not run_status.is_stop_advised:
        return ""  # the page and the report say what the next launch could do
    reason = f" ({run_status.reason})" if has_reason and run_status.reason else ""
    return f"decision: {action_text(run_status.decision)}{reason}"


def _ago(age_s: float) -> str:
    """Return an age in whole seconds, minutes, hours or days.

    >>> _ago(2.4), _ago(200.0), _ago(9000.0), _ago(400_000.0)
    ('2 s', '3 min', '2 h', '4 d')
    """
    for unit_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if age_s >= 2 * unit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return f"{age_s:.0f} s"


def status(args: argparse.Namespace) -> int:
    """Print the state of each launch; return 1 if one is advised to stop."""
    now_unix_s = args.clock()
    statuses, problems = run_statuses(args.directory, now_unix_s, args.run_id)
    if not args.json:
        print_notes(*problems)
    value = _json(args.directory, now_unix_s, statuses, problems)
    print_answer(args, value, text_lines(statuses))
    return _exit_code(statuses)


def _json(
    directory: Path, now_unix_s: float, statuses: Sequence[RunStatus], problems: Sequence[str]
) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "now_unix_s": now_unix_s,
        "runs": [one.to_json() for one in statuses],
        "problems": list(problems),
    }


def _exit_code(statuses: Sequence[RunStatus]) -> ExitCode:
    """Return ``THRESHOLD`` if a run is advised to stop, else ``ANSWER``."""
    is_stop = any(one.is_stop_advised for one in statuses)
    return ExitCode.THRESHOLD if is_stop else ExitCode.ANSWER


EVERY_S = 1.0
"""Polling interval of the files, seconds."""
Show: TypeAlias = Callable[[Sequence[RunStatus]], object]


def watch(args: argparse.Namespace) -> int:
    """Show changes until no run is live, waiting for a run that has not begun.

    Ctrl-C ends it too, and is no error once there is a run.
    """
    statuses: list[RunStatus] = []
    try:
        _await_run(args)
        is_screen = not args.json and sys.stdout.isatty() and is_installed("rich")
        with _screen() if is_screen else _lines() as show:
            while True:
                now_unix_s = args.clock()
                seen, problems = run_statuses(args.directory, now_unix_s, args.run_id)
                statuses, before = _watched(seen, statuses), statuses
                if args.json:
                    if _news(statuses) != _news(before):
                        value = _json(args.directory, now_unix_s, statuses, problems)
                        print(json.dumps(stamped(value)), flush=True)
                else:
                    if not before:
                        print_notes(*problems)
                    show(statuses)
                if not any(one.state is State.LIVE for one in statuses):
                    return _exit_code(statuses)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return ExitCode.ANSWER if statuses else ExitCode.NO_DATA


def _await_run(args: argparse.Namespace) -> None:
    """Wait until the directory has a run."""
    for place in count():
        try:
            run_statuses(args.directory, args.clock(), args.run_id)
            return
        except RecordError as err:
            if place == 0:
                print_notes(f"{err}; waiting for a run, until Ctrl-C")
            time.sleep(EVERY_S)


def _watched(seen: Sequence[RunStatus], before: Sequence[RunStatus]) -> list[RunStatus]:
    """Return the runs that are live or were watched before; all if there are none."""
    names = {one.launch_id for one in before}
    watched = [one for one in seen if one.state is State.LIVE or one.launch_id in names]
    return watched or list(seen)


def _news(statuses: Sequence[RunStatus]) -> list[RunStatus]:
    """Return the statuses without their age, to detect changes."""
    return [replace(one, age_s=None) for one in statuses]


@contextmanager
def _lines() -> Iterator[Show]:
    """Provide a printer of one line for each changed run."""
    shown: dict[str, RunStatus] = {}

    def show(statuses: Sequence[RunStatus]) -> None:
        for one, news in zip(statuses, _news(statuses), strict=True):
            if shown.get(one.launch_id) != news:
                shown[one.launch_id] = news
                print(status_line(one), flush=True)

    yield show


@contextmanager
def _screen() -> Iterator[Show]:
    """Provide a printer that redraws in place on a terminal."""
    from rich.live import Live
    from rich.text import Text

    from ..views.table import console

    # Past the filter of controls, which it draws with: its text is filtered before.
    with Live(auto_refresh=False, console=console(getattr(sys.stdout, "stream", None))) as live:
        yield lambda statuses: live.update(
            Text(printable_lines("\n".join(text_lines(statuses)))), refresh=True
        )
