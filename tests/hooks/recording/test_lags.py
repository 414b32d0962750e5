"""A device that waits for its host: recognised by virtual time, and rid of what hooks take.

What the host needs for a call, and the device for a kernel, is planted; so is what hooks take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from device_clock import LAUNCH_S, MAX_IN_FLIGHT
from hypothesis import example, given
from hypothesis import strategies as st
from played_step import LINEAR, Costs, Play, operators

from forerun.calib.marks._attribution import Attribution
from forerun.calib.marks._waits import CAUGHT_UP_NS, lags_of
from forerun.calib.marks.step_marks import NO_TIME
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, PhaseRecord, Record
from forerun.calib.workload.operators import Phase

NEAR_FRAC, NEAR_NS = 0.03, 2_000


def play_step(costs: Costs, *, backward: Costs | None = None, num_layers: int = 20) -> Play:
    """A step of that many layers; the records of it are in ``records``."""
    play = Play(costs)
    with play.step() as log:
        with play.phase(FORWARD):
            for _ in range(num_layers):
                play.layer()
        play.clock.synchronize()
        if backward is not None:
            play.costs = backward
            with play.phase(BACKWARD):
                play.backward(log)
    play.records = list(Attribution(log).records())
    return play


def share(records: Sequence[Record], phase: Phase = Phase.FORWARD) -> float:
    mine = [r for result in operators(records, phase).values() for r in result]
    return sum(r.host_bound_ns for r in mine) / sum(r.duration_ns for r in mine)


LAUNCH_BOUND = Costs(call_s=30e-6, kernel_s=5e-6)
SLOW_HOST = Costs(call_s=1e-3, kernel_s=2e-4)
"""Its kernels are longer than any launch takes."""
COMPUTE_BOUND = Costs(call_s=5e-6, kernel_s=200e-6)


@pytest.mark.parametrize("costs", [LAUNCH_BOUND, SLOW_HOST])
def test_times_of_a_launch_bound_step_are_the_hosts_and_say_so(costs: Costs) -> None:
    play = play_step(costs)
    assert share(play.records) > 0.99
    for site, result in operators(play.records, Phase.FORWARD).items():
        total_ns = sum(r.duration_ns for r in result)
        true_ns = play.host_s[site, Phase.FORWARD] * 1e9
        assert abs(total_ns - true_ns) <= NEAR_FRAC * true_ns + NEAR_NS


def test_a_compute_bound_step_is_none_and_its_times_are_the_kernels() -> None:
    hooks = replace(COMPUTE_BOUND, before_mark_s=3e-6, after_end_s=10e-6)
    for costs in (COMPUTE_BOUND, hooks):
        play = play_step(costs)
        assert share(play.records) == 0.0
        for site, result in operators(play.records, Phase.FORWARD).items():
            total_ns, true_ns = sum(r.duration_ns for r in result), play.busy_s[site, Phase.FORWARD]
            # The first call of the step is waited for.
            assert abs(total_ns - true_ns * 1e9) <= 30_000
        phase = next(r for r in play.records if isinstance(r, PhaseRecord))
        assert phase.hook_ns <= 20_000  # of the first operators: the device is not behind yet


def test_forward_and_backward_are_separate() -> None:
    play = play_step(LAUNCH_BOUND, backward=COMPUTE_BOUND)
    assert share(play.records, Phase.FORWARD) > 0.99
    assert share(play.records, Phase.BACKWARD) < 0.01
    play = play_step(COMPUTE_BOUND, backward=LAUNCH_BOUND)
    assert share(play.records, Phase.FORWARD) < 0.01
    assert share(play.records, Phase.BACKWARD) > 0.99


@pytest.mark.parametrize("num_busy", [0, 5, 10, 20])
def test_a_planted_share_comes_back(num_busy: int) -> None:
    """So many of twenty layers have kernels that hide the host; the device then catches up."""
    play = Play(LAUNCH_BOUND)
    with play.step() as log, play.phase(FORWARD):
        for number in range(20):
            play.costs = COMPUTE_BOUND if number < num_busy else LAUNCH_BOUND
            play.layer()
            play.clock.synchronize()
    records = list(Attribution(log).records())
    waited_s = (20 - num_busy) * 12 * (LAUNCH_BOUND.call_s + LAUNCH_S)
    busy_s = num_busy * 12 * COMPUTE_BOUND.kernel_s
    assert share(records) == pytest.approx(waited_s / (waited_s + busy_s), abs=0.03)


@pytest.mark.parametrize("before_s", [0.0, 2e-6, 5e-6])
@pytest.mark.parametrize("after_s", [0.0, 5e-6, 15e-6])
def test_time_of_our_hooks_is_no_operators(before_s: float, after_s: float) -> None:
    """A layer with nested operators paid 5 to 10 us for each of their marks."""
    costs = replace(LAUNCH_BOUND, before_mark_s=before_s, after_end_s=after_s)
    hooked, bare = play_step(costs, backward=costs), play_step(LAUNCH_BOUND, backward=LAUNCH_BOUND)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for site, result in operators(hooked.records, phase).items():
            true = operators(bare.records, phase)[site]
            # The first begins before anything is queued.
            for record, without in zip(result[1:], true[1:], strict=True):
                apart_ns = abs(record.duration_ns - without.duration_ns)
                assert apart_ns <= NEAR_FRAC * without.duration_ns + NEAR_NS
    planted_ns = 5 * 20 * (2 * before_s + after_s) * 1e9
    hooks, none = (
        next(r for r in play.records if isinstance(r, PhaseRecord)) for play in (hooked, bare)
    )
    assert abs(hooks.hook_ns - planted_ns) <= NEAR_FRAC * planted_ns + 10_000
    assert abs(hooks.duration_ns - hooks.hook_ns - none.duration_ns) <= 10_000


@pytest.mark.parametrize("kernel_s", [30e-6, 100e-6, 1e-3])
def test_a_device_that_never_catches_up_waits_for_nobody(kernel_s: float) -> None:
    """With equal kernels a full queue lags equally at every mark, which must not read as no lag.

    The host waits for room in the queue, and so for the device.
    """
    play = Play(Costs(call_s=1e-6, kernel_s=kernel_s))
    for _ in range(MAX_IN_FLIGHT + 100):
        play.clock.launch(play.device.line, kernel_s)
    with play.step() as log, play.phase(FORWARD):
        for _ in range(100):
            play.operator(LINEAR, 1)
    assert log.issued is not None and log.issued.late > 0
    assert min(lags_of(log)) > 100 * CAUGHT_UP_NS
    records = list(Attribution(log).records())
    assert share(records) == 0.0
    for record in operators(records, Phase.FORWARD)[LINEAR]:
        assert abs(record.duration_ns - kernel_s * 1e9) <= 100


@pytest.mark.parametrize("drift_frac", [-8e-5, 8e-5])
def test_clocks_that_run_apart_hide_nothing(drift_frac: float) -> None:
    """0.8 ms in a step of 10 s: forty times what a launch may take."""
    play = Play(replace(LAUNCH_BOUND, call_s=3e-3), drift_frac=drift_frac)
    with play.step() as log, play.phase(FORWARD):
        for _ in range(300):
            play.layer()
    assert play.clock.host_s > 10
    assert share(list(Attribution(log).records())) > 0.99


def test_waiting_for_a_transfer_is_no_waiting_for_the_host() -> None:
    """The step's stream stands still for another one, and falls behind."""
    play = Play(LAUNCH_BOUND)
    side = play.clock.line()
    with play.step() as log, play.phase(FORWARD):
        play.layer()
        _, end_s = play.clock.launch(side, 0.05)
        play.clock.stall(play.device.line, end_s, side)
        play.operator(LINEAR, 2)
        play.operator(LINEAR, 2)
        assert not lags_of(log)  # nothing has been read yet
    result = operators(list(Attribution(log).records()), Phase.FORWARD)[LINEAR]
    assert [r.host_bound_ns > 0 for r in result] == [True, True, True, False, False]
    lags = lags_of(log)
    assert max(lags) == pytest.approx(0.05e9, rel=0.02)


