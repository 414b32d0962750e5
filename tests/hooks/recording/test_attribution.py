"""Own times, waits and phases from marks that a test lays down by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks._waits import BLOCKED_NS
from forerun.calib.marks.step_marks import TransferKind
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, PhaseRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, Phase, optimizer_operator
from forerun.hooks.sensors.recorder import Recorder, backward_mark
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

LAYER, ATTENTION, QKV, PROJ = range(4)
SITES = (
    Site(kind=OperatorKind.RESIDUAL, layer=2),
    Site(kind=OperatorKind.POSITION, layer=2),
    Site(kind=OperatorKind.LINEAR_QKV, layer=2),
    Site(kind=OperatorKind.LINEAR_PROJ, layer=2),
)
RAW = ((8, 1, 4), (8, 1, 6))
_T = TypeVar("_T")


class Play:
    """A step that is played by hand: every call lets time pass before its mark."""

    def __init__(self, clock, **log: Any) -> None:
        self.clock = clock
        self.stack: list[tuple[int, int]] = []
        self.recorder = Recorder(HostStopwatch(clock))
        self.log = self.recorder.open(StepLog(step=4, window=0, sites=SITES, **log))

    def begin(self, site: int, after_ns: int = 0) -> None:
        self.clock.tick(after_ns)
        self.stack.append((site, self.recorder.begin_span(site)))

    def end(self, site: int, after_ns: int = 0) -> int:
        self.clock.tick(after_ns)
        begun, span = self.stack.pop()
        assert begun == site
        self.recorder.end_span(span, self.clock(), RAW, 2)
        return span

    def reach(self, *marks: int, after_ns: int = 0) -> None:
        self.clock.tick(after_ns)
        self.recorder.mark_backward(self.log, marks)

    def phase(self, name: str, after_ns: int = 0) -> None:
        self.clock.tick(after_ns)
        self.recorder.begin_phase(name)

    def stop(self, name: str, after_ns: int = 0) -> None:
        self.clock.tick(after_ns)
        self.recorder.end_phase(name)

    def transfer(self) -> int:
        kind = TransferKind(
            collective=Collective.ALL_REDUCE, role=GroupRole.TP, group="tp#1", ranks=(0, 1)
        )
        return self.recorder.add_transfer(self.log.kind_number(kind), 64)

    def wait(self, transfer: int, for_ns: int) -> None:
        self.recorder.begin_wait(transfer)
        self.clock.tick(for_ns)
        self.recorder.end_wait(transfer)

    def records(self, kind: type[_T]) -> list[_T]:
        log = self.recorder.close() or self.log
        assert log.resolve()
        return [r for r in Attribution(log).records() if isinstance(r, kind)]


@pytest.fixture
def play(clock) -> Iterator[Play]:
    yield Play(clock)


def durations_ns(records: list[OperatorRecord]) -> dict[tuple[OperatorKind, Phase], int]:
    return {(r.kind, r.phase): r.duration_ns for r in records}


def test_nested_operators_and_waits_are_not_an_operators_own_time(play: Play) -> None:
    play.phase("forward-compute")
    play.begin(LAYER, after_ns=1)
    play.begin(ATTENTION, after_ns=10)
    play.begin(QKV, after_ns=20)
    play.clock.tick(100)
    play.wait(play.transfer(), for_ns=1000)
    play.end(QKV, after_ns=100)
    play.end(ATTENTION, after_ns=30)
    play.end(LAYER, after_ns=5)
    play.stop("forward-compute", after_ns=7)
    log = play.recorder.close()
    records = list(Attribution(log).records())
    assert durations_ns([r for r in records if isinstance(r, OperatorRecord)]) == {
        (OperatorKind.LINEAR_QKV, Phase.FORWARD): 200,
        (OperatorKind.POSITION, Phase.FORWARD): 50,
        (OperatorKind.RESIDUAL, Phase.FORWARD): 15,
    }
    phase = next(r for r in records if isinstance(r, PhaseRecord))
    assert (phase.duration_ns, phase.wait_ns) == (1273, 1000)


def test_our_own_time_after_a_module_is_nobodys(play: Play) -> None:
    play.begin(LAYER)
    play.begin(QKV)
    play.clock.tick(50)
    at = play.clock()
    play.clock.tick(9)
    play.recorder.end_span(play.stack.pop()[1], at, RAW, 2)
    play.end(LAYER, after_ns=3)
    assert durations_ns(play.records(OperatorRecord)) == {
        (OperatorKind.LINEAR_QKV, Phase.FORWARD): 50,
        (OperatorKind.RESIDUAL, Phase.FORWARD): 3,
    }


def forward(play: Play) -> dict[int, int]:
    """A layer's forward; returns the span of each site."""
    play.phase("forward-compute")
    spans = {}
    play.begin(LAYER)
    play.begin(ATTENTION)
    play.begin(QKV)
    spans[QKV] = play.end(QKV, after_ns=1)
    play.begin(PROJ)
    spans[PROJ] = play.end(PROJ, after_ns=1)
    spans[ATTENTION] = play.end(ATTENTION, after_ns=1)
    spans[LAYER] = play.end(LAYER, after_ns=1)
    play.stop("forward-compute")
    return spans


