"""Marks on the host and on a device that is played by a fake stream."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import pytest

from forerun.hooks.sensors import stopwatch
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import (
    DeviceReadings,
    DeviceStopwatch,
    EventPool,
    HostStopwatch,
)


class FakeStream:
    """A device that is ``done_ms`` far; an event is stamped when it is queued."""

    def __init__(self) -> None:
        self.queued_ms = 0.0
        self.done_ms = 0.0
        self.num_events = 0

    def event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.at_ms = -1.0

    def record(self) -> None:
        self.at_ms = self._stream.queued_ms

    def query(self) -> bool:
        return self._stream.done_ms >= self.at_ms

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.query() and end_event.query(), "reading an unfinished event would block"
        return end_event.at_ms - self.at_ms


def test_host_marks_are_the_clock_and_ready_at_once() -> None:
    times = iter([5, 9])
    watch = HostStopwatch(lambda: next(times))
    watch.begin_step()
    marks = array("q", [watch.mark(), watch.mark()])
    readings = watch.end_step()
    assert readings.is_ready() and list(readings.read(marks)) == [5, 9]


def test_device_marks_become_nanoseconds_from_the_host_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = FakeStream()
    clocks = SimpleNamespace(perf_counter_ns=lambda: 7_000, perf_counter=time.perf_counter)
    monkeypatch.setattr(stopwatch, "time", clocks)
    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    stream.queued_ms = 2.5
    first = watch.mark()
    stream.queued_ms = 4.0
    second = watch.mark()
    readings = watch.end_step()
    stream.done_ms = 4.0
    assert readings.is_ready()
    assert list(readings.read(array("q", [first, second, first]))) == [
        2_507_000,
        4_007_000,
        2_507_000,
    ]


def test_a_device_that_lags_is_asked_and_not_waited_for() -> None:
    stream = FakeStream()
    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    stream.queued_ms = 3.0
    watch.mark()
    readings = watch.end_step()
    stream.done_ms = 2.9
    assert not readings.is_ready()
    stream.done_ms = 3.0
    assert readings.is_ready()


def test_an_early_mark_on_a_slower_stream_holds_the_step_back() -> None:
    stream = FakeStream()
    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    stream.queued_ms = 9.0
    watch.mark()
    stream.queued_ms = 1.0
    watch.mark()
    readings = watch.end_step()
    stream.done_ms = 5.0
    assert not readings.is_ready()


def test_events_are_used_again_after_reading_and_not_before() -> None:
    stream = FakeStream()
    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    watch.mark()
    unread = watch.end_step()
    watch.begin_step()
    watch.mark()
    watch.end_step()
    assert stream.num_events == 4
    unread.read(array("q", [0, 1]))
    watch.begin_step()
    watch.mark()
    assert stream.num_events == 4


def test_while_a_graph_is_captured_no_event_is_recorded() -> None:
    stream = FakeStream()
    watch = DeviceStopwatch(stream.event, is_capturing=lambda: True)
    watch.begin_step()
    assert [watch.mark(), watch.mark()] == [0, 0]
    assert stream.num_events == 1


@pytest.mark.parametrize("reading_ms", [float("nan"), float("inf"), -1.0])
def test_a_reading_that_is_no_time_drops_the_step_and_is_counted(reading_ms: float) -> None:
    stream = FakeStream()

    class Event(FakeEvent):
        def elapsed_time(self, end_event: FakeEvent) -> float:
            return reading_ms

    watch = DeviceStopwatch(lambda: Event(stream))
    log = StepLog(step=0, window=0, sites=())
    watch.begin_step()
    log.marks.append(watch.mark())
    log.what.append(0)
    log.readings = watch.end_step()
    stream.done_ms = float("inf")
    assert log.resolve()
    assert (len(log.marks), len(log.what), log.num_dropped) == (0, 0, 1)


def test_only_the_last_event_of_each_stream_is_asked() -> None:
    stream, asked, key = FakeStream(), [], [7]

    class Event(FakeEvent):
        def record(self, on: object) -> None:
            self.on = on
            super().record()

        def query(self) -> bool:
            asked.append(self.on)
            return super().query()

        def elapsed_time(self, end_event: FakeEvent) -> float:
            return end_event.at_ms - self.at_ms

    watch = DeviceStopwatch(
        lambda: Event(stream), stream_key=lambda: key[0], current_stream=lambda: f"stream {key[0]}"
    )
    watch.begin_step()
    for key[0] in (7, 9, 7, 7, 9, 7):
        watch.mark()
    readings = watch.end_step()
    stream.done_ms = 1.0
    assert readings.is_ready()
    assert sorted(asked) == ["stream 7", "stream 9"]


def test_a_pool_without_events_repeats_the_mark_before_and_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = FakeStream()
    monkeypatch.setattr(stopwatch, "MAX_EVENTS", 3)
    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    assert [watch.mark() for _ in range(4)] == [1, 2, 2, 2]
    readings = watch.end_step()
    assert readings.num_dropped == 2 and stream.num_events == 3


def test_events_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now_s = FakeStream(), [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    pool = EventPool(stream.event)
    events = [pool.take() for _ in range(200)]
    for event in events:
        event.record()
    readings = DeviceReadings(pool, 0, events, events[-1:])
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=clock))
    calls = 1
    while not readings.is_ready():
        calls += 1
    assert calls == 4
    assert list(readings.read(array("q", [0, 199]))) == [0, 0]
