"""Scaling against closed forms: machines whose step is work over GPUs plus what does not divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.planning import compare, plan
from forerun.calib.advice.scaling import KNEE_SHARE, Growth, Scaling, best_on, compute_scaling
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.search.results import MemoryBudget
from forerun.calib.steps.model import FittedSteps
from forerun.calib.timeline.items import Part
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.operators import OperatorKind

COUNTS = (1, 2, 4, 8, 16, 32, 64)
EXACT = 1e-9
"""The planted times are sums and quotients."""


@pytest.fixture
def machine(planted: Callable[..., Any]) -> Callable[..., FittedSteps]:
    """Work that divides over replicas without a rest, ``serial_s`` of every step that does not, and
    messages at ``bytes_per_s``."""

    def make(serial_s: float = 0.0, bytes_per_s: float = 1e30, **more: Any) -> FittedSteps:
        free = dict.fromkeys((OperatorKind.OPTIMIZER, OperatorKind.HOST_MICROBATCH), 0.0)
        estimator = planted(
            launch_s=0.0,
            latency_s=0.0,
            bytes_per_s=bytes_per_s,
            kinds=free | {OperatorKind.HOST_STEP: serial_s},
            **more,
        )
        return steps_of(estimator)

    return make


def replicated(
    steps: FittedSteps,
    layout: Callable[..., RunConfig],
    counts: Sequence[int] = COUNTS,
    *,
    samples_per_rank: int = 0,
) -> Scaling:
    """The curve of one layout on each number of ranks: replicas alone."""
    configs = [
        layout(dp=num, samples=samples_per_rank * num or COUNTS[-1], micro=1) for num in counts
    ]
    return compute_scaling(compare(configs[0], configs, steps))


def grown(growth: Growth) -> list[Part]:
    """Parts with more GPU time per token than before, the largest growth first."""
    parts = [part for part, frac in growth.parts_frac.items() if frac >= 0.005]
    return sorted(parts, key=lambda part: -growth.parts_frac[part])


def test_work_that_divides_keeps_its_efficiency(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    scaling = replicated(machine(), layout)
    assert [point.num_ranks for point in scaling.points] == list(COUNTS)
    for point in scaling.points:
        assert point.efficiency.median == pytest.approx(1.0, rel=EXACT)
        assert point.efficiency.low <= 1.0 <= point.efficiency.high
    for growth in scaling.growths:
        assert growth.yields["yield_share"] == pytest.approx(1.0, rel=EXACT)
        assert grown(growth) == []
    assert scaling.knee.num_ranks is None
    assert scaling.knee.high_num_ranks is None
    rates = [point.tokens_per_s.median for point in scaling.points]
    assert rates == pytest.approx([rates[0] * num for num in COUNTS])


@pytest.mark.parametrize("knee", [1, 4, 16])
def test_a_serial_part_gives_amdahls_curve_and_its_knee(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig], knee: int
) -> None:
    config = layout(samples=64, micro=1)
    work_s = machine().estimate(config).time_s
    # From N to 2 N tokens/s grow by less than sqrt(2) from N = work / serial / sqrt(2) on; half a
    # doubling before the number that is to be the knee.
    serial_s = work_s / math.sqrt(2) / (knee / math.sqrt(2))
    scaling = replicated(machine(serial_s), layout)
    for point in scaling.points:
        amdahl = (serial_s + work_s) / (serial_s * point.num_ranks + work_s)
        assert point.efficiency.median == pytest.approx(amdahl, rel=EXACT)
    assert scaling.knee.num_ranks == knee
    for growth in scaling.growths:
        before, after = (serial_s + work_s / one.num_ranks for one in (growth.before, growth.after))
        assert growth.yields["yield_share"] == pytest.approx(math.log2(before / after), rel=EXACT)
        assert growth.tokens.median == pytest.approx(before / after, rel=EXACT)
        assert grown(growth) == [Part.HOST]
        total = growth.before.efficiency.median / growth.after.efficiency.median - 1
        assert sum(growth.parts_frac.values()) == pytest.approx(total, rel=EXACT)


def test_a_device_of_half_the_speed_is_half_of_the_other(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    one = replicated(machine(), layout)
    other = replicated(machine(flop_per_s=0.5e10), layout)
    for fast, slow in zip(one.points, other.points, strict=True):
        ratio = slow.tokens_per_s.ratio_to(fast.tokens_per_s)
        back = fast.tokens_per_s.ratio_to(slow.tokens_per_s)
        assert ratio.median == pytest.approx(0.5, rel=EXACT)
        assert ratio.low < ratio.median < ratio.high
        ends = (1 / ratio.median, 1 / ratio.high, 1 / ratio.low)
        assert (back.median, back.low, back.high) == pytest.approx(ends, rel=EXACT)


def test_messages_that_grow_bend_the_curve_by_their_own_name(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    scaling = replicated(machine(bytes_per_s=3e7), layout, (2, 4, 8, 16))
    assert all(grown(growth)[0] is Part.DP for growth in scaling.growths)
    rates = [growth.yields["yield_share"] for growth in scaling.growths]
    assert rates == sorted(rates, reverse=True)


def test_a_batch_that_grows_hides_what_is_paid_once_in_a_step(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    scaling = replicated(machine(0.05), layout, samples_per_rank=2)
    assert scaling.is_weak
    assert [one.config.batch.global_batch_size for one in scaling.points] == [2 * n for n in COUNTS]
    for point in scaling.points:
        assert point.efficiency.median == pytest.approx(1.0, rel=EXACT)
    assert not replicated(machine(0.05), layout).is_weak


def test_intervals_hold_the_knee_and_say_where_they_cannot_be_trusted(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    sure = replicated(machine(0.02, sigma_log=0.01), layout)
    unsure = replicated(machine(0.02, sigma_log=1.0), layout)
    # Work alone is known; the serial part has the width of its own prior.
    assert sure.points[0].is_trusted
    assert not unsure.points[0].is_trusted
    for scaling in (sure, unsure):
        knee = scaling.knee
        assert knee.num_ranks is not None
        assert knee.low_num_ranks is not None
        assert knee.low_num_ranks <= knee.num_ranks <= (knee.high_num_ranks or COUNTS[-1])
        for one in scaling.growths:
            share, low, high = one.yields.values()
            assert low <= share <= high
            assert (one.past_knee_probability > 0.5) is (share < KNEE_SHARE)


def test_the_best_layout_of_each_plan_is_taken_and_those_that_do_not_fit_are_named(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    steps, config = machine(0.01), layout(samples=16, micro=1)

    plans = {
        num: plan(
            config,
            steps,
            num_ranks=num,
            budget=MemoryBudget(capacity_nbytes=1 if num == 1 else 10**13),
        )
        for num in (4, 2, 1)
    }
    assert best_on(1, plans[1]) is None
    assert best_on(2, plans[4]) is None
    chosen = [best_on(num, plans[num]) for num in (2, 4)]
    scaling = compute_scaling([one for one in chosen if one is not None])
    assert [point.num_ranks for point in scaling.points] == [2, 4]
    for point in scaling.points:
        fastest_plan = plans[point.num_ranks]
        times = [one.step_time_s for one in fastest_plan.candidates]
        assert point.candidate.time_s == pytest.approx(min(times))


def test_the_running_layout_is_the_best_only_where_it_is_asked_for(
    machine: Callable[..., FittedSteps], layout: Callable[..., RunConfig]
) -> None:
    result = plan(
        layout(samples=16, micro=1), machine(0.01), budget=MemoryBudget(capacity_nbytes=10**13)
    )
    fastest = replace(result, running=replace(result.running, median=0.0))
    assert best_on(1, fastest) == fastest.running
    other = best_on(1, fastest, LayoutConstraint.parse("mbs=2"))
    assert other is not None
    assert other.config.batch.micro_batch_size == 2
