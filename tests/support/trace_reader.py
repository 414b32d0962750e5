"""Rules of the Trace Event Format that Perfetto's importer applies to a JSON trace.

``read`` raises ``AssertionError`` if the importer would drop an event, move it, or guess.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]
REQUIRED = {
    "X": ("name", "cat", "pid", "tid", "ts", "dur"),
    "M": ("name", "pid", "args"),
    "s": ("name", "cat", "id", "pid", "tid", "ts"),
    "f": ("name", "cat", "id", "pid", "tid", "ts", "bp"),
}
"""Keys of each phase."""
METADATA = {
    "process_name": ("name", str, False),
    "process_labels": ("labels", str, False),
    "process_sort_index": ("sort_index", int, False),
    "thread_name": ("name", str, True),
    "thread_sort_index": ("sort_index", int, True),
}
"""Argument, its type, and True if it describes a thread."""
_UNITS = ("ns", "ms")


@dataclass(frozen=True)
class Slice:
    """A slice with its track and depth; times are whole nanoseconds."""

    event: Event
    process: str
    track: str
    begin_ns: int
    end_ns: int
    depth: int
    """Number of slices that enclose it."""

    @property
    def time_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


def read(trace: dict[str, Any]) -> list[Slice]:
    """Return every slice as the importer places it."""
    assert trace["displayTimeUnit"] in _UNITS
    events = trace["traceEvents"]
    for event in events:
        _check(event)
    names = _names(events)
    slices = _placed([e for e in events if e["ph"] == "X"], names)
    _check_flows(events)
    return slices


def _check(event: Event) -> None:
    phase = event["ph"]
    assert phase in REQUIRED, f"phase {phase} is none of {sorted(REQUIRED)}"
    missing = [key for key in REQUIRED[phase] if key not in event]
    assert not missing, f"{event} lacks {missing}"
    for key in ("pid", "tid"):
        # 0 is the idle task: its events are not attributed to the stated process.
        assert key not in event or (type(event[key]) is int and 0 < event[key] < 2**31), event
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        assert isinstance(value, int | float) and math.isfinite(value) and value >= 0, event
    assert all(isinstance(event[key], str) for key in ("name", "cat") if key in event), event
    assert isinstance(event.get("args", {}), dict), event


def _names(events: list[Event]) -> dict[tuple[int, int], tuple[str, str]]:
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    for event in (e for e in events if e["ph"] == "M"):
        key, kind, is_thread = METADATA[event["name"]]
        assert list(event["args"]) == [key] and type(event["args"][key]) is kind, event
        assert ("tid" in event) is is_thread, event
        if event["name"] == "process_name":
            assert processes.setdefault(event["pid"], event["args"][key]) == event["args"][key]
        if event["name"] == "thread_name":
            at = event["pid"], event["tid"]
            assert at not in tracks and event["pid"] != event["tid"], event
            tracks[at] = event["args"][key]
    assert len(set(processes.values())) == len(processes), "two processes of one name"
    tids = [tid for _, tid in tracks]
    assert len(set(tids)) == len(tids), "a thread number in two processes"
    return {at: (processes[at[0]], name) for at, name in tracks.items()}


def _placed(slices: list[Event], names: dict[tuple[int, int], tuple[str, str]]) -> list[Slice]:
    """Return slices of each track in order of begin, each within all that are still open."""
    result: list[Slice] = []
    by_track: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in slices:
        by_track[event["pid"], event["tid"]].append(event)
    for at, track_events in by_track.items():
        open_ns: list[int] = []
        # Stable sort by time, as the importer does.
        for event in sorted(track_events, key=lambda e: int(e["ts"] * 1000.0)):
            begin, length = int(event["ts"] * 1000.0), int(event["dur"] * 1000.0)
            while open_ns and open_ns[-1] <= begin:
                open_ns.pop()
            assert not open_ns or begin + length <= open_ns[-1], f"{event} leaves what it is in"
            process, track = names[at]
            result.append(Slice(event, process, track, begin, begin + length, len(open_ns)))
            open_ns.append(begin + length)
    return result


def _check_flows(events: list[Event]) -> None:
    """Check that each flow has one begin, then one end, both in open slices, under one name."""
    begins: dict[tuple[Any, ...], Event] = {}
    ends: dict[tuple[Any, ...], Event] = {}
    last: Event | None = None
    for event in events:
        if event["ph"] == "X":
            last = event
        if event["ph"] not in "sf":
            continue
        # A flow binds to the innermost slice that is open when it is read: the one just before.
        assert last is not None
        assert [last[key] for key in ("pid", "tid", "ts")] == [
            event[key] for key in ("pid", "tid", "ts")
        ]
        key = event["id"], event["cat"], event["name"]
        matched = begins if event["ph"] == "s" else ends
        assert key not in matched, f"arrow {key} twice"
        matched[key] = event
    assert begins.keys() == ends.keys(), f"one end: {begins.keys() ^ ends.keys()}"
    for key, begin in begins.items():
        end = ends[key]
        assert begin["ts"] < end["ts"] and end["bp"] == "e", key
        assert begin["pid"] == end["pid"] and begin["tid"] != end["tid"], key
