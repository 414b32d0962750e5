"""Marks on several streams of a device in virtual time: whose time is whose.

The device knows what it was charged; what is recorded is compared with that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from device_clock import Clock
from device_streams import Device, Event, Stream, capturing, install_device, uninstall_device
from device_truth import Truth
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks.step_marks import NO_TIME, TransferKind
from forerun.calib.marks.window_records import WindowRecords, mean_waits, transfer_weights
from forerun.calib.records.record_kinds import (
    FORWARD,
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
)
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.sensors import stopwatch
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch

SITES = tuple(Site(kind=OperatorKind.LINEAR_FC1, layer=layer) for layer in range(3))
GATHER = TransferKind(
    collective=Collective.ALL_GATHER, role=GroupRole.DP, group="dp#1", ranks=(0, 1)
)
_T = TypeVar("_T")


@dataclass
class Play:
    """A step on a device, played by hand through the real recorder."""

    samples: tuple[int, ...] = ()
    frequent: frozenset[TransferKind] | None = None
    clock: Clock = field(default_factory=lambda: Clock(Truth()))
    self_time_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    transfers_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = Device(self.clock)
        install_device(self.device)
        self.main, self.side = self.device.default, Stream()
        self.inside: list[int] = []
        self.num_spans = 0
        self.is_capturing = False
        watch = DeviceStopwatch(
            lambda: Event(enable_timing=True),
            stream_key=lambda: self.device.current.cuda_stream,
            current_stream=lambda: self.device.current,
            is_capturing=lambda: self.is_capturing or self.device.is_capturing(),
            clock=lambda: round(self.clock.host_s * 1e9),
        )
        self.recorder = Recorder(watch)
        # The device still works on the step before, so that the host is ahead of it.
        self.clock.launch(self.main.line, 1.0)
        self.log = self.recorder.open(self.new_log())

    def new_log(self) -> StepLog:
        return StepLog(
            step=0,
            window=0,
            sites=SITES,
            samples=self.samples,
            samples_transfers=True,
            frequent=self.frequent,
            largest_pass=1,
            max_marks=self.recorder.stopwatch.num_available,
        )

    def kernel(self, time_s: float) -> None:
        self.clock.launch(self.device.line, time_s)
        if self.inside and self.device.current is self.main:
            self.self_time_s[self.inside[-1]] += time_s

    def operator(self, layer: int, time_s: float, inner: Any = None) -> None:
        """An operator; ``inner`` runs in its middle."""
        self.num_spans += 1
        number = self.num_spans
        span = self.recorder.begin_span(layer)
        self.inside.append(number)
        self.kernel(time_s / 2)
        if inner is not None:
            inner()
        self.kernel(time_s / 2)
        self.inside.pop()
        if span >= 0:
            at = self.recorder.stopwatch.mark()
            self.recorder.end_span(span, at, ((number, 1, 8), (number, 1, 16)), 2)

    def gather(self, time_s: float) -> None:
        """A synchronous call on the side stream, which first waits for the step's stream."""
        before, self.device.current = self.device.current, self.side
        self.side.wait_event(self.main.record_event(Event()))
        transfer = self.recorder.add_transfer(self.log.kind_number(GATHER), 64)
        self.recorder.begin_wait(transfer)
        self.clock.launch(self.side.line, time_s, cause=len(self.transfers_s))
        self.recorder.end_wait(transfer, is_done=True)
        self.transfers_s.append(time_s)
        self.device.current = before

    def wait(self) -> None:
        """The step's stream waits for the side stream."""
        is_begun = self.recorder.begin_stall()
        self.main.wait_event(self.side.record_event(Event()))
        if is_begun:
            self.recorder.end_stall()

    def side_operator(self, layer: int, time_s: float) -> None:
        before, self.device.current = self.device.current, self.side
        self.operator(layer, time_s)
        self.device.current = before

    def close(self) -> StepLog:
        log = self.recorder.close()
        self.is_capturing = False
        assert log is not None
        self.clock.synchronize()
        assert log.resolve()
        uninstall_device()
        return log

    def stood_s(self) -> float:
        """How long the step's stream stood still for transfers, by the device."""
        stalls = [row for row in self.clock.truth.rows("stalls") if row["stream"] == 0]
        parts = (part for row in stalls for part in row["parts"])
        return sum(end - begin for begin, end, cause in parts if cause >= 0)


