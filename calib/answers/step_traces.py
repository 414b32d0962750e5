"""A step, simulated and measured, as a trace for Perfetto and ``chrome://tracing``.

Slices, arrows and track names are in Chrome's Trace Event Format, as Perfetto reads it.

Slices of a track must nest, and readers compute with microseconds as doubles: all times are
multiples of 1/8 microsecond, which doubles hold exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..steps.estimate import StepEstimate
from ..steps.slices import Place, Slice
from ..timeline.items import MeasuredSpan
from ..timeline.programs import TaskKind
from ..timeline.simulation import Span
from ..units import format_time
from ..workload.choices import NAMED_CHOICES, layout_label
from ..workload.config_json import encode_fields

Event = dict[str, Any]
_TICKS_PER_S = 8_000_000
_TICKS_PER_US = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One slice of a track."""

    label: Event
    """Name, category and arguments."""
    start_s: float
    end_s: float
    inside: Sequence[tuple[Event, float]] = ()
    """Slices nested in it: the label of each, and its end in seconds from ``start_s``."""
    leaves: int | None = None
    """Arrow that begins here."""
    arrives: int | None = None
    """Arrow that ends here."""


@dataclass(slots=True, kw_only=True)
class Tracks:
    """The tracks of one file; process and thread numbers start at 1, as 0 is the idle task."""

    events: list[Event] = field(default_factory=list)
    _num_processes: int = 0
    _num_tracks: int = 0

    def process(self, name: str, label: str = "") -> int:
        """Open a process and return its number; ``label`` is shown next to the name."""
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
        """Add a track of slices; overlapping slices go to further numbered tracks of that name."""
        for place, lane in enumerate(_lanes(bars)):
            # A thread with the number of its process would be taken for the main thread.
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
    """Yield the slice, its arrows, then nested slices, as readers bind arrows to the open slice."""
    begin, end = _ticks(bar.start_s), _ticks(bar.end_s)
    yield _slice(track, bar.label, begin, end)
    at = begin / _TICKS_PER_US
    if bar.arrives is not None:
        yield {"ph": "f", "bp": "e", **_arrow(track, bar.arrives, at)}
    if bar.leaves is not None:
        yield {"ph": "s", **_arrow(track, bar.leaves, at)}
    last = begin
    for label, end_s in bar.inside:
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


SCHEMA = 2
PREDICTED, MEASURED = "predicted", "measured"
_PASSES, _MESSAGES, _SYNC = "passes", "messages", "gradients and parameters"
_STREAMS = {
    TaskKind.EXCHANGE: _MESSAGES,
    TaskKind.TRANSFER: _MESSAGES,
    TaskKind.REDUCE: _SYNC,
    TaskKind.GATHER: _SYNC,
}
"""Stream of each kind of span; passes, the optimizer and the host share the default."""
_COLOURS = {
    TaskKind.FORWARD: "thread_state_running",
    TaskKind.BACKWARD: "thread_state_runnable",
    TaskKind.EXCHANGE: "thread_state_iowait",
    TaskKind.TRANSFER: "thread_state_iowait",
    TaskKind.REDUCE: "rail_load",
    TaskKind.GATHER: "rail_load",
    TaskKind.OPTIMIZER: "rail_animation",
    TaskKind.HOST: "rail_idle",
}
_UNITS = {
    "ts": "us",
    "dur": "us",
    "hidden_us": "us that a transfer takes behind other work, beside what is drawn of it",
    "calls": "of it in the slice",
    "cat": "of what a span is made of: the part of the step that it counts to",
}


def step_trace(
    steps: Mapping[str, StepEstimate],
    measured: Sequence[MeasuredSpan] = (),
    *,
    version: str = "",
) -> dict[str, Any]:
    """Return a trace with a process for each step, under its name, and one for measured spans.

    All begin at the start of the step.  Times are in microseconds; ``version`` is the package's.
    """
    tracks, first_arrow = Tracks(), 1
    for name, estimate in steps.items():
        label = f"{layout_label(estimate.config)}, {format_time(estimate.time_s)}"
        drawn = _Predicted(estimate, first_arrow)
        pid = tracks.process(name, label)
        step = {"name": "step", "cat": "step", "args": estimate.to_json()}
        tracks.track(pid, "step", [Bar(label=step, start_s=0.0, end_s=estimate.time_s)])
        for track, bars in drawn.tracks():
            tracks.track(pid, track, bars)
        first_arrow += len(drawn.arrows)
    if measured:
        pid = tracks.process(MEASURED)
        for track, bars in _measured(measured):
            tracks.track(pid, track, bars)
    return {
        "traceEvents": tracks.events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": SCHEMA,
            "created_by": "forerun",
            "version": version,
            "units": _UNITS,
            "steps": {name: _described(estimate) for name, estimate in steps.items()},
        },
    }


