"""A fused head: how often each stack computes the product of the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_shape import SMALL

from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.workload.config import Batch, Parallelism, RunConfig
from forerun.calib.workload.operators import OperatorKind

CONFIG = RunConfig(
    model=replace(SMALL, num_layers=2),
    parallelism=Parallelism(dp=2),
    batch=Batch(micro_batch_size=1, global_batch_size=8),
)


@pytest.mark.parametrize(
    ("framework", "is_fused", "number"),
    [("", False, 0), ("", True, 1), ("torchtitan", True, 0), ("transformers 5.23", True, 0)],
)
def test_megatron_computes_logits_again_and_others_do_not(
    framework: str, is_fused: bool, number: int
) -> None:
    """Megatron's ``linear_cross_entropy`` (dev, 2026) splits the product of its backward pass;
    Liger and ``ChunkedCELoss`` compute gradients beside the loss."""
    config = replace(CONFIG, framework=framework, fuses_head=is_fused)
    recomputed = [one.kind for one, _ in block(config, BlockKind.HEAD).recompute]
    assert recomputed == [OperatorKind.LOGITS] * number