def of(records: list[Any], kind: type[_T]) -> list[_T]:
    return [record for record in records if isinstance(record, kind)]


def test_hidden_gathers_take_no_time_of_the_operators() -> None:
    """FSDP2's: 4 ms gathers of the next layer, wholly behind 5 ms layers."""
    play = Play()
    play.recorder.begin_phase(FORWARD)
    play.gather(0.004)
    for _ in range(8):
        play.wait()
        play.operator(0, 0.005, inner=lambda: play.gather(0.004))
    play.recorder.end_phase(FORWARD)
    records = list(Attribution(play.close()).records())
    assert {op.duration_ns for op in of(records, OperatorRecord)} <= {*range(4999990, 5000011)}
    gathers = of(records, CollectiveRecord)
    assert len(gathers) == 9 and all(g.is_async and not g.is_bound for g in gathers)
    assert all(abs(g.duration_ns - 4_000_000) < 100 for g in gathers)
    # The first is waited for whole, and of the others what half a layer does not hide.
    exposed_ms = [g.exposed_ns / 1e6 for g in gathers]
    assert exposed_ms == pytest.approx([4.0] + [1.5] * 7 + [0.0], abs=0.001)
    phase = of(records, PhaseRecord)[0]
    assert phase.wait_ns == pytest.approx(play.stood_s() * 1e9, abs=1000)


def test_an_operator_on_a_side_stream_is_named_and_has_no_time() -> None:
    play = Play()
    play.recorder.begin_phase(FORWARD)
    play.operator(0, 0.003, inner=lambda: play.side_operator(1, 0.002))
    play.recorder.end_phase(FORWARD)
    window = WindowRecords(logs=[play.close()])
    records = list(window.of(window.logs[0]))
    assert [op.layer for op in of(records, OperatorRecord)] == [0]
    assert abs(of(records, OperatorRecord)[0].duration_ns - 3_000_000) < 100
    assert window.aside == {"on another stream, not timed: linear_fc1"}