def _described(estimate: StepEstimate) -> dict[str, Any]:
    config = estimate.config
    return {
        "label": layout_label(config),
        "layout": {axis.name: axis.read(config) for axis in NAMED_CHOICES},
        "model": encode_fields(config.model),
        "framework": config.framework,
        "device": config.device,
        **estimate.to_json(),
    }


class _Predicted:
    """The spans of one layout as tracks."""

    def __init__(self, estimate: StepEstimate, first_arrow: int) -> None:
        self._spans, self._slices = estimate.spans, estimate.slices
        self._inside: dict[Place, list[tuple[Event, float]]] = {}
        # The last chunk of a forward pass sends to none, nor does the first of a backward pass.
        last = {TaskKind.FORWARD: estimate.config.parallelism.num_chunks - 1, TaskKind.BACKWARD: 0}
        sent = [
            (span.kind, span.chunk, span.microbatch)
            for span in self._spans
            if last.get(span.kind, span.chunk) != span.chunk
        ]
        self.arrows = {key: first_arrow + place for place, key in enumerate(sent)}

    def tracks(self) -> Iterator[tuple[str, list[Bar]]]:
        """Yield track names with their slices, stage by stage."""
        bars: dict[tuple[int, str], list[Bar]] = {}
        for span in self._spans:
            stream = _STREAMS.get(span.kind, _PASSES)
            bars.setdefault((span.stage, stream), []).append(self._bar(span))
        for stage in sorted({stage for stage, _ in bars}):
            for stream in (_PASSES, _MESSAGES, _SYNC):
                if (stage, stream) in bars:
                    yield f"stage {stage} {stream}", bars[stage, stream]

    def _bar(self, span: Span) -> Bar:
        # The chunk that a pass waits for.
        before = span.chunk - 1 if span.kind is TaskKind.FORWARD else span.chunk + 1
        place = span.kind, span.stage, span.chunk
        if place not in self._inside:
            self._inside[place] = _inside(self._slices.get(place, ()))
        args = {"chunk": span.chunk} if span.chunk >= 0 else {}
        return Bar(
            label=_label(span.kind, span.microbatch, args),
            start_s=span.start_s,
            end_s=span.end_s,
            inside=self._inside[place],
            leaves=self.arrows.get((span.kind, span.chunk, span.microbatch)),
            arrives=self.arrows.get((span.kind, before, span.microbatch)),
        )


def _inside(slices: Sequence[Slice]) -> list[tuple[Event, float]]:
    labels: list[Event] = []
    for one in slices:
        args: Event = {"calls": round(one.calls, 3)}
        if one.phase:
            args["phase"] = one.phase
        if one.hidden_s > 0:
            args["hidden_us"] = round(one.hidden_s * 1e6, 3)
        if one.source is not None:
            args["source"] = one.source.value
        labels.append({"name": one.name, "cat": one.part.value, "args": args})
    return [*zip(labels, accumulate(one.time_s for one in slices), strict=True)]


def _measured(spans: Sequence[MeasuredSpan]) -> Iterator[tuple[str, list[Bar]]]:
    bars: dict[tuple[int, int, str], list[Bar]] = {}
    for span in spans:
        stream = _STREAMS.get(span.kind, _PASSES)
        label = _label(span.kind, span.microbatch if stream == _PASSES else -1, {})
        bar = Bar(label=label, start_s=span.start_s, end_s=span.end_s)
        bars.setdefault((span.stage, span.rank, stream), []).append(bar)
    for stage, rank in sorted({key[:2] for key in bars}):
        for stream in (_PASSES, _SYNC):
            if (stage, rank, stream) in bars:
                yield f"stage {stage} {stream}, rank {rank}", bars[stage, rank, stream]


def _label(kind: TaskKind, microbatch: int, args: Event) -> Event:
    """Return name, category and arguments of a span, the same for predicted and measured ones."""
    is_once = microbatch < 0 or kind is TaskKind.OPTIMIZER
    name = kind.value if is_once else f"{kind.value} {microbatch}"
    args = args if is_once else {**args, "microbatch": microbatch}
    return {"name": name, "cat": "span", "cname": _COLOURS[kind], "args": args}
