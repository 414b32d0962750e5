"""Layouts of the sweep, and the digest that shows which predictions came before it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

BASE = "base"
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform")
_FULL += ("--recompute-num-layers", "1")
_SELECTIVE = ("--recompute-granularity", "selective")
LOCAL = ("--transformer-impl", "local", "--no-rope-fusion", "--no-masked-softmax-fusion")
LOCAL += ("--no-persist-layer-norm",)
"""Megatron core's own layers, without kernels that are built apart."""
FP8 = ("--fp8-format", "hybrid")
_GRAPHS = ("--cuda-graph-impl", "transformer_engine", "--cuda-graph-scope", "attn")
_TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
Shard = tuple[int, int, tuple[str, ...]]
"""Number of ranks, the rank that is played, and options."""


def micro(size: int) -> tuple[str, ...]:
    """Return the options of a micro-batch."""
    return ("--micro-batch-size", str(size))


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "mbs 1": micro(1),
    "mbs 4": micro(4),
    "full": _FULL,
    "fp8": FP8,
    "mbs 8": micro(8),
    "selective": _SELECTIVE,
    "mbs 1, full": (*micro(1), *_FULL),
    "mbs 4, full": (*micro(4), *_FULL),
    "fp8, mbs 1": (*FP8, *micro(1)),
    "fp8, mbs 4": (*FP8, *micro(4)),
    "mbs 8, full": (*micro(8), *_FULL),
    "graphs": _GRAPHS,
    "unfused": ("--attention-backend", "unfused"),
    "mbs 4, selective": (*micro(4), *_SELECTIVE),
}
"""Options of each layout on top of the base, by decreasing value."""
OF_ENGINE = ("fp8", "graphs", "unfused")
"""Beginnings of names of layouts that only Transformer Engine has; no plan offers them."""


def _shards() -> Iterator[tuple[str, Shard]]:
    for size in (8, 2, 4):
        for samples in (1, 2):
            options = (_TP, str(size), "--sequence-parallel", *micro(samples))
            yield f"TP {size}, SP, mbs {samples}", (size, 0, options)
    for rank, stage in enumerate(("first", "last")):
        for samples in (1, 2):
            yield f"PP 2 {stage}, mbs {samples}", (2, rank, (PP, "2", *micro(samples)))
    yield "TP 8, mbs 1", (8, 0, (_TP, "8", *micro(1)))


SHARDS: Mapping[str, Shard] = dict(_shards())
PAIRS: Mapping[str, tuple[str, ...]] = {
    "DP 2": ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    "TP 2": (_TP, "2", "--sequence-parallel"),
    "PP 2": (PP, "2"),
    # Only a GPU has this one; core_v0.16.1 cannot train under --use-torch-fsdp2 (finish_grad_sync).
    "FSDP 2": (
        *("--use-megatron-fsdp", "--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"),
        *("--data-parallel-sharding-strategy", "optim_grads_params"),
    ),
}
"""Options of layouts that two ranks train."""


def digest(figures: Mapping[str, Any]) -> str:
    """Return the SHA-256 of figures as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(figures, sort_keys=True).encode()).hexdigest()