def test_a_pool_that_runs_dry_costs_operators_and_gives_none_of_0_ns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """290 of 512 operators of 5 ms read 0.0 ms before."""
    monkeypatch.setattr(stopwatch, "MAX_EVENTS", 500)
    play = Play()
    for _ in range(64):
        play.recorder.begin_phase(FORWARD)
        for _ in range(8):
            play.operator(0, 0.005)
        play.recorder.end_phase(FORWARD)
    log = play.close()
    operators = of(list(Attribution(log).records()), OperatorRecord)
    assert 0 < len(operators) < 512 and log.num_dropped > 0
    assert {op.duration_ns // 10_000 for op in operators} <= {499, 500}


def test_one_early_mark_costs_itself() -> None:
    """The side stream is idle while the step's still works on the step before."""
    play = Play()
    before, play.device.current = play.device.current, play.side
    transfer = play.recorder.add_transfer(play.log.kind_number(GATHER), 64)
    play.recorder.begin_wait(transfer)
    play.clock.launch(play.side.line, 0.004)
    play.recorder.end_wait(transfer, is_done=True)
    play.device.current = before
    play.operator(0, 0.005)
    records = list(Attribution(play.close()).records())
    assert abs(of(records, OperatorRecord)[0].duration_ns - 5_000_000) < 100
    assert abs(of(records, CollectiveRecord)[0].duration_ns - 4_000_000) < 2000


def test_what_touches_a_captured_mark_is_dropped_and_counted() -> None:
    play = Play()
    play.recorder.begin_phase("forward-backward")
    play.operator(0, 0.002)
    play.is_capturing = True
    play.operator(1, 0.002)
    play.is_capturing = False
    play.operator(2, 0.002)
    play.recorder.end_phase("forward-backward")
    log = play.close()
    records = list(Attribution(log).records())
    assert [op.layer for op in of(records, OperatorRecord)] == [0, 2]
    assert log.num_dropped == 2 and len(of(records, PhaseRecord)) == 1


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_nothing_is_recorded_or_asked_during_a_capture(mode: str) -> None:
    play = Play()
    play.operator(0, 0.002)
    with capturing(mode) as capture:
        play.operator(1, 0.002)
        play.gather(0.001)
        play.wait()
        log = play.recorder.close()
        assert log is not None and not log.resolve()
        watch = play.recorder.stopwatch
        watch.begin_step()
        assert watch.mark() == NO_TIME
    play.clock.synchronize()
    assert capture.invalidated_by == ""
    assert log.resolve()
    uninstall_device()
    operators = of(list(Attribution(log).records()), OperatorRecord)
    assert [op.layer for op in operators] == [0]


def test_transfers_are_timed_with_the_sampled_passes_and_all_are_counted() -> None:
    def step(play: Play) -> StepLog:
        for _ in range(8):
            play.recorder.begin_phase(FORWARD)
            for _ in range(3):
                play.operator(0, 0.001)
                play.gather(0.002)
                play.wait()
            play.recorder.end_phase(FORWARD)
        return play.close()

    samples = (-1, -1, 2, -1, -1, -1, -1, -1)
    first = step(Play(samples=samples))
    assert len(first.transfer_kinds) - 1 == 3 * 3  # its ends as well: what comes when is not known
    frequent = first.frequent_kinds(is_thin=False)
    assert frequent == {GATHER}
    play = Play(samples=samples, frequent=frequent)
    log = step(play)
    weights, waits = transfer_weights([log]), mean_waits([log])
    records = list(Attribution(log, weights=weights, wait_ns=waits).records())
    gathers = of(records, CollectiveRecord)
    assert len(gathers) == 3 and sum(g.stands_for for g in gathers) == pytest.approx(24)
    exposed_s = sum(g.exposed_ns * g.stands_for for g in gathers) / 1e9
    assert exposed_s == pytest.approx(play.stood_s(), rel=0.01)
    assert sum(p.wait_ns for p in of(records, PhaseRecord)) == pytest.approx(
        play.stood_s() * 1e9, rel=0.01
    )


ACTS = st.one_of(
    st.tuples(st.just("operator"), st.integers(0, 2), st.floats(5e-5, 5e-3)),
    st.tuples(st.just("gather"), st.just(0), st.floats(5e-5, 5e-3)),
    st.tuples(st.just("side"), st.integers(0, 2), st.floats(5e-5, 5e-3)),
    st.tuples(st.just("wait"), st.just(0), st.just(0.0)),
    st.tuples(st.just("capture"), st.integers(0, 1), st.just(0.0)),
    st.tuples(st.just("nested"), st.integers(0, 2), st.floats(5e-5, 5e-3)),
    st.tuples(st.just("around"), st.integers(0, 2), st.floats(5e-5, 5e-3)),
)


def act(play: Play, name: str, number: int, time_s: float) -> None:
    if name == "operator":
        play.operator(number, time_s)
    elif name == "gather":
        play.gather(time_s)
    elif name == "side":
        play.side_operator(number, time_s)
    elif name == "wait":
        play.wait()
    elif name == "capture":
        play.is_capturing = bool(number)
    elif name == "nested":
        play.operator(number, time_s, inner=lambda: play.operator(2, time_s / 3))
    else:
        play.operator(number, time_s, inner=lambda: (play.gather(time_s), play.wait()))


@given(
    st.lists(st.lists(ACTS, max_size=12), min_size=1, max_size=6),
    st.integers(2, 200),
    st.integers(1, 3),
)
def test_no_operator_of_no_time_and_no_time_of_another_stream(
    passes: list[list[tuple[str, int, float]]], max_events: int, stride: int
) -> None:
    """Over random streams, budgets of events, captures and steps."""
    before, stopwatch.MAX_EVENTS = stopwatch.MAX_EVENTS, max_events
    try:
        samples = tuple(n if n % stride == 0 else -1 for n in range(len(passes)))
        play = Play(samples=samples if stride > 1 else ())
        for acts in passes:
            play.recorder.begin_phase(FORWARD)
            for one in acts:
                act(play, *one)
            play.recorder.end_phase(FORWARD)
        records = list(Attribution(play.close()).records())
    finally:
        stopwatch.MAX_EVENTS = before
    for op in of(records, OperatorRecord):
        true_ns = play.self_time_s[op.shape[-3]] * 1e9
        assert op.duration_ns > 0
        assert abs(op.duration_ns - true_ns) <= 0.03 * true_ns + 2_000
    for gather in of(records, CollectiveRecord):
        if not gather.is_bound:
            true_ns = play.transfers_s[gather.sequence] * 1e9
            assert abs(gather.duration_ns - true_ns) <= 0.03 * true_ns + 2_000
