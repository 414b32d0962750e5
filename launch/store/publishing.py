"""Ownership of a directory's top level, publishing there, and the status and forecast files.

Each launch writes into its own folder below ``runs``; the newest one publishes the same files at
the top level.  If another live run owns the top level, the files stay in the launch's folder.
Standard library only: a companion claims the top level before it loads anything else.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...calib.errors import ForerunError
from ...calib.records.files import CREATED, is_ours, refuse_foreign, replace_by, replace_file
from ...calib.records.iso_times import with_iso_times
from ...calib.records.run_values import LAUNCH, RUNS
from ...calib.workload.config_json import decode, encode_fields
from ...hooks.process.host_wandb import FORECAST as FORECAST
from ...hooks.process.launch_identity import boot_id, launch_folder, process_start
from .run_folders import finite_number, read_object

if TYPE_CHECKING:
    from ...hooks.process.settings import CompanionSettings


_T = TypeVar("_T")

OWNER, STATUS, FORECASTS = "owner.json", "status.json", "forecasts.jsonl"
SCHEMA = 1
PUBLISHED = (
    *("request.json", "answer.json", "forecast.json", "decision.json", "score.json", "drift.json"),
    *(STATUS, "samples.parquet", "steps.parquet", "report.html", "timeline.json.gz"),
)
"""Files of a launch that are published at the top level; never files that give commands."""
_NUM_NAMED = 2
BEAT_S = 30.0
"""Seconds between a live owner's renewals of its claim."""
STALE_S = 120.0
"""Age in seconds at which another machine's claim expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Directory, launch and run of a companion's files."""

    directory: Path
    """Directory given as ``--calibrate-dir``."""
    launch_id: str = ""
    """Empty if files belong to no launch and go to the top level."""
    run_id: str = ""

    @property
    def path(self) -> Path:
        """Folder for answers."""
        return launch_folder(self.directory, self.launch_id) if self.launch_id else self.directory

    def stamp(self) -> dict[str, Any]:
        """Return the run and launch ids that a file begins with."""
        launch = {"launch_id": self.launch_id} if self.launch_id else {}
        return {"run_id": self.run_id, **launch}


def place_of(companion_settings: CompanionSettings) -> Place:
    """Return the place in which the companion with these settings writes."""
    directory, run_id = (
        companion_settings.settings.directory,
        companion_settings.settings.rank.run_id,
    )
    return Place(directory=directory, launch_id=companion_settings.launch_id, run_id=run_id)