def test_parent_and_child_that_begin_at_one_node_are_told_apart_by_depth(play: Play) -> None:
    spans = forward(play)
    play.phase("backward-compute")
    play.reach(backward_mark(spans[LAYER], is_begin=True))
    play.reach(
        backward_mark(spans[PROJ], is_begin=True),
        backward_mark(spans[ATTENTION], is_begin=True),
        after_ns=3,
    )
    play.reach(backward_mark(spans[PROJ], is_begin=False), after_ns=40)
    play.reach(backward_mark(spans[QKV], is_begin=True), after_ns=500)
    play.reach(
        backward_mark(spans[QKV], is_begin=False),
        backward_mark(spans[ATTENTION], is_begin=False),
        after_ns=60,
    )
    play.stop("backward-compute", after_ns=2)
    backward = {
        k: v
        for k, v in durations_ns(play.records(OperatorRecord)).items()
        if k[1] is Phase.BACKWARD
    }
    assert backward == {
        (OperatorKind.LINEAR_PROJ, Phase.BACKWARD): 40,
        (OperatorKind.POSITION, Phase.BACKWARD): 500,
        (OperatorKind.LINEAR_QKV, Phase.BACKWARD): 60,
        (OperatorKind.RESIDUAL, Phase.BACKWARD): 5,
    }


def test_a_backward_without_end_mark_is_closed_by_the_next_or_by_the_phase(play: Play) -> None:
    spans = forward(play)
    play.phase("backward-compute")
    play.reach(backward_mark(spans[PROJ], is_begin=True))
    play.reach(backward_mark(spans[QKV], is_begin=True), after_ns=10)
    play.stop("backward-compute", after_ns=20)
    play.clock.tick(1000)
    times = durations_ns(play.records(OperatorRecord))
    assert times[OperatorKind.LINEAR_PROJ, Phase.BACKWARD] == 10
    assert times[OperatorKind.LINEAR_QKV, Phase.BACKWARD] == 20


def test_forward_inside_the_backward_phase_is_recomputation_inside_its_operator(
    play: Play,
) -> None:
    spans = forward(play)
    play.phase("backward-compute")
    play.reach(backward_mark(spans[ATTENTION], is_begin=True))
    play.begin(QKV, after_ns=5)
    recomputed = play.end(QKV, after_ns=70)
    play.reach(backward_mark(recomputed, is_begin=True))
    play.reach(backward_mark(recomputed, is_begin=False), after_ns=90)
    play.reach(backward_mark(spans[ATTENTION], is_begin=False), after_ns=6)
    play.stop("backward-compute")
    times = durations_ns(play.records(OperatorRecord))
    assert times[OperatorKind.LINEAR_QKV, Phase.RECOMPUTE] == 70
    assert times[OperatorKind.LINEAR_QKV, Phase.BACKWARD] == 90
    assert times[OperatorKind.POSITION, Phase.BACKWARD] == 11


