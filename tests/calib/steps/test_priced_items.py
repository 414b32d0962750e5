from __future__ import annotations

import pytest

from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.priced_items import base_estimates
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.workload.config import (
    Batch,
    Fp8Recipe,
    ModelShape,
    Parallelism,
    Precision,
    RunConfig,
)
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

MODEL = ModelShape(
    num_layers=2,
    hidden_size=8192,
    ffn_hidden_size=28672,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=128,
    seq_length=8192,
    vocab_size=128256,
)


def times(fp8: Fp8Recipe) -> dict[tuple[OperatorKind, Phase], float]:
    config = RunConfig(
        model=MODEL,
        parallelism=Parallelism(tp=2),
        batch=Batch(micro_batch_size=1, global_batch_size=1),
        precision=Precision.BF16,
        fp8=fp8,
        device="NVIDIA B200",
    )
    compiled = compile_layouts([config])
    estimates = base_estimates(compiled, prior_times("NVIDIA B200", is_attention_fused=True))
    return {
        (item.kind, item.phase): float(time_s)
        for item, time_s in zip(compiled.items, estimates.time_s, strict=True)
        if isinstance(item, Operator)
    }


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_large_products_in_fewer_bits_take_less_time(phase: Phase) -> None:
    """The data sheet's peaks are 1 : 2 : 4 for 16, 8 and 4 bits; public tables differ a little."""
    key = (OperatorKind.LINEAR_FC1, phase)
    wide, narrow = times(Fp8Recipe.NONE)[key], times(Fp8Recipe.MXFP8)[key]
    least = times(Fp8Recipe.NVFP4)[key]
    assert wide / 2.5 < narrow < wide
    assert narrow / 2 < least < narrow


def test_logits_and_all_else_stay_in_16_bits() -> None:
    wide, narrow = times(Fp8Recipe.NONE), times(Fp8Recipe.DELAYED)
    for key, time_s in wide.items():
        if not key[0].is_linear or key[0] is OperatorKind.LOGITS:
            assert narrow[key] == time_s
