"""Durations of asynchronous collectives, from the recorder that PyTorch keeps for debugging.

It is read once per window, outside the training thread.  It knows durations where the user or
``--calibrate-trace=on`` has set ``TORCH_NCCL_ENABLE_TIMING=1`` before the groups were made: one
more event per collective, which PyTorch cannot switch off again, so nothing else here sets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from ...calib.errors import RecordError
from ...calib.records.flight import FlightEntry, HostSpan, parse_dump, with_durations
from ...calib.records.record_kinds import Record

_log = logging.getLogger(__name__)
ENVIRONMENT = {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "20000"}
"""What makes it useful, to be set before the first group: timing, and room for a step."""
_OLD_BUFFER_SIZE = "TORCH_NCCL_TRACE_BUFFER_SIZE"
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# PyTorch's ring of calls is bounded as well, and holds fewer steps of any real pipeline.
MAX_STEPS = 64

Dump = Callable[[], "str | bytes"]


class FlightRecorder:
    """Remembers when the hooked steps of a window were, and puts durations into their records."""

    def __init__(self, dump: Dump | None = None) -> None:
        self._dump = dump or find_dump()
        self._begin_ns = 0
        self._spans: dict[int, HostSpan] = {}

    def begin_step(self) -> None:
        """A hooked step begins."""
        self._begin_ns = time.time_ns()

    def end_step(self, step: int) -> None:
        """It ends; all of its collectives have been called."""
        if self._dump is not None:
            while len(self._spans) >= MAX_STEPS:
                del self._spans[next(iter(self._spans))]
            self._spans[step] = HostSpan(begin_ns=self._begin_ns, end_ns=time.time_ns())

    def close_window(self) -> FlightWindow:
        """What the hooked steps since the last call will be amended with."""
        spans, self._spans = self._spans, {}
        return FlightWindow(self._dump, spans)


class FlightWindow:
    """Amends records, outside training; the recorder is dumped once, when the first are made."""

    def __init__(self, dump: Dump | None = None, spans: Mapping[int, HostSpan] | None = None):
        self._dump = dump
        self._spans = spans or {}
        self._entries: list[FlightEntry] | None = None

    def amend(self, records: Iterable[Record]) -> Iterator[Record]:
        """The same records, with durations where the flight recorder has them."""
        if self._entries is None:
            self._entries = self._read() if self._spans else []
        return (
            with_durations(records, self._entries, self._spans) if self._entries else iter(records)
        )

    def _read(self) -> list[FlightEntry]:
        dumped = self._dump() if self._dump is not None else ""
        text = dumped.decode() if isinstance(dumped, bytes) else dumped
        if "duration_ms" not in text:
            return []
        try:
            return parse_dump(text)
        except RecordError as err:
            _log.warning("[forerun] %s; asynchronous transfers keep their bounds", str(err))
            return []


def prepare(environ: MutableMapping[str, str]) -> None:
    """Switch timing and a long buffer on for groups that are made later; the user's word stands."""
    for name, value in ENVIRONMENT.items():
        if name != "TORCH_FR_BUFFER_SIZE" or _OLD_BUFFER_SIZE not in environ:
            environ.setdefault(name, value)


def find_dump() -> Dump | None:
    """PyTorch's own dump, that of NCCL first; None where this build has none."""
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return None
    functions: list[Any] = [getattr(c10d, name, None) for name in _DUMPS]
    return next((function for function in functions if function is not None), None)
