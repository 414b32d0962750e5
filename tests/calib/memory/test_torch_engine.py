"""Memory of PyTorch's own FSDP2, loss and checkpoints by operator, as torchtitan uses them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from one_layer import layer_activations

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.calib.layers.blocks import BlockKind, block
from forerun.calib.memory._module_memory import loss_nbytes
from forerun.calib.memory.activations import operators_nbytes
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import (
    Batch,
    Engine,
    Fp8Recipe,
    Normalization,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
)

Layout = Callable[..., RunConfig]
LLAMA: dict[str, Any] = {
    "is_gated": True,
    "has_bias": False,
    "is_tied": False,
    "normalization": Normalization.RMS_NORM,
}
TOKENS, HIDDEN, FFN, HEADS = 64, 64, 128, 4


def titan(layout: Layout, **changes: Any) -> RunConfig:
    """Two samples of 32 tokens, four layers, everything sharded over 4 ranks."""
    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS, "engine": Engine.TORCH}
    config = layout(dp=4, precision=Precision.BF16, device="H100", model=LLAMA, par=par)
    return replace(config, recompute=Recompute.SELECTIVE, **changes)


def test_a_checkpoint_by_operator_keeps_every_second_product(layout: Layout) -> None:
    config = titan(layout)
    # Query, value, gate, down, and attention; the input stays beside them.
    saved = HIDDEN + HIDDEN + FFN + HIDDEN + HIDDEN
    lse = 4 * TOKENS * HEADS
    assert operators_nbytes(config) == 2 * TOKENS * saved + lse
    result = layer_activations(config, BlockKind.LAYER)
    assert result.saved_nbytes == 2 * TOKENS * (HIDDEN + saved) + lse
    compiled = operators_nbytes(replace(config, is_compiled=True))
    assert operators_nbytes(config) - compiled == 2 * TOKENS * HIDDEN
    narrow = replace(config, fp8=Fp8Recipe.TENSORWISE)
    assert operators_nbytes(narrow) == operators_nbytes(config)


def test_products_with_a_bias_are_none_of_the_operators(layout: Layout) -> None:
    config = titan(layout)
    biased = replace(config, model=replace(config.model, has_bias=True))
    assert operators_nbytes(biased) == 2 * TOKENS * HIDDEN + 4 * TOKENS * HEADS


def test_pytorch_keeps_what_is_told(layout: Layout) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    config = titan(layout)
    widths = {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "o": HIDDEN, "gate": FFN, "up": FFN}
    products = {
        name: torch.nn.Linear(HIDDEN, width, bias=False) for name, width in widths.items()
    } | {"down": torch.nn.Linear(FFN, HIDDEN, bias=False)}

    def heads(name: str, x: Any) -> Any:
        return products[name](x).view(2, 32, HEADS, -1).transpose(1, 2)

    def run(x: Any) -> Any:
        query, key, value = (heads(name, x) for name in "qkv")
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + products["o"](mixed.transpose(1, 2).reshape(2, 32, HIDDEN))
        gate, up = products["gate"](x), products["up"](x)
        return x + products["down"](functional.silu(gate) * up)

    saved_nbytes = _saved_nbytes(torch, run, torch.ones(2, 32, HIDDEN, requires_grad=True))
    # This runs in fp32; the log-sum-exp is as wide there as anywhere.
    lse = 4 * TOKENS * HEADS
    assert saved_nbytes - lse == 2 * (operators_nbytes(config) - lse)


def _saved_nbytes(torch: Any, run: Callable[[Any], Any], x: Any) -> int:
    """Return bytes that a checkpoint retains of a pass, under torchtitan's policy."""
    from torch.utils import checkpoint as checkpoints

    counts: defaultdict[str, int] = defaultdict(int)
    ops, modes = torch.ops.aten, []

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        counts["mm"] += op is ops.mm.default
        is_second = op is ops.mm.default and counts["mm"] % 2 == 0
        listed = op is ops.mm.default or "_scaled_dot_product" in str(op)
        choices = checkpoints.CheckpointPolicy
        return choices.MUST_SAVE if listed and not is_second else choices.PREFER_RECOMPUTE

    def contexts() -> Any:
        modes.extend(checkpoints.create_selective_checkpoint_contexts(policy))
        return modes[-2:]

    output = checkpoints.checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    tensors = torch.utils._pytree.tree_leaves(list(modes[0].storage.values()))
    result = {}
    for one in (getattr(tensor, "val", tensor) for tensor in tensors):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            result[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    assert output.requires_grad
    return sum(result.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_loss_of_pytorch_holds_three_copies_in_fp32(layout: Layout, dtype: str) -> None:
    """The peak is that of the loss's backward pass in PyTorch, plus the freed block of logits in
    16 bits."""
    torch = pytest.importorskip("torch")
    vocabulary = 4096
    config = titan(layout)
    is_narrow = dtype == "bfloat16"
    large = replace(
        config,
        model=replace(config.model, vocab_size=vocabulary),
        precision=Precision.BF16 if is_narrow else Precision.FP32,
    )
    logits = TOKENS * vocabulary
    hole = 2 * logits if is_narrow else 0
    assert loss_nbytes(large) == 12 * logits + hole
    loop = replace(large, parallelism=Parallelism(), framework="transformers 4.57.1")
    assert loss_nbytes(loop) == loss_nbytes(large)
    assert loss_nbytes(replace(loop, framework="Megatron-LM")) < loss_nbytes(loop)
    assert _most_alive(torch, getattr(torch, dtype), vocabulary) == pytest.approx(
        12 * logits, rel=0.01
    )


def test_a_chunked_head_holds_the_logits_of_one_chunk(layout: Layout) -> None:
    """Product, loss and both backward passes of each eighth of the tokens, as in torchtitan, whose
    gradients of hidden states are summed in fp32."""
    torch = pytest.importorskip("torch")
    vocabulary = 4096
    config = titan(layout, fuses_head=True)
    large = replace(config, model=replace(config.model, vocab_size=vocabulary))
    table = 2 * vocabulary * HIDDEN  # which the mode counts too, as it is seen in views
    alive = _most_alive_in_chunks(torch, vocabulary) - table
    assert loss_nbytes(large) == pytest.approx(alive, rel=0.02)
    whole = loss_nbytes(replace(large, fuses_head=False))
    assert loss_nbytes(large) < whole / 3


def _most_alive(torch: Any, dtype: Any, vocabulary: int) -> int:
    """Bytes in the backward pass of a loss, as storages come and go."""
    logits = torch.randn(TOKENS, vocabulary, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (TOKENS,))
    with (alive := _alive(torch)):
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        alive.most = 0
        loss.backward()
    return alive.most


def _most_alive_in_chunks(torch: Any, vocabulary: int) -> int:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    table = torch.randn(vocabulary, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (TOKENS,))
    with (alive := _alive(torch)):
        grads = torch.zeros(TOKENS, HIDDEN)
        for some, targets, part in zip(
            hidden.chunk(8), labels.chunk(8), grads.chunk(8), strict=True
        ):
            one = some.detach().requires_grad_()
            logits = torch.nn.functional.linear(one, table).float()
            loss = torch.nn.functional.cross_entropy(logits, targets)
            del logits
            loss.backward()
            part.copy_(one.grad)
    return alive.most


def _alive(torch: Any) -> Any:
    """A mode whose ``most`` is the most bytes of storages that operators made and were alive."""

    class Alive(torch.utils._python_dispatch.TorchDispatchMode):
        most = 0

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}

        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = op(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self.sizes:
                    self.sizes[storage.data_ptr()] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage.data_ptr())
            self.most = max(self.most, sum(self.sizes.values()))
            return out

    return Alive()


def test_there_is_no_gradient_of_a_unit_at_the_loss(layout: Layout) -> None:
    """Gathered weights of a layer and of the root, and the copy that each gather writes."""
    config = titan(layout)
    large = replace(config, model=replace(config.model, vocab_size=64_000))
    layer = block(large, BlockKind.LAYER).numel.dense
    root = (2 * 64_000 + 32 + 1) * HIDDEN
    workspaces = 2 * 32 * 2**20
    assert memory(large).scratch_nbytes == workspaces + 2 * 2 * (layer + root)


@pytest.mark.parametrize("ranks", [8, 128])
def test_shards_of_an_8b_model_are_sixteen_bytes_of_each_parameter(ranks: int) -> None:
    model = public_shape("Llama-3.1-8B", seq_length=8192)
    build = partial(
        RunConfig,
        model=model,
        precision=Precision.BF16,
        recompute=Recompute.SELECTIVE,
        optimizer_state_nbytes=10,
        device="H100",
    )
    par = Parallelism(
        dp=ranks,
        is_optimizer_distributed=True,
        sharding=Sharding.WEIGHTS,
        engine=Engine.TORCH,
    )
    result = memory(
        build(parallelism=par, batch=Batch(micro_batch_size=2, global_batch_size=2 * ranks))
    )
    states = result.weights_nbytes + result.grads_nbytes + result.optimizer_nbytes
    assert states == pytest.approx(16 * 8.030261e9 / ranks, rel=1e-6)
    assert result.logits_nbytes == 14 * 2 * 8192 * 128256
