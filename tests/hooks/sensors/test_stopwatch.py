"""Marks on the host and on a device that is played by a fake stream."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.marks.step_marks import NO_TIME
from forerun.hooks.sensors import stopwatch
from forerun.hooks.sensors.stopwatch import DeviceStopwatch, HostStopwatch


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

    def record(self, stream: object = None) -> None:
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


def test_each_stream_holds_the_step_back_until_its_last_mark() -> None:
    stream, key = FakeStream(), [0]
    watch = DeviceStopwatch(stream.event, stream_key=lambda: key[0])
    watch.begin_step()
    stream.queued_ms, key[0] = 9.0, 5
    watch.mark()
    stream.queued_ms, key[0] = 1.0, 0
    watch.mark()
    readings = watch.end_step()
    stream.done_ms = 5.0
    assert not readings.is_ready()
    stream.done_ms = 9.0
    assert readings.is_ready()


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
    stream.done_ms = 1.0
    assert unread.is_ready()
    unread.read(array("q", [0, 1]))
    watch.begin_step()
    watch.mark()
    assert stream.num_events == 4


def test_while_a_graph_is_captured_a_mark_has_no_time() -> None:
    stream, is_capturing = FakeStream(), [False]
    watch = DeviceStopwatch(stream.event, is_capturing=lambda: is_capturing[0])
    watch.begin_step()
    is_capturing[0] = True
    marks = array("q", [watch.mark(), watch.mark_step_stream()])
    is_capturing[0] = False
    marks.append(watch.mark())
    readings = watch.end_step()
    assert readings.is_ready() and readings.num_dropped == 2 and stream.num_events == 2
    assert [time == NO_TIME for time in readings.read(marks)] == [True, True, False]


@pytest.mark.parametrize("reading_ms", [float("nan"), float("inf"), -1.0])
def test_a_reading_that_is_no_time_costs_itself_alone(reading_ms: float) -> None:
    stream, is_wrong = FakeStream(), [True, False, False]

    class Event(FakeEvent):
        def elapsed_time(self, end_event: FakeEvent) -> float:
            return reading_ms if is_wrong.pop() else super().elapsed_time(end_event)

    watch = DeviceStopwatch(lambda: Event(stream))
    watch.begin_step()
    marks = array("q")
    for stream.queued_ms in (2.0, 3.0):
        marks.append(watch.mark())
    readings = watch.end_step()
    stream.done_ms = float("inf")
    is_wrong = [False, True, False]
    assert readings.is_ready()
    first, second = readings.read(marks)
    assert first == NO_TIME and second != NO_TIME


def test_another_stream_may_be_ahead_of_the_step() -> None:
    """The step's stream still works on the step before when a side stream is free already."""
    stream, key = FakeStream(), [0]
    stream.queued_ms = 8.0
    watch = DeviceStopwatch(stream.event, stream_key=lambda: key[0])
    watch.begin_step()
    stream.queued_ms, key[0] = 5.0, 3
    early = watch.mark()
    stream.queued_ms, key[0] = 9.0, 0
    late = watch.mark()
    readings = watch.end_step()
    stream.done_ms = 9.0
    assert readings.is_ready()
    marks = array("q", [early, late])
    assert list(readings.streams(marks)) == [1, 0]
    times = readings.read(marks)
    assert times[1] - times[0] == 4_000_000


@given(
    st.lists(st.floats(0.002, 200.0), min_size=50, max_size=400),
    st.floats(0.0, 60_000.0),
)
def test_readings_of_float32_stay_as_fine_a_minute_into_a_step(
    durations_ms: list[float], late_ms: float
) -> None:
    """A reading is rounded to float32 milliseconds, as cudaEventElapsedTime does."""
    stream = FakeStream()

    class Event(FakeEvent):
        def elapsed_time(self, end_event: FakeEvent) -> float:
            return float(np.float32(end_event.at_ms - self.at_ms))

    watch = DeviceStopwatch(lambda: Event(stream))
    watch.begin_step()
    marks = array("q")
    stream.queued_ms = late_ms
    marks.append(watch.mark())
    for duration_ms in durations_ms:
        stream.queued_ms += duration_ms
        marks.append(watch.mark())
    readings = watch.end_step()
    stream.done_ms = float("inf")
    assert readings.is_ready()
    times = np.array(readings.read(marks))
    measured_ms = np.diff(times) / 1e6
    assert np.abs(measured_ms - durations_ms)[1:].max() < 5e-5


def test_only_the_last_event_of_each_stream_is_asked() -> None:
    stream, queried, key = FakeStream(), [], [7]

    class Event(FakeEvent):
        def record(self, on: object) -> None:
            self.on = on
            super().record()

        def query(self) -> bool:
            queried.append(self.on)
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
    assert queried == ["stream 7"]  # how far it is when the step ends
    stream.done_ms = 1.0
    assert readings.is_ready()
    assert sorted(queried[1:]) == ["stream 7", "stream 9"]


def test_a_pool_without_events_gives_marks_without_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FakeStream()
    monkeypatch.setattr(stopwatch, "MAX_EVENTS", 3)
    watch = DeviceStopwatch(stream.event)
    assert watch.num_available == 2
    watch.begin_step()
    assert [watch.mark() for _ in range(4)] == [1, 2, NO_TIME, NO_TIME]
    readings = watch.end_step()
    assert readings.num_dropped == 2 and stream.num_events == 3
    assert watch.num_available == 0
    readings.give_back()
    assert watch.num_available == 2


def test_events_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now_s = FakeStream(), [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    watch = DeviceStopwatch(stream.event)
    watch.begin_step()
    for _ in range(199):
        watch.mark()
    readings = watch.end_step()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=clock))
    num_calls = 1
    while not readings.is_ready(now_s[0] + 5.5):
        num_calls += 1
    assert num_calls == 3
    assert len(readings.read(array("q", [0, 199]))) == 2
