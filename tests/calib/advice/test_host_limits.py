"""Only what can be followed: layouts that the program of a run has no words for are not offered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from every_layout import best_of_every, row
from planted_steps import steps_of

from forerun.calib.advice.planning import Plan, exclusion_reason, plan
from forerun.calib.arguments.megatron_args import rewrite_command
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.arguments.taken_options import TRANSFORMER_ENGINE, unsupported_options_reason
from forerun.calib.search.results import Effort, MemoryBudget
from forerun.calib.steps.model import FittedSteps
from forerun.calib.workload.config import Precision, RunConfig

Layout = Callable[..., RunConfig]
LACKS = {
    "an axis": ("--pipeline-model-parallel-size",),
    "a split": ("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"),
    "modules": ("--recompute-modules",),
    "layers": ("--recompute-method",),
    "all recompute": ("--recompute-granularity", "--recompute-modules", "--recompute-method"),
    "states": ("--use-distributed-optimizer", "--optimizer-cpu-offload"),
    "overlap": ("--overlap-param-gather", "--use-megatron-fsdp"),
    "the batch": ("--micro-batch-size", "--context-parallel-size"),
    "a library": (TRANSFORMER_ENGINE,),
}


def running_with(layout: Layout, *absent: str) -> RunConfig:
    """Small micro-batches over tp, with two nodes."""
    settings: dict[str, Any] = {"precision": Precision.BF16, "device": "NVIDIA H100"}
    par = {"ranks_per_node": 4}
    return layout(tp=2, dp=4, micro=1, par=par, program="t.py", absent=absent, **settings)


@cache
def model(planted: Callable[..., Any]) -> FittedSteps:
    return steps_of(planted())


@cache
def free_plan(layout: Layout, planted: Callable[..., Any]) -> Plan:
    """Return the plan of a program that has all options."""
    return plan(running_with(layout), model(planted))


@pytest.mark.parametrize("absent", LACKS.values(), ids=LACKS)
def test_no_row_is_asked_for_by_what_is_absent(
    layout: Layout, planted: Callable[..., Any], absent: tuple[str, ...]
) -> None:
    running = running_with(layout, *absent)
    result = plan(running, steps_of(planted()), budget=MemoryBudget(capacity_nbytes=10**13))
    assert result.best is not None
    for one in result.candidates:
        assert not unsupported_options_reason(one.config, running)
        assert not {*rewrite_command((), one.config, running=running)} & {*absent}


@pytest.mark.slow
@pytest.mark.parametrize("absent", LACKS.values(), ids=LACKS)
def test_the_rows_are_the_best_that_can_be_followed(
    layout: Layout, planted: Callable[..., Any], absent: tuple[str, ...]
) -> None:
    """Every layout of the free space is asked, one by one, whether it can be."""
    running = running_with(layout, *absent)
    steps, top = model(planted), 12
    result = plan(running, steps, effort=Effort(top=top))

    class Askable(LayoutConstraint):
        def allows(self, config: RunConfig) -> bool:
            return not unsupported_options_reason(config, running)

    free = replace(running, absent=())
    wanted = best_of_every(free, steps, 8, MemoryBudget(), top, Askable())
    times = [one.step_time_s for one in result.candidates]
    assert times == pytest.approx([time_s for time_s, _ in wanted], rel=1e-6)
    # Layouts of equal time may come in either order.
    last = times[-1] * (1 - 1e-6)
    assert {row(c.config) for c in result.candidates if c.step_time_s < last} == {
        row(config) for time_s, config in wanted if time_s < last
    }


@pytest.mark.parametrize("absent", LACKS.values(), ids=LACKS)
def test_what_is_left_out_is_counted_with_its_reason(
    layout: Layout, planted: Callable[..., Any], absent: tuple[str, ...]
) -> None:
    running = running_with(layout, *absent)
    free, bound = free_plan(layout, planted), plan(running, model(planted))
    reason = exclusion_reason(running)
    assert all(option in reason for option in absent if option.startswith("--"))
    cut = bound.tried[8].cut[reason]
    assert cut > 0 and cut + bound.tried[8].num_layouts == free.num_layouts
    assert exclusion_reason(replace(running, absent=())) == ""


def test_what_is_asked_for_all_the_same_is_told_and_not_offered(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    running = running_with(layout, "--pipeline-model-parallel-size")
    result = plan(running, steps_of(planted()), keep=LayoutConstraint.parse("pp=2"))
    assert result.candidates and result.best is None
    assert "t.py takes no --pipeline-model-parallel-size" in result.nearest_miss


def test_a_loop_of_ones_own_has_no_options_to_lack(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    running = replace(running_with(layout, "--micro-batch-size"), framework="PyTorch 2.8")
    assert exclusion_reason(running) == ""
    free, bound = (plan(one, steps_of(planted())) for one in (replace(running, absent=()), running))
    assert [one.config for one in bound.candidates] == [one.config for one in free.candidates]
