"""One thread and one bounded queue per rank: records to ``records/<run>/rank-<n>.jsonl``.

Training enqueues items and never waits.  The marks of a window are written as they are, in one
line, when it has closed: who reads them makes records of them, and of the trace of a step, which is
compressed into a file beside it.  In a large world most ranks write no file but a summary, whose
sums are made here, in small slices, so that this thread does not take the interpreter from
training; files are bounded, like those of a small world beyond their first 32 MiB (see
``_bounded_window``).  The first line of a file is its header, which identifies the rank.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ...calib.errors import RecordError, unwritable
from ...calib.marks.marked_window import MarkedWindow
from ...calib.marks.traced_step import COVERAGE, MAX_TRACE_NBYTES, TracedStep
from ...calib.records.files import open_owned, replace_by
from ...calib.records.record_kinds import (
    SCHEMA,
    CoverageRecord,
    Header,
    Record,
    WindowRecord,
    parse_header,
)
from ...calib.workload.recording import WHOLE_NBYTES, RecordingPlan, recording_plan
from ..process.guard import THREAD_NAME_PREFIX, Guard, is_failing
from ..process.interpreter import running_version
from ..process.pacing import Pacer
from ..sensors.step_log import StepLog
from ._bounded_window import BoundedWindow, line_of
from .exchange import Exchange
from .flight_recorder import FlightWindow

if TYPE_CHECKING:
    from ...calib.plain_json import JsonObject
    from ..process.host import Host
    from ..process.settings import RankInfo

_log = logging.getLogger(__name__)
QUEUE_LENGTH = 4096
# Records that wait for the plan: the newest matter, and memory must stay bounded.
MAX_EARLY = 1000
FAILING_S = 3.0
"""Longest delay of a process's end after an error."""
_IDLE_S = 1.0
_PIECE_NBYTES = 1 << 20
# A header has 2 to 5 kB; a file with a longer first line is not ours.
_MAX_HEADER_NBYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowEnd:
    """End of a window, with the training side's data about it."""

    record: WindowRecord
    coverage: tuple[CoverageRecord, ...] = ()
    on_written: Callable[[], None] | None = None
    flight: FlightWindow = field(default_factory=FlightWindow)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedStep:
    """A step under the profiler; ``file`` is its trace, alone in a temporary folder."""

    step: TracedStep
    file: Path

    def discard(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.file.parent, ignore_errors=True)


Item = Record | StepLog | WindowEnd | RecordingPlan | ExportedStep


