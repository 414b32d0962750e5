"""Events of a Chrome trace as all releases of PyTorch's profiler export it.

Names of categories and arguments have changed since 1.8; older ones are replaced by the current
ones.  An event without a time, or with one that is no number, is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from ..errors import RecordError
from .kineto_trace import CPU_OP, KERNEL, SHAPES, USER_RANGE, TraceEvent

MOST_EVENTS = 200_000
"""Most events of a traced step that are read, in some 100 MB of memory."""
_LIST = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_MOST_PENDING = 4 << 20
"""Most characters of one event; more is damage."""
_HOST = frozenset({CPU_OP, USER_RANGE})
_OLD_CATEGORIES = {
    "operator": CPU_OP,
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "user annotation": USER_RANGE,
    "cpu_user_annotation": USER_RANGE,
}
"""Category names up to PyTorch 1.11, in lower case; that of kernels differs only in case."""
_OLD_DETAILS = {"Input dims": SHAPES, "external id": "External id", "Input Types": "Input type"}
_NS_PER_US = 1000
_LONGEST_US = 1e17
"""Three thousand years: clocks count from 1970, so that a larger value was never measured."""


def events_in(parts: Iterable[str]) -> Iterator[object]:
    """Yield the events of a trace's text one by one, so that the whole is never in memory.

    Raise ``RecordError`` if the list of events is missing, damaged, cut off or too long.

    >>> [*events_in(['{"a": 1, "traceEvents": [{"ts"', ": 1}, ", '{"ts": 2}], "b": 2}'])]
    [{'ts': 1}, {'ts': 2}]
    """
    decode = json.JSONDecoder().raw_decode
    text, place, num_events = "", -1, 0
    for part in parts:
        text += part
        if place < 0 and (begin := _LIST.search(text)):
            place = begin.end()
        while place >= 0:
            if between := _BETWEEN.match(text, place):
                place = between.end()
            if text.startswith("]", place):
                return
            try:
                event, place = decode(text, place)
            except (ValueError, RecursionError):
                break  # the rest of it is in the next part
            yield event
            num_events += 1
            if num_events > MOST_EVENTS:
                raise RecordError(f"its trace has more than {MOST_EVENTS} events; skipped")
        text, place = text[max(0, place) :], min(0, place)
        if len(text) > _MOST_PENDING:
            break
    raise RecordError("its trace is damaged or cut off; skipped")


def from_chrome(events: Iterable[object]) -> list[TraceEvent]:
    """Return the complete events of a trace; its times are microseconds, with or without fractions.

    >>> kernel = {"ph": "X", "cat": "Kernel", "name": "gemm", "ts": "5", "dur": 2.25}
    >>> [(e.category, e.start_ns, e.duration_ns) for e in from_chrome([kernel])]
    [('kernel', 5000, 2250)]
    >>> from_chrome([{**kernel, "dur": float("inf")}, {"ph": "X", "cat": "Kernel", "ts": 5}])
    []
    """
    threads: dict[tuple[str, str], int] = {}
    trace_events = []
    for event in events:
        if not isinstance(event, Mapping) or event.get("ph") != "X":
            continue
        start_ns, duration_ns = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
        if start_ns is None or duration_ns is None or duration_ns < 0:
            continue
        place = (str(event.get("pid")), str(event.get("tid")))
        thread = threads.setdefault(place, len(threads) + 1)
        trace_events.append(_event(event, start_ns, duration_ns, thread))
    return trace_events


def _event(event: Mapping[str, object], start_ns: int, duration_ns: int, thread: int) -> TraceEvent:
    details = event.get("args")
    details = details if isinstance(details, dict) else {}
    for old, name in _OLD_DETAILS.items():
        if old in details:
            details.setdefault(name, details[old])
    category = _category(str(event.get("cat", "")))
    number, correlation = (
        whole_number(details.get("External id")),
        whole_number(details.get("correlation")),
    )
    is_host = category in _HOST
    # Kineto of 2022 and 2023 repeats the correlation in place of the number of the operation
    # around; that may be the number of some other operation.
    link = 0 if is_host or number == correlation else number
    return TraceEvent(
        name=str(event.get("name", "")),
        category=category,
        start_ns=start_ns,
        duration_ns=duration_ns,
        thread=thread,
        number=number if is_host else 0,
        link=link,
        correlation=correlation,
        details=details,
    )


def _category(name: str) -> str:
    small = name.lower()
    return KERNEL if small == KERNEL else _OLD_CATEGORIES.get(small, name)


def _nanoseconds(value: object) -> int | None:
    """Return nanoseconds, None if it is no time; integers stay exact beyond a float's digits."""
    if isinstance(value, int):
        return value * _NS_PER_US if abs(value) < _LONGEST_US else None
    try:
        time_us = float(value) if isinstance(value, (float, str)) else math.nan
    except ValueError:
        return None
    is_time = math.isfinite(time_us) and abs(time_us) < _LONGEST_US
    return round(time_us * _NS_PER_US) if is_time else None


def whole_number(value: object) -> int:
    """Return a whole number of a trace, 0 if it is none."""
    try:
        return int(value) if isinstance(value, (int, float, str)) else 0
    except (ValueError, OverflowError):
        return 0
