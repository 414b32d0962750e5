"""Host time to launch each operator, measured by the host's own clock under a busy device.

Planted, in virtual time: host time of each operator's calls, kernels that hide all of it, and the
cost of hooks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from device_clock import LAUNCH_S, MAX_IN_FLIGHT
from played_step import LAYER, LINEAR, POSITION, Costs, Play, operators

from forerun.calib.marks import _waits as host_pace
from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, OperatorRecord
from forerun.calib.workload.operators import Phase

CALL_S = {LAYER: 40e-6, POSITION: 15e-6, LINEAR: 25e-6}
NUM_CALLS = {LAYER: 4, POSITION: 3, LINEAR: 2}
BUSY = Costs(call_s=0.0, kernel_s=500e-6, before_mark_s=3e-6, after_end_s=10e-6)
NEAR_NS = 100
MOST_LAYERS = 18
"""Ten events each, for as many times four launches: before half of what is in flight at last."""


@dataclass
class Planted(Play):
    """A call takes the host what is planted for its operator."""

    costs: Costs = field(default=BUSY)
    num_launches: int = 1
    """Launches of one call."""
    has_waited: bool = False
    """True if the host has ever waited for room in the queue."""

    def call(self, key: tuple[int, Phase]) -> None:
        before_s, call_s = self.clock.host_s, CALL_S[key[0]]
        self.costs = replace(self.costs, call_s=call_s)
        super().call(key)
        for _ in range(self.num_launches - 1):
            self.clock.launch(self.device.line, self.costs.kernel_s)
        free_s = before_s + call_s + self.num_launches * LAUNCH_S
        self.has_waited |= self.clock.host_s > free_s + LAUNCH_S

    def operators(self) -> list[OperatorRecord]:
        """Those of the step's log, which was closed."""
        return [r for r in Attribution(self.log).records() if isinstance(r, OperatorRecord)]

    def planted_ns(self, site: int) -> float:
        return NUM_CALLS[site] * (CALL_S[site] + self.num_launches * LAUNCH_S) * 1e9

    def near_planted(self, records: list[OperatorRecord]) -> bool:
        """Return True if every recorded host time is the planted one."""
        return all(
            abs(r.host_ns - self.planted_ns(site)) <= NEAR_NS
            for site, result in operators(records, Phase.FORWARD).items()
            for r in result
            if r.host_ns
        )

    def forward(self, num_layers: int) -> None:
        with self.phase(FORWARD):
            for _ in range(num_layers):
                self.layer()


@contextmanager
def step_of(play: Planted) -> Iterator[list[OperatorRecord]]:
    """The records of a step, without those of a pass behind it that has more in flight."""
    operator_records: list[OperatorRecord] = []
    with play.step() as play.log:
        yield operator_records
        num_spans = len(play.log.span_sites)
        play.log.samples, play.log.is_sampling = (), True
        play.forward(40)
    late = len(play.log.span_sites) - num_spans
    operator_records += play.operators()[:-late]


def test_beside_a_busy_device_operators_have_the_planted_host_times() -> None:
    play = Planted(BUSY)
    with step_of(play) as records:
        play.forward(MOST_LAYERS)
    assert play.near_planted(records) and not play.has_waited
    assert all(r.host_ns for r in records) and len(records) == 5 * MOST_LAYERS
    # The device was behind all the while, but for the first kernel.
    assert sum(r.host_bound_ns for r in records) < 0.01 * sum(r.duration_ns for r in records)
    assert sum(r.host_ns for r in records) < 0.1 * sum(r.duration_ns for r in records)


@pytest.mark.parametrize("num_launches", [1, 20])
def test_a_host_that_may_wait_for_room_in_the_queue_has_none(
    monkeypatch: pytest.MonkeyPatch, num_launches: int
) -> None:
    """13 launches a layer, or as many for each mark as no layer has."""
    play = Planted(BUSY, num_launches=num_launches)
    with play.step() as play.log:
        for _ in range(3):
            play.forward(max(10, 120 // num_launches))
    records = play.operators()
    assert play.has_waited and play.near_planted(records)
    timed = Counter(r.microbatch for r in records if r.host_ns)
    assert timed.keys() == {0} and timed[0] >= 5
    # Else what a full queue holds up would be the host's.
    monkeypatch.setattr(host_pace, "MOST_QUEUED", math.inf)
    monkeypatch.setattr(host_pace, "PEAK_FRAC", 1.0)
    assert not play.near_planted(play.operators())


def test_a_queue_that_was_full_before_the_step_has_none() -> None:
    play = Planted(BUSY)
    for _ in range(MAX_IN_FLIGHT + 100):
        play.clock.launch(play.device.line, BUSY.kernel_s)
    with play.step() as play.log:
        play.forward(20)
    assert not any(r.host_ns for r in play.operators())


def test_where_the_device_waits_all_have_them_and_they_are_the_durations() -> None:
    play = Planted(replace(BUSY, kernel_s=2e-6))
    with play.step() as play.log:
        play.forward(40)
        play.forward(40)
    records = play.operators()
    assert play.near_planted(records) and all(r.host_ns for r in records[1:])
    # Readings of events have half a microsecond, and hooks hide parts of short kernels.
    assert all(abs(r.host_ns - r.duration_ns) <= 3_000 for r in records[1:])


def test_an_operator_that_waits_for_a_result_has_none() -> None:
    play = Planted(BUSY)
    with step_of(play) as records, play.phase(FORWARD):
        for number in range(6):
            play.operator(LINEAR, 2, inner=play.clock.synchronize if number == 3 else None)
    assert [r.host_ns > 0 for r in records] == [True, True, True, False, True, True]
    assert play.near_planted(records)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_pass_that_is_not_marked_may_have_filled_the_queue(is_read: bool) -> None:
    """Unless the device is through with it, as where a loss is read between micro-batches."""
    play = Planted(BUSY)
    with step_of(play) as records:
        play.log.samples = (-1, 1)
        play.forward(5)
        if is_read:
            play.clock.synchronize()
        play.forward(5)
    assert len(records) == 25 and play.near_planted(records)
    assert [r.host_ns > 0 for r in records] == [is_read] * 25


@pytest.mark.parametrize("is_read", [False, True])
def test_backward_passes_have_them_where_little_is_in_flight(is_read: bool) -> None:
    """Without a loss that is read as many as a queue holds may be."""
    play = Planted(BUSY)
    with step_of(play) as records:
        play.forward(5 if is_read else 30)
        if is_read:
            play.clock.synchronize()
        with play.phase(BACKWARD):
            play.backward(play.log)
    result = operators(records, Phase.BACKWARD)[LINEAR]
    for record in result:
        assert abs(record.host_ns - play.planted_ns(LINEAR) * is_read) <= NEAR_NS


def test_a_backward_pass_behind_a_short_forward_pass_has_them_at_once() -> None:
    play = Planted(BUSY)
    with step_of(play) as records:
        play.forward(5)
        with play.phase(BACKWARD):
            play.backward(play.log)
    result = operators(records, Phase.BACKWARD)[LINEAR]
    assert len(result) == 15
    assert all(abs(r.host_ns - play.planted_ns(LINEAR)) <= NEAR_NS for r in result)


def test_marks_without_an_event_leave_no_time_around_them() -> None:
    """As inside the capture of a graph."""
    play = Planted(BUSY)
    with step_of(play) as records, play.phase(FORWARD):
        play.operator(LINEAR, 2)
        play.is_capturing = True
        play.operator(LINEAR, 2)
        play.is_capturing = False
        play.operator(LINEAR, 2)
    assert [r.host_ns > 0 for r in records] == [True, False]