def test_a_transfer_waited_for_at_once_is_synchronous_and_known(play: Play) -> None:
    transfer = play.transfer()
    play.wait(transfer, for_ns=30)
    play.wait(transfer, for_ns=BLOCKED_NS)
    record = play.records(CollectiveRecord)[0]
    assert (record.is_async, record.is_bound) == (False, False)
    assert record.duration_ns == record.exposed_ns == BLOCKED_NS + 30


@pytest.mark.parametrize(("waited_ns", "is_bound"), [(BLOCKED_NS - 1, True), (BLOCKED_NS, False)])
def test_the_end_of_an_asynchronous_transfer_is_known_only_where_the_wait_blocked(
    play: Play, waited_ns: int, is_bound: bool
) -> None:
    transfer = play.transfer()
    play.wait(transfer, for_ns=30)
    play.begin(QKV, after_ns=0)
    play.end(QKV, after_ns=400)
    play.wait(transfer, for_ns=waited_ns)
    record = play.records(CollectiveRecord)[0]
    assert (record.is_async, record.is_bound) == (True, is_bound)
    assert record.duration_ns == 430 + waited_ns
    assert record.exposed_ns == 30 + waited_ns


def test_a_transfer_never_waited_for_is_bounded_by_the_end_of_the_step(play: Play) -> None:
    play.wait(play.transfer(), for_ns=30)
    play.phase("optimizer")
    play.stop("optimizer", after_ns=100)
    record = play.records(CollectiveRecord)[0]
    assert record.is_bound and record.duration_ns == 130 and record.exposed_ns == 30


def test_sequences_count_per_group_collective_and_peer(play: Play) -> None:
    for _ in range(3):
        play.wait(play.transfer(), for_ns=1)
    assert [r.sequence for r in play.records(CollectiveRecord)] == [0, 1, 2]


def test_the_optimizer_is_its_phase_without_waits(clock) -> None:
    play = Play(clock, optimizer=optimizer_operator(77))
    play.phase("optimizer")
    play.clock.tick(40)
    play.wait(play.transfer(), for_ns=500)
    play.stop("optimizer", after_ns=2)
    record = play.records(OperatorRecord)[0]
    assert (record.kind, record.phase, record.shape) == (OperatorKind.OPTIMIZER, Phase.STEP, (77,))
    assert record.duration_ns == 42 and record.element_nbytes == 4


def test_only_sampled_passes_have_operators_and_all_have_phases(clock) -> None:
    play = Play(clock, samples=(-1, 1, -1, 3))
    for _ in range(4):
        play.phase("forward-compute")
        play.begin(QKV)
        play.end(QKV, after_ns=5)
        play.stop("forward-compute")
    log = play.recorder.close()
    records = list(Attribution(log).records())
    assert [r.microbatch for r in records if isinstance(r, PhaseRecord)] == [0, 1, 2, 3]
    assert [r.microbatch for r in records if isinstance(r, OperatorRecord)] == [1, 3]


def test_marks_beyond_the_limit_are_dropped_and_counted(clock) -> None:
    play = Play(clock, max_marks=20)
    for _ in range(5):
        play.begin(QKV)
        play.end(QKV, after_ns=5)
    assert len(play.records(OperatorRecord)) == 2
    assert play.log.num_dropped == 3


def test_where_there_is_no_room_operators_of_whole_later_micro_batches_are_missing(clock) -> None:
    play = Play(clock, samples=tuple(range(8)), max_marks=100)
    for name in ("forward-compute", "backward-compute"):
        for _ in range(8):
            play.phase(name)
            for site in (LAYER, QKV):
                play.begin(site)
            for site in (QKV, LAYER):
                play.end(site, after_ns=5)
            play.stop(name)
    log = play.recorder.close()
    records = list(Attribution(log).records())
    passes = Counter((r.phase, r.microbatch) for r in records if isinstance(r, OperatorRecord))
    forward = [key for key in passes if key[0] is Phase.FORWARD]
    assert set(passes.values()) == {2}
    assert forward == [(Phase.FORWARD, number) for number in range(len(forward))]
    assert 0 < len(forward) < 8 and log.num_dropped > 0
    assert all(number < len(forward) for _, number in passes)
    assert sum(isinstance(r, PhaseRecord) for r in records) == 16


