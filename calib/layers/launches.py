"""What the host launches for a layer: the share that a CUDA graph replays, and that runs again."""

from __future__ import annotations

from ..workload import Dispatcher, RunConfig
from .blocks import Block, BlockKind

_DENSE = {"attn": 0.6, "mlp": 0.4}
"""Shares of a layer's kernels in two scopes of Megatron.  Attention has a norm, the product, the
rotation of queries and keys, the kernel itself and the output product with its addition; the MLP a
norm, two products, the activation and an addition."""
_EXPERTS = {"attn": 0.15, "moe_router": 0.12, "moe_preprocess": 0.08, "moe": 0.85}
"""The same of a layer of experts, which launches about four times as much (``EXPERT_LAUNCHES``).
Router: product, top-k, probabilities, auxiliary loss and their sums over ranks.  Preprocessing:
counts, maps and offsets of rows.  What is left of ``moe`` knows its shapes only when it runs:
exchange, grouped products and the quantisation of each expert's operands, most of all kernels
(layers with both replayed still wait 9 ms on B200, with 16 experts of a rank)."""
_SHARES = {BlockKind.LAYER: _DENSE, BlockKind.EXPERT_LAYER: _EXPERTS}


def replayed_frac(config: RunConfig, kind: BlockKind) -> float:
    """Share of the launches of a block, 0 to 1, that the host has no part in.

    A graph of the whole iteration replays everything, one of layers each layer or the modules of
    its scope (``--cuda-graph-scope`` of Megatron-LM core_v0.16.1).

    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> config = RunConfig(model=gpt, parallelism=Parallelism(), uses_cuda_graphs=True,
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8), cuda_graph_scope=("attn",))
    >>> [replayed_frac(config, kind) for kind in (BlockKind.LAYER, BlockKind.HEAD)]
    [0.6, 0.0]
    """
    if not config.uses_cuda_graphs:
        return 0.0
    if config.is_step_replayed:
        return 1.0
    shares = _SHARES.get(kind)
    if shares is None:
        return 0.0
    if not config.cuda_graph_scope:
        return 1.0
    return min(1.0, sum(shares.get(name, 0.0) for name in config.cuda_graph_scope))


_DROPLESS = 2.2
"""Launches of a layer of eight experts that waits for the counts of its rows, over one whose rows
are padded to a capacity: the host stops until the device has counted, and launches into an empty
queue.  Qwen3 30B without and with drops, in one release and the one before: 2.0 times on H100, 1.9
on B200, where both wait for the host."""
_FUSED = 0.75
"""The same of a fused dispatcher, which sorts and moves rows in one kernel: Qwen3 30B on H100 takes
6.6 ms a layer with it, both passes and all work, where layers of as many experts without it wait 14
to 16 (Moonlight, GPT-OSS 20B).  Kept near 1, since Qwen3 30B on GB200 gains a third by a graph."""
_OF_EACH = 0.25
"""Share of them that grows with the experts of a rank: Transformer Engine launches the products of
each expert, and the casts of its operands, by themselves.  Layers that wait for the host take 9 to
12.5 ms for both passes with 16 experts (Qwen3 30B on B200 and GB200), at most 8 with 4 (Qwen3 235B
on GB200)."""
_EXPERTS_OF_RANK = 8
_GRACE = ("gh200", "gh-96", "gb200", "gb300")
_GRACE_LAUNCHES = 1.3
"""Launches of a Grace host over those of x86: GH200 waits for its host up to four times the batch
that H100 and A100 beside x86 do, by the cores of Grace (Vellaisamy et al. 2025, arXiv:2504.11750).
How much longer one launch takes is chosen (1.6 is as far off as 1.0 on public steps of GB200), and
what a machine's steps tell moves it, as all launches."""


def host_factor(device: str) -> float:
    """Time of a launch by the host of a device over that of an x86 host.

    >>> host_factor("NVIDIA GB200"), host_factor("GH-96"), host_factor("NVIDIA B200")
    (1.3, 1.3, 1.0)
    """
    return _GRACE_LAUNCHES if any(name in device.lower() for name in _GRACE) else 1.0


def launched_frac(config: RunConfig, kind: BlockKind) -> float:
    """Launches of a block by the host, over those of a layer of its kind that nothing stops, on an
    x86 host."""
    experts = config.model.experts
    if kind is BlockKind.EMBEDDING:
        return 0.0
    kept = host_factor(config.device) * (1.0 - replayed_frac(config, kind))
    if kind is not BlockKind.EXPERT_LAYER or not experts or experts.is_padded_to_capacity:
        return kept
    if experts.rank_capacity_factor:
        # Nobody waits for counts, and one fused product launches all experts.
        return kept
    held = experts.num_experts / config.parallelism.ep / _EXPERTS_OF_RANK
    stopped = _DROPLESS * (_FUSED if experts.dispatcher is Dispatcher.FLEX else 1.0)
    return kept * stopped * (1.0 - _OF_EACH + _OF_EACH * held)


def again_frac(block: Block) -> float:
    """Share of a block's forward launches, 0 to 1, that recomputation repeats.

    Modules count by their operators: each is a kernel or a few.
    """
    forward, again = (sum(count for _, count in ops) for ops in (block.forward, block.recompute))
    return min(1.0, again / forward) if forward else 0.0
