"""Weights, gradients and optimizer states under sharding, narrow types and offload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from stage_tensors import parameters

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig, Sharding

Layout = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("sharding", "nbytes"),
    [
        (Sharding.OPTIMIZER, 2 + 4 + 12 / 4),
        (Sharding.GRADS, 2 + 4 / 4 + 12 / 4),
        (Sharding.WEIGHTS, 18 / 4),
    ],
)
def test_each_stage_of_zero_splits_what_it_says(
    layout: Layout, sharding: Sharding, nbytes: float
) -> None:
    """Rajbhandari et al. 2020, figure 1: 16 bytes there, 18 with Megatron's fp32 gradients."""
    par = {"is_optimizer_distributed": True, "sharding": sharding}
    result = memory(layout(dp=4, precision=Precision.BF16, par=par))
    state = result.weights_nbytes + result.grads_nbytes + result.optimizer_nbytes
    assert state == pytest.approx(nbytes * parameters(layout(), 0), rel=1e-6)


def test_layers_in_flight_do_not_grow_with_the_model_and_kept_ones_do(layout: Layout) -> None:
    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}

    def scratch(num_layers: int, **more: bool) -> float:
        model = {"num_layers": num_layers}
        config = layout(dp=4, precision=Precision.BF16, model=model, par={**par, **more})
        return memory(config).scratch_nbytes

    assert scratch(8) == scratch(4) > 0
    more = scratch(16, regathers_weights=False) - scratch(8, regathers_weights=False)
    each = block(layout(), BlockKind.LAYER).numel.dense
    assert more == 8 * each * 2


def test_narrow_and_offloaded_states_take_what_is_left_of_them(layout: Layout) -> None:
    plain = layout(precision=Precision.BF16)
    whole = memory(plain).optimizer_nbytes
    narrow = replace(plain, optimizer_state_nbytes=6)
    assert memory(narrow).optimizer_nbytes == whole / 2
    half = replace(plain, optimizer_offload_frac=0.5)
    assert memory(half).optimizer_nbytes == whole / 2


@pytest.mark.parametrize(
    ("num_ranks", "published_gib"),
    # torchtitan, Llama 3.1 8B under FSDP2 on H100 (benchmarks/llama3_h100_202412_torchtitan.md).
    [((8, 128), 82.4 - 67.0), ((8, 128), 77.0 - 62.0), ((8, 128), 76.8 - 61.8)],
)
def test_what_shards_save_is_what_torchtitan_measured(
    num_ranks: tuple[int, int], published_gib: float
) -> None:
    """More ranks take states away and nothing else: fp32 weights, gradients and two moments."""
    model = public_shape("Llama 3.1 8B", seq_length=8192)
    few, many = (
        memory(
            RunConfig(
                model=model,
                parallelism=Parallelism(
                    dp=dp, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS
                ),
                batch=Batch(micro_batch_size=2, global_batch_size=2 * dp),
                precision=Precision.BF16,
                optimizer_state_nbytes=10,
                device="H100",
            )
        )
        for dp in num_ranks
    )
    saved = (few.total_nbytes - many.total_nbytes) / 2**30
    # Whole GiB and a tenth are published; the allocator's reserve shrinks with the rest.
    assert saved == pytest.approx(published_gib, rel=0.1)