def test_marks_without_a_time_have_no_lag() -> None:
    play = Play(LAUNCH_BOUND)
    with play.step() as log, play.phase(FORWARD):
        play.operator(LINEAR, 2)
        play.is_capturing = True
        play.operator(LINEAR, 2)
        play.is_capturing = False
        play.operator(LINEAR, 2)
    lags = lags_of(log)
    assert [lag == NO_TIME for lag in lags] == [mark == NO_TIME for mark in log.marks]
    result = operators(list(Attribution(log).records()), Phase.FORWARD)[LINEAR]
    assert len(result) == 2 and all(r.host_bound_ns == r.duration_ns for r in result)


@example([(1, 5e-4), (3, 3e-4)], [2.57e-4, 2.9e-4])  # the share of both together falls
@given(
    st.lists(st.tuples(st.integers(1, 8), st.floats(1e-6, 5e-4)), min_size=1, max_size=12),
    st.lists(st.floats(0.0, 3e-4), min_size=2, max_size=5),
)
def test_waiting_is_within_each_operator_and_rises_with_the_hosts_cost(
    work: list[tuple[int, float]], calls_s: list[float]
) -> None:
    """The waiting of each operator, not of their sum, rises: if a kernel hides the host, its
    operator too takes longer with a slower host."""
    waited = []
    for call_s in sorted(calls_s):
        play = Play(Costs(call_s=call_s, kernel_s=0.0))
        with play.step() as log, play.phase(FORWARD):
            for num_calls, kernel_s in work:
                play.costs = Costs(call_s=call_s, kernel_s=kernel_s)
                play.operator(LINEAR, num_calls)
                play.clock.synchronize()
        records = list(Attribution(log).records())
        result = operators(records, Phase.FORWARD)[LINEAR]
        assert all(0 <= record.host_bound_ns <= record.duration_ns for record in result)
        assert 0.0 <= share(records) <= 1.0
        waited.append([record.host_bound_ns for record in result])
    for before, after in pairwise(waited):
        # Times are whole nanoseconds, and events have half a microsecond.
        assert all(b >= a - 1_000 for a, b in zip(before, after, strict=True))
