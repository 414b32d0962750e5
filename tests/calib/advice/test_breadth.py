"""How sharp a plan is, on machines where one choice matters and another cannot."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from planted_steps import steps_of

from forerun.calib.advice.alternatives import NUM_NEXT, Breadth, breadth
from forerun.calib.advice.named_layouts import named_layout
from forerun.calib.advice.planning import Plan, plan
from forerun.calib.memory.peak import Verdict, memory, verdict
from forerun.calib.regressors.robust import Z_90
from forerun.calib.steps.estimate import paired_sigma_log
from forerun.calib.steps.model import FittedSteps
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.operators import OperatorKind

Layout = Callable[..., RunConfig]
AMPLE_NBYTES = 10**13


def plan_and_breadth(
    config: RunConfig, steps: FittedSteps, capacity_nbytes: int = AMPLE_NBYTES
) -> tuple[Plan, Breadth]:
    result = plan(config, steps, memory_capacity_nbytes=capacity_nbytes)
    plan_breadth = breadth(result, steps)
    assert plan_breadth is not None
    return result, plan_breadth


def cost_by_axis(plan_breadth: Breadth) -> dict[str, float]:
    return {axis.axis: axis.cost_frac for axis in plan_breadth.axes}


def test_the_next_are_those_of_the_plan(layout: Layout, planted: Callable[..., Any]) -> None:
    config = layout(tp=4, dp=2, micro=1)
    steps = steps_of(planted())
    plan, plan_breadth = plan_and_breadth(config, steps)
    ranked = sorted((plan.running, *plan.candidates), key=lambda c: c.step_time_s)
    assert plan_breadth.first == ranked[0].label
    times = [c.step_time_s / ranked[0].step_time_s - 1 for c in ranked[1 : NUM_NEXT + 1]]
    assert plan_breadth.next_slower_frac == pytest.approx(times)
    best, *others = steps.estimates([c.config for c in ranked[: NUM_NEXT + 1]])
    alike = [
        math.log(one.time_s / best.time_s) <= Z_90 * paired_sigma_log(one, best) for one in others
    ]
    assert plan_breadth.num_indistinguishable == sum(alike)
    json.dumps(plan_breadth.to_json(), allow_nan=False)


def test_where_a_launch_costs_everything_the_micro_batch_matters(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Each operator takes the same whatever its size: half the micro-batches, half the time."""
    steps = steps_of(
        planted(launch_s=1e-3, flop_per_s=math.inf, bytes_per_s=math.inf, latency_s=0.0)
    )
    _, plan_breadth = plan_and_breadth(layout(samples=64), steps)
    costs = cost_by_axis(plan_breadth)
    assert costs["mbs"] == max(costs.values()) > 0.5
    mbs = next(axis for axis in plan_breadth.axes if axis.axis == "mbs")
    assert mbs.matters and "matters: mbs 64 (else +" in plan_breadth.text