class RecordWriter:
    """Writer of one rank's records; if it fails, it logs so once and training goes on.

    With an ``exchange`` nothing is written before a ``RecordingPlan`` has been put.
    """

    def __init__(
        self,
        directory: Path,
        header: Callable[[], Header],
        guard: Guard,
        *,
        on_idle: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._directory = directory
        self._header = header
        self._guard = guard
        self._on_idle = on_idle
        self._on_end = on_end
        self._exchange = exchange
        self._items: queue.Queue[Item | None] = queue.Queue(maxsize=QUEUE_LENGTH)
        self._thread: threading.Thread | None = None
        self._file: IO[str] | None = None
        self._plan: RecordingPlan | None = None
        self._early: list[Record] = []
        self._window = MarkedWindow()
        self._bounded: BoundedWindow | None = None
        self._is_file_off = False
        self._num_written = 0
        self._pace = Pacer()
        self._is_closing = False
        self.is_broken = False
        self.num_dropped = 0

    def put(self, item: Item) -> bool:
        """Enqueue without waiting; False (and counted) if the queue is full."""
        if self.is_broken or self._is_closing:
            return False
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self.num_dropped += 1
            return False
        self.wake()
        return True

    def wake(self) -> None:
        """Start the thread if it does not run yet: its idle calls are useful before any record."""
        if self._thread is None and not (self.is_broken or self._is_closing):
            self._thread = threading.Thread(
                target=self._run, name=f"{THREAD_NAME_PREFIX}writer", daemon=True
            )
            self._thread.start()

    def close(self, timeout_s: float = 20.0) -> None:
        """Write what remains, at full speed; only for the end of the process."""
        self._is_closing = True
        if self._thread is None:
            return
        timeout_s = min(timeout_s, FAILING_S) if is_failing() else timeout_s
        try:
            self._items.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def leave(self) -> None:
        """Disconnect a forked child: the file and its unwritten buffer belong to the parent."""
        self.is_broken = True
        self._thread = None
        if self._file is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)

    def _run(self) -> None:
        handle = self._guard.protect(self._handle)
        idle = self._guard.protect(self._idle)
        idle()
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
        if self._on_end is not None:
            self._guard.protect(self._on_end)()
        if self._exchange is not None:
            self._guard.protect(self._exchange.finish)()

    def _idle(self) -> None:
        aside = self._bounded.aside() if self._bounded is not None else ""
        self._write([aside] if aside else ())
        self._flush()
        if self._exchange is not None:
            self._exchange.poll()
        if self._on_idle is not None:
            self._on_idle()

    def _handle(self, item: Item | None) -> None:
        if self.is_broken:
            return
        if isinstance(item, StepLog):
            self._window.steps.append(item)
        elif isinstance(item, WindowEnd):
            self._write_window(item)
        elif isinstance(item, RecordingPlan):
            self._begin(item)
        elif isinstance(item, ExportedStep):
            if not self._is_file_off:
                self._write_traced(item)
            item.discard()
        elif item is not None:
            self._write_now(item)
        else:
            self._write_rest()

    def _begin(self, plan: RecordingPlan) -> None:
        """Set the plan of recording ranks, and write the records that waited for it."""
        if self._exchange is not None:
            self._exchange.begin(plan)
            if self._bounded is None or plan != self._plan:
                self._bound(plan)
        self._plan = plan
        early, self._early = self._early, []
        for record in early:
            self._write_now(record)

    def _bound(self, plan: RecordingPlan) -> None:
        self._bounded = BoundedWindow(
            plan, self._header().rank, pace=self._keep_pace, on_fault=self._guard.fault
        )

    def _write_now(self, record: Record) -> None:
        """Write a record that does not wait for its window's end."""
        if self._exchange is not None and self._plan is None:
            self._early = [*self._early[-MAX_EARLY:], record]
            return
        self._window.note(record)
        line = line_of(record)
        if self._bounded is None or self._bounded.takes(record, line):
            self._write([line])

    def _write_traced(self, exported: ExportedStep) -> None:
        """Compress the trace into the run's folder, and write the step that it is of."""
        name = f"trace-{self._header().rank:05d}-{os.urandom(4).hex()}.json.gz"
        line = replace(exported.step, trace=name).to_line()
        try:
            with exported.file.open("rb") as trace:
                if os.fstat(trace.fileno()).st_size > MAX_TRACE_NBYTES:
                    raise OSError(f"it has more than {MAX_TRACE_NBYTES >> 20} MiB")
                replace_by(self._path.with_name(name), partial(compress_trace, trace))
            if self._bounded is None or self._bounded.spend(len(line)):
                self._write([line])
        except OSError as err:
            window = exported.step.log.window
            self._write_now(CoverageRecord.remark(window, f"{COVERAGE} skipped: {err}"))

    def _write_rest(self) -> None:
        """Write the steps of an unfinished window as the process ends, unless there is an
        exchange."""
        if self._exchange is None:
            self._write([self._window.to_line(self._on_fault)] if self._window.steps else ())
        self._flush(is_last=True)

    def _give_up(self, err: OSError) -> None:
        if not self._is_file_off:
            text = unwritable(self._path, err)
            _log.warning("[forerun] recording is off: %s; training goes on", text)
        # With an exchange, ranks still send their messages.
        self._is_file_off = True
        if self._exchange is None:
            self.is_broken = True
            self._window = MarkedWindow()
        opened, self._file = self._file, None
        if opened is not None:
            with suppress(OSError):
                opened.close()

    @property
    def _path(self) -> Path:
        header = self._header()
        return self._directory / "records" / header.run_id / f"rank-{header.rank:05d}.jsonl"

    def _open(self, header: str) -> IO[str]:
        opened = open_records(self._path)
        self._num_written = opened.seek(0, os.SEEK_END)
        text = io.TextIOWrapper(opened, encoding="utf-8")
        text.write(header)
        return text

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            if self._is_file_off:
                return
            header = line_of(self._header()) if self._file is None else ""
            try:  # what the file raises, not what makes the lines
                self._file = self._file or self._open(header)
                self._num_written += self._file.write(line)
            except OSError as err:
                self._give_up(err)
            self._keep_pace()

    def _flush(self, *, is_last: bool = False) -> None:
        try:
            if self._file is not None:
                (self._file.close if is_last else self._file.flush)()
        except OSError as err:
            self._give_up(err)

    def _keep_pace(self) -> None:
        """Release the interpreter every millisecond while training runs."""
        if not self._is_closing:
            self._pace.keep()

    def _write_window(self, end: WindowEnd) -> None:
        window, self._window = self._window, MarkedWindow()
        window.end, window.installed = end.record, end.coverage
        try:
            window.calls = end.flight.read()
        except Exception as err:  # what hooks saw is written all the same
            self._guard.fault(err)
        if self._bounded is not None:
            self._write_bounded(end, window, self._bounded)
        else:
            self._write([window.to_line(self._on_fault)])
            self._flush()
            if end.on_written is not None:
                end.on_written()
        if self._bounded is None and self._num_written >= WHOLE_NBYTES:
            self._bound(recording_plan(self._header().world_size))

    def _on_fault(self, err: Exception) -> None:
        self._guard.fault(err)
        self.num_dropped += 1

    def _write_bounded(self, end: WindowEnd, window: MarkedWindow, bounded: BoundedWindow) -> None:
        closed = bounded.close(window)
        self._write(closed.lines)
        self._flush()
        if self._exchange is not None:
            self._exchange.hand_over(end.record.window, closed.message, on_complete=end.on_written)
        elif end.on_written is not None:
            end.on_written()


