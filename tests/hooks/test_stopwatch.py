"""Marks on the host and on a device that is played by a fake stream."""

from __future__ import annotations

from array import array

from forerun.hooks.stopwatch import DeviceStopwatch, HostStopwatch


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


def test_device_marks_become_nanoseconds_from_the_host_anchor() -> None:
    stream = FakeStream()
    watch = DeviceStopwatch(stream.event, clock=lambda: 7_000)
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