class Publisher:
    """One companion's claim on the top level; methods return a message to log, maybe empty."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.is_owner = False
        self._previous = ""
        self._published: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    @property
    def shown(self) -> Path:
        """Folder to show to the user."""
        return _shown(self.place.directory if self.is_owner else self.place.path)

    def begin(self, now_unix_s: float) -> str:
        """Record the run and claim the top level."""
        if not self.place.launch_id:
            return ""
        owner = read_object(self.place.directory / OWNER) or {}
        previous = str(owner.get("launch_id", ""))
        try:
            self._note_run()
            if foreign := foreign_names(self.place.directory):
                return self._as_private(foreign)
            if previous != self.place.launch_id and is_live(owner, now_unix_s):
                return self._as_guest()
            self._previous = previous
            self._claim(now_unix_s)
        except OSError:  # the ranks report that nothing can be written
            return ""
        self.is_owner = True
        return ""

    def start_heartbeat(self, notify: Callable[[str], object]) -> None:
        """Renew the claim in a separate thread, since an analysis may outlast a claim.

        ``notify`` gets the messages.
        """

        def run() -> None:
            while self.is_owner and not self._ended.wait(BEAT_S):
                if message := self.beat(time.time()):
                    notify(message)

        threading.Thread(target=run, daemon=True).start()

    def beat(self, now_unix_s: float) -> str:
        """Renew the claim."""
        with self._lock:
            message = self._look()
            if self.is_owner:
                with suppress(OSError):  # a full disk is reported by the code that writes answers
                    self._claim(now_unix_s)
            return message

    def publish(self) -> str:
        """Publish changed files of the launch's folder; raises ``UnwrittenError``."""
        with self._lock:
            message = self._look()
            if self.is_owner:
                top = self.place.directory
                write_each((top / name, partial(self._show, name)) for name in PUBLISHED)
                # The status alone is no answer that should displace the previous launch's.
                if self._published.keys() - {STATUS}:
                    self._clear()
            return message

    def show(self, name: str) -> str:
        """Publish one file at the top level; raises ``OSError``."""
        with self._lock:
            message = self._look()
            if self.is_owner:
                self._show(name)
            return message

    def is_newest(self) -> bool:
        """False once a later run of the same launch writes into its folder."""
        launch = read_object(self.place.path / LAUNCH) if self.place.launch_id else None
        names = _run_ids(launch)
        return not names or names[-1] == self.place.run_id

    def end(self) -> None:
        """Release the claim; published files remain."""
        self._ended.set()
        with self._lock:
            self._look()
            if self.is_owner:  # another owner's claim is left unchanged
                with suppress(OSError):
                    self._claim(0.0)
            self.is_owner = False

    def _note_run(self) -> None:
        """Record this run as the newest of the launch."""
        path = self.place.path / LAUNCH
        names = [name for name in _run_ids(read_object(path)) if name != self.place.run_id]
        value = {"schema": SCHEMA, "launch_id": self.place.launch_id}
        value["run_ids"] = [*names, self.place.run_id]
        replace_file(path, json.dumps(value, indent=2) + "\n")

    def _claim(self, now_unix_s: float) -> None:
        whose = {"launch_id": self.place.launch_id, "run_id": self.place.run_id}
        pid = os.getpid()
        process = {"host": this_host(), "pid": pid, "pid_start": process_start(pid)}
        value = with_iso_times({"schema": SCHEMA, **whose, **process, "unix_s": now_unix_s})
        replace_file(self.place.directory / OWNER, json.dumps(value, indent=2) + "\n")

    def _look(self) -> str:
        """Give up the top level if another launch has claimed it; return the message."""
        owner = read_object(self.place.directory / OWNER) if self.is_owner else None
        if owner is None:  # removed or damaged: the next beat renews the claim
            return ""
        ours = self.place.launch_id, self.place.run_id
        if (owner.get("launch_id"), owner.get("run_id")) == ours:
            return ""
        self.is_owner = False
        return "" if owner.get("launch_id") == self.place.launch_id else self._as_guest()

    def _show(self, name: str) -> None:
        source, target = self.place.path / name, self.place.directory / name
        try:
            file_stat = source.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISREG(file_stat.st_mode):  # not written by a companion
            return
        mark = file_stat.st_ino, file_stat.st_mtime_ns
        if self._published.get(name) != mark:
            show_file(source, target)
            self._published[name] = mark

    def _clear(self) -> None:
        """Remove the previous launch's files from the top level, so that answers do not mix; they
        remain in its folder."""
        previous, self._previous = self._previous, ""
        if not previous or previous == self.place.launch_id:
            return
        previous_folder = Place(directory=self.place.directory, launch_id=previous).path
        for name in PUBLISHED:
            path = self.place.directory / name
            if name not in self._published and (previous_folder / name).is_file() and is_ours(path):
                path.unlink()

    def _as_guest(self) -> str:
        place = self.place
        where = _shown(place.path)
        return (
            f"another run is live in {_shown(place.directory)}; this one's answers are in {where}"
        )

    def _as_private(self, foreign: Sequence[str]) -> str:
        place, more = self.place, len(foreign) - _NUM_NAMED
        names = ", ".join(foreign[:_NUM_NAMED]) + f" and {more} more" * (more > 0)
        return (
            f"not written by Forerun and left alone: {names} in {_shown(place.directory)}; this "
            f"run's answers are in {_shown(place.path)}"
        )


def _shown(folder: Path) -> Path:
    """Return a folder within the working directory by its relative path."""
    with suppress(OSError, ValueError):
        return folder.relative_to(Path.cwd())
    return folder


def foreign_names(directory: Path) -> list[str]:
    """Return the names at the top level of which something else than a file of ours is there."""
    names = (OWNER, FORECASTS, *PUBLISHED)
    return [n for n in names if os.path.lexists(directory / n) and not is_ours(directory / n)]


def forecasts_path(directory: Path) -> Path:
    """Return the forecast log of a directory: below ``runs`` if its name is another file's."""
    top, below = directory / FORECASTS, directory / RUNS / FORECASTS
    return below if below.exists() or (os.path.lexists(top) and not is_ours(top)) else top


