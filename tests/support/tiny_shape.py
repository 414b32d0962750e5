"""The smallest model that can be described, one large enough to split, and its layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig

TINY = ModelShape(
    num_layers=1,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=2,
    seq_length=2,
    vocab_size=8,
)

SMALL = ModelShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    vocab_size=256,
)


def of_width(hidden_size: int, **other: Any) -> ModelShape:
    """Return a GPT with heads of 128 and an MLP four times as wide; ``other`` are further fields,
    such as its number of layers."""
    num_heads = hidden_size // 128
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "ffn_hidden_size": 4 * hidden_size,
        "num_attention_heads": num_heads,
        "num_query_groups": num_heads,
        "kv_channels": 128,
        "seq_length": 2048,
        "vocab_size": 32000,
    }
    return ModelShape(**fields | other)


def run_of(
    shape: ModelShape = SMALL,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    micro: int = 2,
    samples: int = 16,
    model: dict[str, Any] | None = None,
    par: dict[str, Any] | None = None,
    **run: Any,
) -> RunConfig:
    """Return a run: ``model`` changes the shape, ``par`` the parallelism, and ``run`` other
    fields."""
    return RunConfig(
        model=replace(shape, **(model or {})),
        parallelism=Parallelism(tp=tp, pp=pp, dp=dp, **(par or {})),
        batch=Batch(micro_batch_size=micro, global_batch_size=samples),
        **run,
    )
