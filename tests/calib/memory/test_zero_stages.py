"""States at each stage of ZeRO, against the closed forms of its paper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_tensors import parameters
from tiny_shape import run_of

from forerun.calib.memory.peak import MemoryEstimate, memory
from forerun.calib.workload.config import Precision, RunConfig, Sharding

STAGES = (Sharding.NONE, Sharding.OPTIMIZER, Sharding.GRADS, Sharding.WEIGHTS)


def staged(stage: int, ranks: int) -> RunConfig:
    """In fp16, where gradients have 16 bits as well."""
    config = run_of(dp=ranks, samples=16 * ranks, device="V100", precision=Precision.FP16, micro=16)
    sharding = {"is_optimizer_distributed": stage > 0, "sharding": STAGES[stage]}
    par = replace(config.parallelism, **sharding)
    return replace(config, reduces_grads_in_bf16=True, parallelism=par)


def states(estimate: MemoryEstimate) -> int:
    return estimate.weights_nbytes + estimate.grads_nbytes + estimate.optimizer_nbytes


PSI = parameters(run_of(), 0)


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize(
    ("stage", "fixed", "shared"), [(0, 4 + 12, 0), (1, 4, 12), (2, 2, 2 + 12), (3, 0, 4 + 12)]
)
def test_each_stage_has_the_closed_form_of_the_paper(
    stage: int, fixed: int, shared: int, ranks: int
) -> None:
    """Rajbhandari et al. 2020, section 5, with K = 12: 4 psi + K psi / N, 2 psi + (2 + K) psi / N,
    (4 + K) psi / N."""
    number = states(memory(staged(stage, ranks)))
    assert number == pytest.approx(PSI * (fixed + shared / ranks), rel=1e-5)


@given(ranks=st.sampled_from([2, 8, 16]), instances=st.sampled_from([1, 2]))
def test_shards_of_all_ranks_are_one_whole_and_no_stage_has_more(
    ranks: int, instances: int
) -> None:
    results = []
    for stage in range(4):
        config = staged(stage, ranks)
        copies = replace(config.parallelism, num_optimizer_instances=instances)
        results.append(memory(replace(config, parallelism=copies)))
    for before, after in pairwise(results):
        assert after.weights_nbytes <= before.weights_nbytes
        assert after.grads_nbytes <= before.grads_nbytes
        assert after.optimizer_nbytes <= before.optimizer_nbytes
    assert ranks * states(results[3]) == pytest.approx(16 * PSI * instances, rel=1e-5)
    assert ranks * results[1].optimizer_nbytes == pytest.approx(12 * PSI * instances, rel=1e-5)
