"""Events of a Chrome trace as all releases of PyTorch's profiler export it.

Names of categories and arguments have changed since 1.8; older ones are replaced by the current
ones.  An event without a time, or with one that is no number, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .kineto_trace import CPU_OP, KERNEL, SHAPES, USER_RANGE, TraceEvent

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


def from_chrome(events: Iterable[Mapping[str, object]]) -> list[TraceEvent]:
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