def compress_trace(trace: IO[bytes], file: IO[bytes]) -> None:
    """Compress a trace in pieces, each without the interpreter lock."""
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed:
        shutil.copyfileobj(trace, packed, _PIECE_NBYTES)


def header_of(
    rank: RankInfo,
    host: Host | None,
    *,
    device: str,
    started_unix_s: float,
    cluster: JsonObject | None = None,
) -> Header:
    """Return the header of a rank's file, as far as it is known."""
    return Header(
        schema=SCHEMA,
        run_id=rank.run_id,
        rank=rank.rank,
        world_size=rank.world_size,
        created_by=f"{__name__.partition('.')[0]} {running_version()}".strip(),
        device=device,
        started_unix_s=started_unix_s,
        stage=host.stage if host else 0,
        tp_rank=host.tp_rank if host else 0,
        dp_rank=host.dp_rank if host else 0,
        cluster=cluster or {},
    )


def open_records(path: Path) -> IO[bytes]:
    """Open the file of a rank, ready for a header; a restarted rank appends to an existing one.

    A file whose first line cannot be read is renamed: it would make ours unreadable.  Raises
    ``OSError`` as ``open_owned``.
    """
    file = open_owned(path)
    file.seek(0)
    first = file.readline(_MAX_HEADER_NBYTES)
    if not first:
        return file
    try:
        parse_header(first.decode())
    except (RecordError, ValueError):
        file.close()
        path.replace(path.with_name(path.name + ".damaged"))
        return open_owned(path)
    file.seek(-1, os.SEEK_END)
    if file.read(1) != b"\n":
        file.write(b"\n")
    return file
