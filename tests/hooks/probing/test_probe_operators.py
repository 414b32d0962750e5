"""Operators of probes: they compute what training computes, and touch nothing of the user's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.calib.advice.probe_sizes import PROBED_KINDS
from forerun.calib.workload.config import (
    Attention,
    Batch,
    Experts,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    RunConfig,
)
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.probing import _probe_kernels as probe_kernels
from forerun.hooks.probing._probe_operators import Bench, make_bench, ramp

CPU = torch.device("cpu")
SHAPES = {
    OperatorKind.EMBEDDING: (64, 32, 96),
    OperatorKind.NORM: (64, 32),
    OperatorKind.POSITION: (64, 96),
    OperatorKind.CORE_ATTENTION: (4, 4, 4, 16, 8),
    OperatorKind.RESIDUAL: (64, 32),
    OperatorKind.ACTIVATION: (64, 48, 48),
    OperatorKind.LOSS: (64, 96),
    OperatorKind.OPTIMIZER: (1000,),
    OperatorKind.ROUTER: (64, 32, 4),
    OperatorKind.GROUPED_LINEAR: (4, 64, 32, 48),
    OperatorKind.PERMUTE: (64, 32, 1),
    **{kind: (64, 32, 48) for kind in PROBED_KINDS if kind.is_linear},
}


def config(**model: object) -> RunConfig:
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 8,
        "seq_length": 16,
        "vocab_size": 96,
    }
    return RunConfig(
        model=ModelShape(**{**shape, **model}),  # type: ignore[arg-type]
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=4, global_batch_size=4),
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )


LLAMA = config(
    is_gated=True,
    has_bias=False,
    normalization=Normalization.RMS_NORM,
    position_embedding=PositionEmbedding.ROPE,
    num_query_groups=2,
    experts=Experts(num_experts=4, ffn_hidden_size=48),
)


def bench_of(kind: OperatorKind, run: RunConfig, dtype: torch.dtype = torch.float32):
    return make_bench(kind, SHAPES[kind], run, dtype=dtype, device=CPU)


def test_every_kind_that_the_plan_may_ask_for_is_here() -> None:
    assert set(SHAPES) == PROBED_KINDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [config(), LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("kind", sorted(SHAPES, key=lambda kind: kind.value))
def test_runs_again_and_again_without_random_numbers(
    kind: OperatorKind, run: RunConfig, dtype: torch.dtype
) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    default = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    shape = SHAPES[kind]
    if run is LLAMA and kind is OperatorKind.POSITION:
        shape = (64, 64)
    if run is LLAMA and kind is OperatorKind.ACTIVATION:
        shape = (64, 96, 48)
    bench = make_bench(kind, shape, run, dtype=dtype, device=CPU)
    for _ in range(3):
        bench.forward()
        bench.backward()
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tobytes())
    now = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    assert now == default


def test_a_linear_adds_its_weight_gradient_to_a_buffer_and_to_no_grad() -> None:
    bench = bench_of(OperatorKind.LINEAR_FC1, config())
    assert isinstance(bench, Bench)
    bench.forward()
    bench.backward()
    (x,) = bench.activations
    gradient = bench._gradients[0]
    expected = torch.einsum("sbo,sbi->oi", gradient, x.detach())
    assert torch.allclose(bench._sums[0], expected, atol=1e-4)
    assert x.grad is None and all(w.grad is None for w in bench.weights[0])


def test_the_loss_is_cross_entropy_and_its_gradient() -> None:
    logits = ramp((6, 2, 11), torch.float32, CPU).requires_grad_()
    targets = torch.arange(12).reshape(6, 2) % 11
    mine = probe_kernels.VocabularyLoss.apply(logits, targets)
    weights = ramp((6, 2), torch.float32, CPU)
    (tensor,) = torch.autograd.grad(mine, logits, weights)
    flat = torch.nn.functional.cross_entropy(
        logits.view(12, 11), targets.view(12), reduction="none"
    )
    (expected,) = torch.autograd.grad(flat.view(6, 2), logits, weights)
    assert torch.allclose(mine, flat.view(6, 2), atol=1e-6)
    assert torch.allclose(tensor, expected, atol=1e-6)


class _AttentionCalls(TorchDispatchMode):
    """Heads of what attention's kernels are given, and what copies before them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[int, ...]] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if "scaled_dot_product" in name:
            tensors = [one for one in args if isinstance(one, torch.Tensor)]
            is_backward = name.endswith("backward")
            self.heads.append(tuple(t.shape[1] for t in tensors[is_backward : is_backward + 3]))
        elif any(word in name for word in ("repeat", "index", "expand", "cat")):
            self.copies.append(name)
        return func(*args, **(kwargs or {}))


def test_keys_of_grouped_queries_are_read_as_they_are() -> None:
    """As the fused kernels that models run read them: two groups for four heads, both ways."""
    run = replace(LLAMA, attention=Attention.FUSED)
    shape = (4, 4, 2, 16, 8)
    bench = make_bench(OperatorKind.CORE_ATTENTION, shape, run, dtype=torch.float32, device=CPU)
    with _AttentionCalls() as seen:
        bench.forward()
        bench.backward()
    assert seen.heads == [(4, 2, 2), (4, 2, 2)]
    assert seen.copies == []


def test_both_forms_of_attention_give_the_same() -> None:
    query = ramp((16, 2, 4, 8), torch.float32, CPU)
    key, value = ramp((16, 2, 2, 8), torch.float32, CPU), query[:, :, :2].flip(0)
    mask = torch.ones(16, 16, dtype=torch.bool).triu_(1)
    no_dropout = probe_kernels.Dropout(0.0, CPU)
    unfused = probe_kernels.unfused_attention(query, key, value, mask, no_dropout)
    fused = probe_kernels.fused_attention(query, key, value).view_as(unfused)
    assert torch.allclose(unfused, fused, atol=1e-5)
    assert config().attention is Attention.AUTO and not config().is_attention_fused
