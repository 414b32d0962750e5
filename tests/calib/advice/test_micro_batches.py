"""Micro-batches that a run could take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.calib.advice.remedies import micro_batches
from forerun.calib.workload.config import RunConfig

Layout = Callable[..., RunConfig]


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
