"""Host launches of a layer: the share that a CUDA graph replays, and the share recomputed."""

from __future__ import annotations

from ..workload.config import RunConfig
from ..workload.model_shape import Dispatcher
from .blocks import EXPERT_KINDS, LAYER_KINDS, Block, BlockKind

_DENSE = {"attn": 0.6, "mlp": 0.4}
"""Shares of a layer's kernels in two scopes of Megatron.  Attention has a norm, the QKV product,
the rotation of queries and keys, the kernel itself and the output product with its addition; the
MLP has a norm, two products, the activation and an addition."""
_EXPERTS = {"attn": 0.15, "moe_router": 0.12, "moe_preprocess": 0.08, "moe": 0.85}
"""Shares of an expert layer, which launches about four times as much (``EXPERT_LAUNCHES``).
Router: product, top-k, probabilities, auxiliary loss and their sums over ranks.  Preprocessing:
counts, maps and offsets of rows.  The remainder of ``moe`` knows its shapes only at run time:
exchange, grouped products and the quantisation of each expert's operands, most of all kernels
(layers with both replayed still wait 9 ms on B200, with 16 experts per rank)."""
_SHARES = {BlockKind.LAYER: _DENSE, BlockKind.EXPERT_LAYER: _EXPERTS}
_MIXER, _WITHIN_EXPERTS = {"attn": 1.0}, {k: v for k, v in _EXPERTS.items() if k != "attn"}
_HALVES = {
    **dict.fromkeys(LAYER_KINDS, (_DENSE["attn"], _MIXER)),
    BlockKind.MLP: (_DENSE["mlp"], {"mlp": 1.0}),
    BlockKind.EXPERTS: (
        1.0 - _EXPERTS["attn"],
        {name: share / (1.0 - _EXPERTS["attn"]) for name, share in _WITHIN_EXPERTS.items()},
    ),
}
"""Launches of a hybrid model's layer over those of a GPT's, and the shares in their scopes; an
opaque layer counts as attention."""


def replayed_frac(config: RunConfig, kind: BlockKind) -> float:
    """Return the share of a block's launches, 0 to 1, that CUDA graphs replay without the host.

    A graph of the whole iteration replays everything; graphs of layers replay each layer, or the
    modules in their scope (``--cuda-graph-scope`` of Megatron-LM core_v0.16.1).

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
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
    if kind not in LAYER_KINDS:
        return 0.0
    shares = _SHARES[kind] if kind in _SHARES else _HALVES[kind][1]
    if not config.cuda_graph_scope:
        return 1.0
    return min(1.0, sum(shares.get(name, 0.0) for name in config.cuda_graph_scope))


_DROPLESS = 2.2
"""Launch cost of a layer of eight experts that waits for its row counts, over that of a layer whose
rows are padded to a capacity: the host stops until the device has counted, then launches into an
empty queue.  Qwen3 30B without and with drops, in one release and the one before: 2.0 times on
H100, 1.9 on B200, where both are host-bound."""
_FUSED = 0.75
"""Factor on ``_DROPLESS`` for a fused dispatcher, which sorts and moves rows in one kernel: Qwen3
30B on H100 takes 6.6 ms a layer with it, both passes and all work, while layers of as many experts
without it wait 14 to 16 ms (Moonlight, GPT-OSS 20B).  The factor stays near 1, since Qwen3 30B on
GB200 gains a third from a graph."""
_OF_EACH = 0.25
"""Share of these launches that grows with the experts of a rank: Transformer Engine launches the
products of each expert, and the casts of its operands, separately.  Host-bound layers take 9 to
12.5 ms for both passes with 16 experts (Qwen3 30B on B200 and GB200), at most 8 ms with 4 (Qwen3
235B on GB200)."""
_EXPERTS_OF_RANK = 8
_GRACE = ("gh200", "gh-96", "gb200", "gb300")
_GRACE_LAUNCHES = 1.3
"""Launch time on a Grace host over that on x86: GH200 is host-bound up to four times the batch at
which H100 and A100 on x86 are, due to Grace's cores (Vellaisamy et al. 2025, arXiv:2504.11750).
The value is chosen (1.6 is as far off as 1.0 on public steps of GB200); measured steps of a machine
correct it, as they do all launches."""


def host_factor(device: str) -> float:
    """Return the launch time of a device's host over that of an x86 host.

    >>> host_factor("NVIDIA GB200"), host_factor("GH-96"), host_factor("NVIDIA B200")
    (1.3, 1.3, 1.0)
    """
    return _GRACE_LAUNCHES if any(name in device.lower() for name in _GRACE) else 1.0


def launched_frac(config: RunConfig, kind: BlockKind) -> float:
    """Return the host launch cost of a block, over that of a layer of its kind that never waits for
    row counts, on an x86 host."""
    experts = config.model.experts
    if kind is BlockKind.EMBEDDING:
        return 0.0
    whole_frac = host_factor(config.device) * (1.0 - replayed_frac(config, kind))
    is_half = kind in LAYER_KINDS and kind not in _SHARES
    base_frac = whole_frac * (_HALVES[kind][0] if is_half else 1.0)
    if kind not in EXPERT_KINDS or not experts or experts.is_padded_to_capacity:
        return base_frac
    if experts.rank_capacity_factor:
        # The host does not wait for counts, and one fused product launches all experts.
        return base_frac
    experts_ratio = experts.num_experts / config.parallelism.ep / _EXPERTS_OF_RANK
    stopped = _DROPLESS * (_FUSED if experts.dispatcher is Dispatcher.FLEX else 1.0)
    layer_frac = whole_frac * stopped * (1.0 - _OF_EACH + _OF_EACH * experts_ratio)
    # The attention before it is a layer of its own, which does not wait.
    return layer_frac - (whole_frac - base_frac)


def recomputed_launch_frac(block: Block) -> float:
    """Return the share of a block's forward launches, 0 to 1, that recompute repeats.

    Operators stand for launches, since each is one kernel or a few.
    """
    forward, recomputed = (
        sum(count for _, count in ops) for ops in (block.forward, block.recompute)
    )
    return min(1.0, recomputed / forward) if forward else 0.0
