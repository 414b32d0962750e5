"""One thread and one bounded queue per rank: records to ``records/<run>/rank-<n>.jsonl``.

Training hands things over and never waits.  Marks of hooked steps become records only when their
window has closed, in small slices, so that this thread does not take the interpreter from training
while it is being measured.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..calib.samples.records import CoverageRecord, Header, Record, WindowRecord, to_dict
from .attribution import Attribution
from .guard import Guard
from .recorder import StepLog

_log = logging.getLogger(__name__)
QUEUE_LENGTH = 4096
SLICE_S = 0.001
PAUSE_S = 0.004
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnd:
    """The window has closed: what the training side knows about it."""

    record: WindowRecord
    coverage: tuple[CoverageRecord, ...] = ()
    on_written: Callable[[], None] | None = None


Item = Record | StepLog | WindowEnd


@dataclass(slots=True)
class _Window:
    """What is held back until the window closes."""

    logs: list[StepLog] = field(default_factory=list)
    fired: dict[str, set[int]] = field(default_factory=dict)


class RecordWriter:
    """Writes records of one rank; where it cannot, says so once and training goes on."""

    def __init__(
        self,
        directory: Path,
        header: Callable[[], Header],
        guard: Guard,
        *,
        on_idle: Callable[[], None] | None = None,
        queue_length: int = QUEUE_LENGTH,
    ) -> None:
        self._directory = directory
        self._header = header
        self._guard = guard
        self._on_idle = on_idle
        self._items: queue.Queue[Item | None] = queue.Queue(maxsize=queue_length)
        self._thread: threading.Thread | None = None
        self._file: IO[str] | None = None
        self._window = _Window()
        self._is_closing = False
        self.is_broken = False
        self.num_dropped = 0

    def put(self, item: Item) -> bool:
        """Hand over without waiting; False (and counted) where the queue is full."""
        if self.is_broken or self._is_closing:
            return False
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.num_dropped += 1
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="forerun-writer", daemon=True)
            self._thread.start()
        return True

    def close(self, timeout_s: float = 20.0) -> None:
        """Write what is left, at full speed; only for the end of the process."""
        self._is_closing = True
        if self._thread is None:
            return
        try:
            self._items.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        handle = self._guard.protect(self._handle)
        idle = self._guard.protect(self._idle)
        while True:
            try:
                item = self._items.get(timeout=_IDLE_S)
            except queue.Empty:
                idle()
                continue
            if item is None:
                break
            handle(item)
            if self._items.empty():
                idle()
        handle(None)

    def _idle(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as err:
            self._give_up(err)
        if self._on_idle is not None:
            self._on_idle()

    def _handle(self, item: Item | None) -> None:
        if self.is_broken:
            return
        try:
            if isinstance(item, StepLog):
                self._window.logs.append(item)
            elif isinstance(item, WindowEnd):
                self._write_window(item)
            elif item is not None:
                self._write([item])
            else:
                self._write(self._held_records())
                if self._file is not None:
                    self._file.close()
        except OSError as err:
            self._give_up(err)

    def _give_up(self, err: OSError) -> None:
        if not self.is_broken:
            _log.warning(
                "[forerun] recording is off: cannot write %s (%s); free space or choose another "
                "--calibrate-dir; training goes on",
                self._path,
                err.strerror or err,
            )
        self.is_broken = True
        self._window = _Window()
        opened, self._file = self._file, None
        if opened is not None:
            with suppress(OSError):
                opened.close()

    @property
    def _path(self) -> Path:
        header = self._header()
        return self._directory / "records" / header.run_id / f"rank-{header.rank:05d}.jsonl"

    def _open(self) -> IO[str]:
        path = self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A restarted worker finds its own file: it goes on after it, with a header again.
        opened = path.open("a", encoding="utf-8")
        opened.write(json.dumps(to_dict(self._header())) + "\n")
        return opened

    def _write(self, records: Iterable[Record]) -> None:
        if self._file is None:
            self._file = self._open()
        begin_s = time.perf_counter()
        for record in records:
            self._file.write(json.dumps(to_dict(record)) + "\n")
            if time.perf_counter() - begin_s > SLICE_S and not self._is_closing:
                time.sleep(PAUSE_S)
                begin_s = time.perf_counter()

    def _write_window(self, end: WindowEnd) -> None:
        self._write(self._held_records())
        self._write(self._coverage(end))
        self._write([end.record])
        self._window = _Window()
        if self._file is not None:
            self._file.flush()
        if end.on_written is not None:
            end.on_written()

    def _held_records(self) -> Iterable[Record]:
        logs, self._window.logs = self._window.logs, []
        for log in logs:
            attribution = Attribution(log)
            yield from attribution.records()
            for site, is_backward in attribution.fired:
                name = coverage_name(log.sites[site].kind.value, is_backward)
                self._window.fired.setdefault(name, set()).add(site)
            seams = self._window.fired
            if log.phases:
                seams.setdefault("timers", set()).add(0)
            if len(log.transfers) > 1:
                seams.setdefault("collectives", set()).add(0)

    def _coverage(self, end: WindowEnd) -> Iterable[Record]:
        for installed in end.coverage:
            fired = len(self._window.fired.get(installed.name, ()))
            yield CoverageRecord(
                window=installed.window,
                name=installed.name,
                installed=installed.installed,
                fired=fired,
            )


def coverage_name(kind: str, is_backward: bool) -> str:
    """Name of an operator's forward or backward hooks in the coverage."""
    return f"{kind}:backward" if is_backward else kind
