"""Whose answers lie at the top of a directory.

Each launch writes into its own folder below ``runs``; the newest one shows the same files at the
top.  Where another one is live there, a launch is a guest: its files stay in its folder.  Standard
library only: a companion claims the top before it loads anything else.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...calib.records import LAUNCH, replace_by, replace_file, with_iso_times
from ...hooks.process import boot_id, launch_folder, process_start
from .bounded_files import number, read_object
from .each_file import write_each
from .status_file import STATUS

if TYPE_CHECKING:
    from ...hooks.process import CompanionSettings

OWNER = "owner.json"
SCHEMA = 1
PICTURES = {
    key: f"charts/{key}.svg"
    for key in ("layouts", "running", "advised", "timeline", "finish", "steps")
}
"""Charts of the report that are files too, for Markdown, mail and W&B, by their keys there."""
PUBLISHED = (
    "request.json",
    "answer.json",
    "forecast.json",
    "decision.json",
    "score.json",
    "drift.json",
    STATUS,
    "samples.parquet",
    "steps.parquet",
    "report.md",
    "report.html",
    "timeline.json.gz",
    *PICTURES.values(),
)
"""What the top shows of a launch; what commands something is never among it."""
BEAT_S = 30.0
"""How often a live owner renews its claim."""
STALE_S = 120.0
"""A claim of another machine that is older than this is nobody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a companion writes."""

    directory: Path
    """What ``--calibrate-dir`` was."""
    launch_id: str = ""
    """Empty: what is written belongs to no launch, and goes to the top."""
    run_id: str = ""

    @property
    def path(self) -> Path:
        """The folder for answers."""
        if not self.launch_id:
            return self.directory
        return launch_folder(self.directory, self.launch_id)

    def stamp(self) -> dict[str, Any]:
        """Whose a file is, as its first keys."""
        launch = {"launch_id": self.launch_id} if self.launch_id else {}
        return {"run_id": self.run_id, **launch}


def place_of(told: CompanionSettings) -> Place:
    """Where the companion that was told this writes."""
    settings = told.settings
    return Place(
        directory=settings.directory, launch_id=told.launch_id, run_id=settings.rank.run_id
    )


class Publisher:
    """One companion's claim on the top; what a method returns is to be said, if anything is."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_owner = False
        self._previous = ""
        self._published: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def shown(self) -> Path:
        """The folder that a user is sent to."""
        return self.place.directory if self.is_owner else self.place.path

    def begin(self, now_unix_s: float) -> str:
        """Note the run, and claim the top."""
        if not self.place.launch_id:
            return ""
        found = read_object(self.place.directory / OWNER) or {}
        previous = str(found.get("launch_id", ""))
        try:
            self._note_run()
            if previous != self.place.launch_id and is_live(found, now_unix_s):
                return self._as_guest()
            self._previous = previous
            self._claim(now_unix_s)
        except OSError:  # where nothing can be written, the ranks say so
            return ""
        self.is_owner = True
        return ""

    def start_beating(self, say: Callable[[str], object]) -> None:
        """Renew the claim from a thread of its own: an analysis may take longer than a claim holds.

        ``say`` is told what is to be said.
        """

        def run() -> None:
            while self.is_owner and not self._ended.wait(BEAT_S):
                if said := self.beat(time.time()):
                    say(said)

        threading.Thread(target=run, daemon=True).start()

    def beat(self, now_unix_s: float) -> str:
        """Renew the claim."""
        with self._lock:
            if not self.is_owner:
                return ""
            if (said := self._look()) or not self.is_owner:
                return said
            with suppress(OSError):  # a full disk, of which whoever writes answers tells
                self._claim(now_unix_s)
            return ""

    def publish(self) -> str:
        """Show at the top what has changed in the launch's folder; raises ``UnwrittenError``."""
        with self._lock:
            if not self.is_owner:
                return ""
            if (said := self._look()) or not self.is_owner:
                return said
            top = self.place.directory
            write_each((top / name, partial(self._show, name)) for name in PUBLISHED)
            # Where a run is says no more than that there is one.
            if self._published.keys() - {STATUS}:
                self._clear()
            return ""

    def show(self, name: str) -> str:
        """Show one file at the top; raises ``OSError``."""
        with self._lock:
            if not self.is_owner:
                return ""
            if (said := self._look()) or not self.is_owner:
                return said
            self._show(name)
            return ""

    def is_newest(self) -> bool:
        """False once a later start of the same launch writes into its folder."""
        found = read_object(self.place.path / LAUNCH) if self.place.launch_id else None
        names = _run_ids(found)
        return not names or names[-1] == self.place.run_id

    def end(self) -> None:
        """Leave what is shown, and the top to whoever comes next."""
        self._ended.set()
        with self._lock:
            # A claim that names another is left as it is.
            if self.is_owner and not self._look() and self.is_owner:
                with suppress(OSError):
                    self._claim(0.0)
            self.is_owner = False

    def _note_run(self) -> None:
        """Which runs are of this launch, the newest last."""
        path = self.place.path / LAUNCH
        names = [name for name in _run_ids(read_object(path)) if name != self.place.run_id]
        value = {"schema": SCHEMA, "launch_id": self.place.launch_id}
        value["run_ids"] = [*names, self.place.run_id]
        replace_file(path, json.dumps(value, indent=2) + "\n")

    def _claim(self, now_unix_s: float) -> None:
        value = {
            "schema": SCHEMA,
            "launch_id": self.place.launch_id,
            "run_id": self.place.run_id,
            "host": this_host(),
            "pid": os.getpid(),
            "pid_start": process_start(os.getpid()),
            "unix_s": now_unix_s,
        }
        text = json.dumps(with_iso_times(value), indent=2)
        replace_file(self.place.directory / OWNER, text + "\n")

    def _look(self) -> str:
        """Is the top still ours?  It is left to whoever has claimed it since."""
        found = read_object(self.place.directory / OWNER)
        if found is None:  # removed or damaged: the next beat claims it again
            return ""
        ours = self.place.launch_id, self.place.run_id
        if (found.get("launch_id"), found.get("run_id")) == ours:
            return ""
        self.is_owner = False
        return "" if found.get("launch_id") == self.place.launch_id else self._as_guest()

    def _show(self, name: str) -> None:
        source, target = self.place.path / name, self.place.directory / name
        try:
            found = source.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):  # nobody who writes answers made it
            return
        mark = found.st_ino, found.st_mtime_ns
        if self._published.get(name) != mark:
            target.parent.mkdir(exist_ok=True)
            show_file(source, target)
            self._published[name] = mark

    def _clear(self) -> None:
        """What the launch before shows here, and keeps in its own folder, would be a mixture."""
        previous, self._previous = self._previous, ""
        if not previous or previous == self.place.launch_id:
            return
        kept = Place(directory=self.place.directory, launch_id=previous).path
        for name in PUBLISHED:
            if name not in self._published and (kept / name).is_file():
                (self.place.directory / name).unlink(missing_ok=True)

    def _as_guest(self) -> str:
        return (
            f"another run is live in {self.place.directory}; this one's answers are in "
            f"{self.place.path}"
        )


def show_file(source: Path, target: Path) -> None:
    """Place ``source`` at ``target`` at once: a link, or a copy where there can be none."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:
        with source.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o666
            replace_by(target, lambda out: shutil.copyfileobj(file, out), mode=mode)
    finally:
        # Where both are one file already, replacing leaves the temporary name.
        temporary.unlink(missing_ok=True)


def is_live(owner: Mapping[str, Any], now_unix_s: float) -> bool:
    """True where the companion that a claim names is still there."""
    unix_s, pid = number(owner.get("unix_s")), owner.get("pid")
    if unix_s <= 0:
        return False
    if owner.get("host") != this_host():
        return now_unix_s - STALE_S < unix_s < now_unix_s + STALE_S
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    start = process_start(pid)
    return start is not None and start == owner.get("pid_start")


def this_host() -> str:
    """This machine since it was started, and whose process ids count."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return " ".join(filter(None, (socket.gethostname(), boot_id(), space)))


def _run_ids(value: Mapping[str, Any] | None) -> list[str]:
    found = value.get("run_ids") if value else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