def show_file(source: Path, target: Path) -> None:
    """Replace ``target`` atomically by a hard link to ``source``, or by a copy if linking fails.

    Raise ``FileExistsError`` if it is not ours.
    """
    refuse_foreign(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        os.link(source, temporary)
        os.replace(temporary, target)
    except OSError:
        with source.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o666
            replace_by(target, lambda out: shutil.copyfileobj(file, out), mode=mode)
    finally:
        # If both are already the same file, replacing leaves the temporary name.
        temporary.unlink(missing_ok=True)


def is_live(owner: Mapping[str, Any], now_unix_s: float) -> bool:
    """True if the companion that a claim names is still alive."""
    unix_s, pid = finite_number(owner.get("unix_s")), owner.get("pid")
    if unix_s <= 0:
        return False
    if owner.get("host") != this_host():
        return now_unix_s - STALE_S < unix_s < now_unix_s + STALE_S
    if not isinstance(pid, int) or not 0 < pid < 2**31:
        return False
    start = process_start(pid)
    return start is not None and start == owner.get("pid_start")


def this_host() -> str:
    """Return host name, boot id and pid namespace, within which a process id is valid."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return " ".join(filter(None, (socket.gethostname(), boot_id(), space)))


def _run_ids(value: Mapping[str, Any] | None) -> list[str]:
    run_ids = value.get("run_ids") if value else None
    return [name for name in run_ids if isinstance(name, str)] if isinstance(run_ids, list) else []


class UnwrittenError(Exception):
    """Some files could not be written; all others were."""

    def __init__(self, failures: Iterable[tuple[Path, Exception]]) -> None:
        self.failures = tuple(failures)
        super().__init__(", ".join(f"{path.name}: {err}" for path, err in self.failures))


def write_each(writes: Iterable[tuple[Path, Callable[[], object]]]) -> None:
    """Call each file's writer; raises ``UnwrittenError`` at the end if any failed."""
    failures: list[tuple[Path, Exception]] = []
    for path, write in writes:
        try:
            write()
        except UnwrittenError as err:
            failures += err.failures
        except Exception as err:
            failures.append((path, err))
    if failures:
        raise UnwrittenError(failures)


class Phase(Enum):
    """Phase of a run, as known to its companion."""

    RUNS = "runs"
    ENDED = "ended"
    """Training reported its end."""
    GONE = "gone"
    """Training disappeared without reporting an end."""
    LOGGED = "logged"
    """Steps were read from a log, which does not show whether training still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFile:
    """Content of the status file, without run and launch ids."""

    phase: Phase = Phase.RUNS
    iteration: int = 0
    """Steps done."""
    steps_total: int = 0
    """Steps of the whole run; 0 if unknown."""
    step_time_s: float = 0.0
    """Median of the newest regular steps; 0.0 before the first."""
    step_low_s: float = 0.0
    """Lower end of the range of 9 in 10 of these steps."""
    step_high_s: float = 0.0
    """Upper end of that range."""
    num_steps: int = 0
    """Number of these steps."""
    began_unix_s: float = 0.0
    heard_unix_s: float = 0.0
    """Time of the last event from training."""
    unix_s: float = 0.0
    """Time of writing."""
    host: str = ""
    """Host of the writing process; ``pid`` and ``pid_start`` identify it there."""
    pid: int = 0
    pid_start: int = 0

    def to_json(self, stamp: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's content, which begins with the stamp of its run."""
        return with_iso_times({"schema": SCHEMA, **CREATED, **stamp, **encode_fields(self)})


def status_of(value: Mapping[str, Any]) -> StatusFile:
    """Return the status in a file's object; an unknown phase is read as ``GONE``."""
    known = [phase.value for phase in Phase]
    phase = value.get("phase") if value.get("phase") in known else Phase.GONE
    return decoded_or_empty(StatusFile, {**value, "phase": phase})


def decoded_or_empty(kind: type[_T], value: Mapping[str, Any] | None) -> _T:
    """Return what a file's object holds; that of an empty one if it is missing or damaged."""
    try:
        return decode(kind, value or {})
    except ForerunError:
        return kind()
