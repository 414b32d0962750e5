"""Slices, arrows and names of tracks in Chrome's Trace Event Format, as Perfetto takes them.

Slices of a track must nest, and a reader multiplies microseconds as doubles: all times are whole
eighths of a microsecond, which no such arithmetic moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
_TICKS_PER_S = 8_000_000
_TICKS_PER_US = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What a slice is made of: name, category and arguments of each, and where in it each ends."""

    labels: tuple[Event, ...]
    ends_s: tuple[float, ...]
    """Seconds from the start of the slice."""


NOTHING = Inside(labels=(), ends_s=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One slice of a track."""

    label: Event
    """Name, category and arguments."""
    start_s: float
    end_s: float
    inside: Inside = NOTHING
    leaves: tuple[int, ...] = ()
    """Arrows that begin here."""
    arrives: tuple[int, ...] = ()
    """Arrows that end here."""


@dataclass(slots=True, kw_only=True)
class Tracks:
    """The tracks of one file; process and thread numbers start at 1, as 0 is the idle task."""

    events: list[Event] = field(default_factory=list)
    _num_processes: int = 0
    _num_tracks: int = 0

    def process(self, name: str, label: str = "") -> int:
        """Opens a process and returns its number; ``label`` is shown beside the name."""
        self._num_processes += 1
        pid = self._num_processes
        self.events += [
            _named(pid, 0, "process_name", "name", name),
            _named(pid, 0, "process_sort_index", "sort_index", pid),
        ]
        if label:
            self.events.append(_named(pid, 0, "process_labels", "labels", label))
        return pid

    def track(self, pid: int, name: str, bars: Iterable[Bar]) -> None:
        """A track of slices; those that overlap go to further ones of the same name, numbered."""
        for place, lane in enumerate(_lanes(bars)):
            # A thread numbered as its process would be taken for its main thread.
            self._num_tracks += 1
            tid = 1000 + self._num_tracks
            shown = f"{name} {place + 1}" if place else name
            self.events += [
                _named(pid, tid, "thread_name", "name", shown),
                _named(pid, tid, "thread_sort_index", "sort_index", self._num_tracks),
            ]
            for bar in lane:
                self.events += _drawn({"pid": pid, "tid": tid}, bar)


def _lanes(bars: Iterable[Bar]) -> list[list[Bar]]:
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_s, bar.end_s)):
        free = (one for one in lanes if _ticks(one[-1].end_s) <= _ticks(bar.start_s))
        lane = next(free, None)
        if lane is None:
            lanes.append(lane := [])
        lane.append(bar)
    return lanes


def _drawn(track: Event, bar: Bar) -> Iterator[Event]:
    """The slice, its arrows, and what it is made of: a reader ties an arrow to what is open."""
    begin, end = _ticks(bar.start_s), _ticks(bar.end_s)
    yield _slice(track, bar.label, begin, end)
    at = begin / _TICKS_PER_US
    for arrow in bar.arrives:
        yield {"ph": "f", "bp": "e", **_arrow(track, arrow, at)}
    for arrow in bar.leaves:
        yield {"ph": "s", **_arrow(track, arrow, at)}
    last = begin
    for label, end_s in zip(bar.inside.labels, bar.inside.ends_s, strict=True):
        until = min(_ticks(bar.start_s + end_s), end)
        if until > last:
            yield _slice(track, label, last, until)
            last = until


def _slice(track: Event, label: Event, begin: int, end: int) -> Event:
    at, length = begin / _TICKS_PER_US, (end - begin) / _TICKS_PER_US
    return {"ph": "X", **track, **label, "ts": at, "dur": length}


def _arrow(track: Event, number: int, at: float) -> Event:
    return {**track, "name": "message", "cat": "message", "id": number, "ts": at}


def _named(pid: int, tid: int, name: str, key: str, value: str | int) -> Event:
    whose: Sequence[tuple[str, int]] = (("pid", pid), ("tid", tid)) if tid else (("pid", pid),)
    return {"ph": "M", **dict(whose), "name": name, "args": {key: value}}


def _ticks(time_s: float) -> int:
    return round(time_s * _TICKS_PER_S)