def test_a_mark_after_the_step_changes_nothing(play: Play) -> None:
    spans = forward(play)
    log = play.recorder.close()
    before = len(log.what)
    play.recorder.mark_backward(log, [backward_mark(spans[QKV], is_begin=True)])
    assert len(log.what) == before and log.num_dropped == 0


def test_outside_a_step_nothing_is_recorded(clock) -> None:
    recorder = Recorder(HostStopwatch(clock))
    recorder.begin_span(0)
    recorder.begin_phase("x")
    recorder.end_phase("x")
    recorder.begin_wait(0)
    recorder.end_wait(0)
    recorder.end_span(0, 0, None, 0)
    assert recorder.begin_span(0) == -1 and recorder.close() is None
    assert recorder.add_transfer(0, 8) == -1


@given(st.data())
def test_own_times_and_the_rest_add_up_to_the_phase(data: st.DataObject) -> None:
    from ..conftest import FakeClock

    play = Play(FakeClock())
    play.phase("forward-compute")
    stack: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        play.clock.tick(data.draw(st.integers(0, 1000)))
        action = data.draw(st.sampled_from(["begin", "end", "wait"]))
        if action == "begin":
            stack.append(data.draw(st.sampled_from([LAYER, ATTENTION, QKV, PROJ])))
            play.begin(stack[-1])
        elif action == "end" and stack:
            play.end(stack.pop())
        elif action == "wait":
            play.wait(play.transfer(), for_ns=data.draw(st.integers(0, 1000)))
    while stack:
        play.end(stack.pop())
    play.stop("forward-compute")
    log = play.recorder.close()
    records = list(Attribution(log).records())
    phase = next(r for r in records if isinstance(r, PhaseRecord))
    taken = sum(r.duration_ns for r in records if isinstance(r, OperatorRecord))
    assert 0 <= taken + phase.wait_ns <= phase.duration_ns
    exposed = sum(r.exposed_ns for r in records if isinstance(r, CollectiveRecord))
    assert exposed == phase.wait_ns


def test_a_clock_that_jumps_back_costs_what_was_open_and_nothing_else(play: Play) -> None:
    play.phase("forward-compute")
    play.begin(LAYER)
    play.begin(QKV)
    play.end(QKV, after_ns=5)
    play.begin(PROJ, after_ns=1)
    play.clock.tick(-1_000_000)
    play.end(PROJ)
    play.end(LAYER, after_ns=2)
    play.stop("forward-compute")
    play.phase("optimizer")
    play.stop("optimizer", after_ns=9)
    log = play.recorder.close()
    attribution = Attribution(log)
    records = list(attribution.records())
    assert durations_ns([r for r in records if isinstance(r, OperatorRecord)]) == {
        (OperatorKind.LINEAR_QKV, Phase.FORWARD): 5
    }
    assert [(r.name, r.duration_ns) for r in records if isinstance(r, PhaseRecord)] == [
        ("optimizer", 9)
    ]
    assert attribution.num_dropped == 3


@given(st.lists(st.integers(-500, 1000), min_size=1, max_size=40), st.data())
def test_whatever_the_clock_does_no_record_is_negative(
    ticks: list[int], data: st.DataObject
) -> None:
    from ..conftest import FakeClock

    play = Play(FakeClock())
    play.phase("forward-compute")
    for tick in ticks:
        play.clock.tick(tick)
        action = data.draw(st.sampled_from(["begin", "end", "wait"]))
        if action == "begin":
            play.begin(data.draw(st.sampled_from([LAYER, QKV])))
        elif action == "end" and play.stack:
            play.end(play.stack[-1][0])
        else:
            play.wait(play.transfer(), for_ns=tick)
    play.stop("forward-compute")
    for record in Attribution(play.recorder.close()).records():
        times = {name: getattr(record, name, 0) for name in ("duration_ns", "exposed_ns")}
        assert all(value >= 0 for value in times.values()), record


def test_an_operator_without_shape_or_gradient_has_not_fired(play: Play) -> None:
    play.begin(QKV)
    play.recorder.end_span(play.stack.pop()[1], play.clock(), None, 0)
    attribution = Attribution(play.recorder.close())
    assert list(attribution.records()) == [] and attribution.fired == set()
