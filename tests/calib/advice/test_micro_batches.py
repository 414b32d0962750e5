"""Micro-batches that a run could take, and those of them that memory allows in its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from planted_steps import steps_of

from forerun.calib.advice.planning import Plan, plan
from forerun.calib.advice.remedies import micro_batches
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.memory.peak import Verdict, memory
from forerun.calib.search.results import MemoryBudget
from forerun.calib.workload.config import Recompute, RunConfig

Layout = Callable[..., RunConfig]
KEEP = LayoutConstraint.parse("tp=1,pp=1,cp=1,sharding=none")


def test_a_micro_batch_divides_every_batch_of_a_ramp(layout: Layout) -> None:
    config = layout(dp=2, micro=2, samples=16)
    cadence = replace(config.cadence, train_iters=100, rampup_batch_size=(4, 4, 64))
    ramped = replace(config, cadence=cadence)
    assert {one.batch.micro_batch_size for one in micro_batches(ramped)} == {1, 2}


def test_virtual_stages_keep_whole_groups_and_all_else_stays(layout: Layout) -> None:
    running = layout(tp=2, pp=2, dp=2, samples=32, par={"vp": 2, "is_optimizer_distributed": True})
    configs = micro_batches(running)
    assert len(configs) > 2
    for one in configs:
        assert replace(one, batch=running.batch) == running and one.num_microbatches % 2 == 0


def planned(running: RunConfig, planted: Callable[..., Any], capacity_frac: float) -> Plan:
    """The plan where so many times the memory of the running layout is there."""
    capacity_nbytes = round(capacity_frac * memory(running).total_nbytes)
    steps = steps_of(planted())
    return plan(running, steps, budget=MemoryBudget(capacity_nbytes=capacity_nbytes), keep=KEEP)


def test_room_makes_the_best_faster_and_ends_recompute(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """One sample at a time, all computed again, and long samples."""
    model = {"num_layers": 16, "hidden_size": 512, "ffn_hidden_size": 2048, "seq_length": 8192}
    model |= {"num_attention_heads": 8, "num_query_groups": 8}
    device = "NVIDIA A100-SXM4-80GB"
    running = layout(dp=2, micro=1, recompute=Recompute.FULL, device=device, model=model)
    times_s = []
    for capacity_frac in (1.1, 1.5, 2.0, 4.0, 20.0):
        rows = planned(running, planted, capacity_frac).rows.values()
        able = [one for one in rows if one.verdict is not Verdict.DOES_NOT_FIT]
        times_s.append(min(one.step_time_s for one in able))
    assert all(before >= after for before, after in pairwise(times_s))
    assert times_s[-1] < times_s[0]
    roomy = planned(running, planted, 20.0).candidates
    assert {one.config.batch.micro_batch_size for one in roomy} == {1, 2, 4, 8}
    best = {one.config.batch.micro_batch_size: one for one in reversed(roomy)}
    assert all(one.config.recompute is Recompute.NONE for one in best.values())