def test_where_transfers_cost_nothing_replicas_and_tp_are_alike(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Products are all that costs, and tp splits them as dp does."""
    kinds = OperatorKind
    free = dict.fromkeys(
        (
            *(kinds.NORM, kinds.OPTIMIZER, kinds.HOST_STEP, kinds.HOST_MICROBATCH),
            *(kinds.EMBEDDING, kinds.RESIDUAL, kinds.LOSS, kinds.CORE_ATTENTION, kinds.ACTIVATION),
        ),
        0.0,
    )
    model = {"num_layers": 4}
    steps = steps_of(planted(kinds=free, launch_s=0.0, latency_s=0.0, bytes_per_s=math.inf))
    _, plan_breadth = plan_and_breadth(layout(dp=4, samples=16, model=model), steps)
    costs = cost_by_axis(plan_breadth)
    assert costs["tp"] == pytest.approx(0.0, abs=1e-6)
    assert costs["pp"] > 0.05
    axes = {axis.axis: axis for axis in plan_breadth.axes}
    assert axes["pp"].matters and not axes["tp"].matters
    assert {"1", "2", "4"} == set(axes["tp"].alike)
    assert "does not matter: tp" in plan_breadth.text


def test_a_value_is_held_at_its_fastest_layout_and_costs_are_ordered(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    plan, plan_breadth = plan_and_breadth(
        layout(tp=4, dp=2, micro=1, samples=32), steps_of(planted())
    )
    fitting = [c for c in plan.candidates if c.verdict is not Verdict.DOES_NOT_FIT]
    costs = [axis.cost_frac for axis in plan_breadth.axes]
    assert costs == sorted(costs, reverse=True)
    for axis in plan_breadth.axes:
        slower = [choice.slower_frac for choice in axis.choices]
        assert slower == sorted(slower) and slower[0] == pytest.approx(0.0, abs=1e-9)
        assert len({choice.value for choice in axis.choices}) == len(axis.choices)
    tp = next(axis for axis in plan_breadth.axes if axis.axis == "tp")
    for choice in tp.choices:
        at_most_s = min(
            (c.step_time_s for c in fitting if str(c.config.parallelism.tp) == choice.value),
            default=math.inf,
        )
        assert choice.step_time_s <= at_most_s * (1 + 1e-9)


def test_what_does_not_fit_is_no_choice(layout: Layout, planted: Callable[..., Any]) -> None:
    config = layout(tp=4, dp=2, micro=1, samples=32)
    steps = steps_of(planted())
    result = plan(config, steps, memory_capacity_nbytes=AMPLE_NBYTES)
    needed = sorted(c.memory.total_nbytes for c in result.candidates)
    small, plan_breadth = plan_and_breadth(
        config, steps, capacity_nbytes=int(needed[len(needed) // 3])
    )
    fits = {
        c.label for c in (small.running, *small.candidates) if c.verdict is not Verdict.DOES_NOT_FIT
    }
    assert plan_breadth.first in fits
    assert breadth(plan(config, steps, memory_capacity_nbytes=1), steps) is None


@pytest.mark.slow
@pytest.mark.parametrize("offset_nbytes", [0, 20_000])
def test_what_a_search_would_not_take_for_fitting_is_no_choice_either(
    layout: Layout, planted: Callable[..., Any], offset_nbytes: int
) -> None:
    """Every choice is a layout that is likelier to fit than not, whatever the room."""
    config, steps = layout(tp=4, dp=2, micro=1, samples=32), steps_of(planted())
    needed = [c.memory.total_nbytes for c in plan(config, steps).candidates]
    low, high = min(needed) // 2, max(needed)
    for capacity in range(low, high, (high - low) // 8):
        memory_limits: dict[str, Any] = {
            "memory_capacity_nbytes": capacity,
            "memory_offset_nbytes": offset_nbytes,
        }
        plan_breadth = breadth(plan(config, steps, **memory_limits), steps)
        for choice in (
            one for axis in (plan_breadth.axes if plan_breadth else ()) for one in axis.choices
        ):
            estimate = memory(named_layout(choice.label, config), offset_nbytes=offset_nbytes)
            result = verdict(estimate, capacity, is_calibrated=True)
            assert result is not Verdict.DOES_NOT_FIT, (capacity, choice.label)


@pytest.mark.parametrize(
    ("device", "values"), [("cpu", set[str]()), ("NVIDIA H100 80GB HBM3", {"1", "2"})]
)
def test_nothing_is_split_over_more_context_on_a_cpu(
    layout: Layout, planted: Callable[..., Any], device: str, values: set[str]
) -> None:
    _, plan_breadth = plan_and_breadth(layout(dp=4, device=device), steps_of(planted()))
    results = {one.value for axis in plan_breadth.axes if axis.axis == "cp" for one in axis.choices}
    assert values <= results and bool(values) == bool(results)
