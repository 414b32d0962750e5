"""States under DeepSpeed's ZeRO, against closed forms of its paper and of its own estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_tensors import parameters
from tiny_shape import run_of

from forerun.calib.importers.canonical_steps import with_split_columns
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.memory.peak import MemoryEstimate, memory
from forerun.calib.memory.states import LIVE_NUMEL, REDUCE_BUCKET_NUMEL, SUB_GROUP_NUMEL
from forerun.calib.workload.config import Engine, Parallelism, Precision, Recompute, RunConfig

Layout = Callable[..., RunConfig]
WORKSPACES = 2 * 32 * 2**20


def staged(config: RunConfig, stage: int) -> RunConfig:
    """The layout as a table with a column ``zero_stage`` would give it."""
    par = replace(config.parallelism, engine=Engine.DEEPSPEED)
    layout = with_split_columns(par, lambda *names: str(stage) if "zero_stage" in names else "")
    return replace(config, parallelism=layout)


def deepspeed(stage: int, ranks: int, micro: int = 16, **changes: Any) -> RunConfig:
    """In fp16, where gradients have 16 bits as well."""
    config = run_of(
        dp=ranks, micro=micro, samples=micro * ranks, device="V100", precision=Precision.FP16
    )
    return staged(replace(config, reduces_grads_in_bf16=True, **changes), stage)


def states(estimate: MemoryEstimate) -> int:
    return estimate.weights_nbytes + estimate.grads_nbytes + estimate.optimizer_nbytes


PSI = parameters(run_of(), 0)
DEEP = replace(
    run_of().model, num_layers=1500, hidden_size=512, ffn_hidden_size=1024, kv_channels=128
)


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("stage", "fixed", "shared"), [(0, 4 + 12, 0), (1, 4, 12), (2, 2, 2 + 12), (3, 0, 4 + 12)]
)
def test_each_stage_has_the_closed_form_of_the_paper(
    stage: int, fixed: int, shared: int, ranks: int
) -> None:
    """Rajbhandari et al. 2020, section 5, with K = 12: 4 psi + K psi / N, 2 psi + (2 + K) psi / N,
    (4 + K) psi / N."""
    number = states(memory(deepspeed(stage, ranks)))
    assert number == pytest.approx(PSI * (fixed + shared / ranks), rel=1e-5)


def test_the_update_makes_gradients_in_fp32_as_the_estimator_of_deepspeed_says() -> None:
    """``estimate_zero2_model_states_mem_needs`` has 2 psi + 18 psi / N; here the passes hold less
    than those gradients.  ZeRO-3 makes them of one group of parameters at a time."""
    psi = parameters(replace(run_of(), model=DEEP), 0)
    estimates_nbytes = []
    for stage in (2, 3):
        config = deepspeed(stage, 2, micro=1, model=DEEP, recompute=Recompute.FULL)
        estimates_nbytes.append(memory(config).allocated_nbytes - WORKSPACES)
    assert psi / 2 > SUB_GROUP_NUMEL
    assert estimates_nbytes[0] == pytest.approx(2 * psi + 18 * psi / 2, rel=1e-6)
    assert estimates_nbytes[1] == pytest.approx(16 * psi / 2 + 4 * SUB_GROUP_NUMEL, rel=1e-6)


@given(ranks=st.sampled_from([2, 8, 16]), instances=st.sampled_from([1, 2]))
def test_shards_of_all_ranks_are_one_whole_and_no_stage_has_more(
    ranks: int, instances: int
) -> None:
    results = []
    for stage in range(4):
        config = deepspeed(stage, ranks)
        copies = replace(config.parallelism, num_optimizer_instances=instances)
        results.append(memory(replace(config, parallelism=copies)))
    for before, after in pairwise(results):
        assert after.weights_nbytes <= before.weights_nbytes
        assert after.grads_nbytes <= before.grads_nbytes
        assert after.optimizer_nbytes <= before.optimizer_nbytes
    assert ranks * states(results[3]) == pytest.approx(16 * PSI * instances, rel=1e-5)
    assert ranks * results[1].optimizer_nbytes == pytest.approx(12 * PSI * instances, rel=1e-5)


def test_buckets_are_as_large_as_deepspeed_makes_them() -> None:
    """``reduce_bucket_size`` elements, twice where reduction overlaps outside a pipeline."""
    plain = memory(deepspeed(0, 4)).scratch_nbytes
    one = memory(deepspeed(1, 4))
    assert one.scratch_nbytes - plain == 2 * REDUCE_BUCKET_NUMEL
    config = deepspeed(2, 4)
    overlapped = replace(config.parallelism, overlaps_grad_reduce=True)
    both = memory(replace(config, parallelism=overlapped))
    assert both.scratch_nbytes - plain == 2 * 2 * REDUCE_BUCKET_NUMEL
    stated = replace(config.parallelism, bucket_numel=1000)
    assert memory(replace(config, parallelism=stated)).scratch_nbytes - plain == 2 * 1000


def test_no_more_is_gathered_than_may_live() -> None:
    """``stage3_max_live_parameters``: of a small model all, of a large one a thousand million."""
    small = deepspeed(3, 4)
    plain = memory(deepspeed(0, 4)).scratch_nbytes + 2 * REDUCE_BUCKET_NUMEL
    gathered = memory(small).scratch_nbytes - plain
    # The loss is the fullest moment of the small one, where there is no gradient yet.
    assert gathered == 2 * PSI
    large = memory(replace(small, model=DEEP, recompute=Recompute.FULL)).scratch_nbytes - plain
    assert parameters(replace(run_of(), model=DEEP), 0) > LIVE_NUMEL
    wide = block(replace(small, model=DEEP), BlockKind.LAYER).numel.dense
    assert large == 2 * LIVE_NUMEL + 2 * wide


def test_engines_of_others_have_no_buckets_of_deepspeed(layout: Layout) -> None:
    par = Parallelism(dp=4, is_optimizer_distributed=True)
    config = replace(layout(dp=4, precision=Precision.BF16), parallelism=par)
    other = replace(config, parallelism=replace(par, bucket_numel=10**6))
    assert memory(config).scratch_nbytes == memory(other).scratch_nbytes
