"""Steps, their marks and the ends of windows, on their way to the writer in the right order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...calib.records.record_kinds import PhaseRecord, StepRecord, WindowRecord
from ..process.guard import Guard
from ..recording.flight_recorder import FlightWindow
from ..recording.writer import RecordWriter, WindowEnd

if TYPE_CHECKING:
    from ..sensors.step_log import StepLog
    from .instruments import Instruments


class Ledger:
    """What the training side knows of the window that is open; marks wait until they can be read.

    ``tell`` takes the event that all records of a window have their place.
    """

    def __init__(self, writer: RecordWriter, guard: Guard, tell: Callable[..., None]) -> None:
        self._writer = writer
        self._guard = guard
        self._tell = tell
        self._pending: list[StepLog] = []
        self._ending: WindowEnd | None = None
        self._first: int | None = None
        self._num_dropped = 0
        self.last = 0
        self.window = 0

    @property
    def is_open(self) -> bool:
        """True from the first step after warm-up to the window's end."""
        return self._first is not None

    def add_step(self, record: StepRecord, *, is_warmup: bool) -> None:
        """A step of a window has ended."""
        self.window, self.last = record.window, record.step
        if not is_warmup and self._first is None:
            self._first = record.step
        self._writer.put(record)

    def add_brackets(self, brackets: Mapping[str, tuple[int, int]], step: int) -> None:
        """Evaluations, saves and probes that came after ``step``: begin and end, nanoseconds."""
        for name, (start_ns, end_ns) in brackets.items():
            self._writer.put(
                PhaseRecord(
                    step=step,
                    window=self.window,
                    name=name,
                    microbatch=0,
                    start_ns=start_ns,
                    duration_ns=end_ns - start_ns,
                )
            )

    def tell_window(self, event: str) -> None:
        """An event about the latest window."""
        self._tell(event, window=self.window, last_step=self.last)

    def add_log(self, log: StepLog) -> None:
        """Marks of a hooked step."""
        self._pending.append(log)

    def end_window(self, instruments: Instruments | None) -> None:
        """The window's last step is in; does nothing where none is open."""
        if self._first is None:
            return
        self._ending = WindowEnd(
            record=WindowRecord(
                window=self.window,
                first_step=self._first,
                last_step=self.last,
                num_faults=self._guard.num_faults,
                num_dropped=self._num_dropped + self._writer.num_dropped,
                memory_peak_nbytes=instruments.memory_peak_nbytes() if instruments else 0,
                device_memory_nbytes=instruments.device_memory_nbytes() if instruments else 0,
            ),
            coverage=instruments.coverage(self.window) if instruments else (),
            on_written=partial(
                self._tell, "window_closed", window=self.window, last_step=self.last
            ),
            flight=instruments.flight.close_window() if instruments else FlightWindow(),
        )
        self._first = None

    def drain(self, *, is_held: bool = False) -> None:
        """Hand on the steps whose marks can be read by now, then the window's end.

        ``is_held`` keeps the end back: something of the window is still to come.
        """
        while self._pending:
            log = self._pending.pop(0)
            is_resolved = self._guard.protect(log.resolve)()
            if is_resolved is False:
                self._pending.insert(0, log)
                break
            if is_resolved is None:  # its marks cannot be read; those after it can
                self._num_dropped += len(log.what)
                continue
            self._num_dropped += log.num_dropped
            self._writer.put(log)
        if self._ending is not None and not self._pending and not is_held:
            ending, self._ending = self._ending, None
            self._writer.put(ending)

    def give_up(self) -> None:
        """What cannot be read by now is dropped and counted: waiting would be a synchronisation."""
        self._num_dropped += sum(len(log.what) for log in self._pending)
        self._pending.clear()

    def forget(self) -> None:
        """The loop has begun again: the open window does not end."""
        self._pending.clear()
        self._first = self._ending = None
