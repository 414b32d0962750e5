"""``forerun watch``: the same as ``status``, again and again until the run has ended."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from ...calib.errors import RecordError
from ...calib.records import with_iso_times
from ...hooks.process import is_installed
from ..outcome import ExitCode, tell
from .run_status import RunStatus, State, run_statuses
from .status_command import exit_code, status_json, text_lines
from .status_text import status_line

EVERY_S = 1.0
"""How often the files are looked at."""
Show: TypeAlias = Callable[[Sequence[RunStatus]], object]


def watch(args: argparse.Namespace) -> int:
    """Show what has changed until no run is live; a run that has not begun is waited for.

    Ctrl-C ends it as well, and is no error once there is a run.
    """
    found: list[RunStatus] = []
    try:
        _await_run(args)
        with _screen() if _is_screen(args) else _lines() as show:
            while True:
                now_unix_s = time.time()
                seen, problems = run_statuses(args.directory, now_unix_s, args.run_id)
                found, before = _watched(seen, found), found
                if args.json:
                    if _told(found) != _told(before):
                        value = status_json(args.directory, now_unix_s, found, problems)
                        print(json.dumps(with_iso_times({"schema": 1, **value})), flush=True)
                else:
                    if not before:
                        tell(*problems)
                    show(found)
                if not any(one.state is State.LIVE for one in found):
                    return exit_code(found)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return ExitCode.ANSWER if found else ExitCode.NO_DATA


def _await_run(args: argparse.Namespace) -> None:
    """Return once the directory holds a run that says something."""
    is_waiting = False
    while True:
        try:
            run_statuses(args.directory, time.time(), args.run_id)
        except RecordError as err:
            if not is_waiting:
                tell(f"{err}; waiting for a run, until Ctrl-C")
            is_waiting = True
            time.sleep(EVERY_S)
        else:
            return


def _watched(seen: Sequence[RunStatus], before: Sequence[RunStatus]) -> list[RunStatus]:
    """What is live, and what was; where nothing is, all."""
    names = {one.launch_id for one in before}
    found = [one for one in seen if one.state is State.LIVE or one.launch_id in names]
    return found or list(seen)


def _told(found: Sequence[RunStatus]) -> list[object]:
    return [one.told() for one in found]


def _is_screen(args: argparse.Namespace) -> bool:
    return not args.json and sys.stdout.isatty() and is_installed("rich")


@contextmanager
def _lines() -> Iterator[Show]:
    """A line for each run that has changed."""
    told: dict[str, object] = {}

    def show(found: Sequence[RunStatus]) -> None:
        for one in found:
            if told.get(one.launch_id) != one.told():
                told[one.launch_id] = one.told()
                print(status_line(one), flush=True)

    yield show


@contextmanager
def _screen() -> Iterator[Show]:
    """The same place of a terminal, drawn anew."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda found: live.update(Text("\n".join(text_lines(found))), refresh=True)
