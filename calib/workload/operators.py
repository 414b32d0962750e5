"""The operators that we model: what makes two pieces of work the same.

The identity (kind, phase, shape) is the meeting point of what hooks record and what a layout
generates: both sides build ``Operator`` values, and equal values are the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .argument_values import QuickEnum

OPTIMIZER_ELEMENT_NBYTES = 4
"""The optimizer works on fp32 copies in every precision."""


class OperatorKind(QuickEnum):
    """What is computed.  The comment gives the canonical shape, sizes local to one rank.

    The kinds down to the two host remainders are what a dense layout generates; some of the rest
    are operators of other builds of Megatron and of public measurements, and have laws only.
    """

    EMBEDDING = "embedding"  # (tokens, hidden, vocab)
    NORM = "norm"  # (tokens, hidden)
    LINEAR_QKV = "linear_qkv"  # (tokens, in, out)
    # (tokens, qkv width): rotary embedding, split and reshape of q, k, v; the width that is rotated
    # where that is a part of each head (latent attention)
    POSITION = "position"
    # (micro_batch, heads, query_groups, seq, channels of a head: the mean where values have others)
    CORE_ATTENTION = "core_attention"
    LINEAR_PROJ = "linear_proj"  # (tokens, in, out)
    RESIDUAL = "residual"  # (tokens, hidden): both bias-dropout-adds of a layer together
    LINEAR_FC1 = "linear_fc1"  # (tokens, in, out)
    ACTIVATION = "activation"  # (tokens, in, out): in = fc1's out, out = fc2's in
    LINEAR_FC2 = "linear_fc2"  # (tokens, in, out)
    LOGITS = "logits"  # (tokens, in, vocab)
    LOSS = "loss"  # (tokens, vocab): cross-entropy
    OPTIMIZER = "optimizer"  # (parameters,): those that this rank updates
    # (parameters, calls): the same over sharded tensors (DTensor), each of whose calls the host
    # looks through
    SHARDED_OPTIMIZER = "sharded_optimizer"
    # (parameters, bytes that each moves on the device, those of them on the host, 1 where their
    # copies run beside its work): states of a width of their own, or the host's
    STATED_OPTIMIZER = "stated_optimizer"
    SHARD_UNIT = "shard_unit"  # (): what the host adds to one pass of a unit of FSDP
    HOST_MICROBATCH = "host_microbatch"  # (): rest of one forward or backward of a stage
    HOST_STEP = "host_step"  # (): rest of one step
    LINEAR = "linear"  # (tokens, in, out): a product without one of the roles above
    BATCHED_PRODUCT = "batched_product"  # (batch, rows, inner, columns)
    GROUPED_LINEAR = "grouped_linear"  # (experts, tokens over all of them, in, out)
    # (micro_batch, heads, query_groups, seq, query and key channels, value channels), causal
    FLASH_ATTENTION = "flash_attention"
    MASK = "mask"  # (rows, columns): fill of masked scores
    SOFTMAX = "softmax"  # (rows, columns): the framework's, on scores already masked
    FUSED_SOFTMAX = "fused_softmax"  # (matrices, rows, columns): scale, causal mask and softmax
    RMS_NORM = "rms_norm"  # (tokens, hidden): as a chain of eager calls
    ROTARY = "rotary"  # (seq, micro_batch, heads, channels): as a chain of eager calls
    ELEMENTWISE = "elementwise"  # (rows, columns)
    ROUTER = "router"  # (tokens, hidden, experts): product, top-k and weights
    # (tokens, hidden, copies of each token); in a layer of experts each row is its own token
    PERMUTE = "permute"
    EXPERTS = "experts"  # (tokens, hidden, ffn, top-k, experts here, experts in all): fused
    HOST_COPY = "host_copy"  # (bytes,): of activations, forwards to the host's memory, then back
    # (tokens, hidden): a norm inside the product behind it (Transformer Engine), whose time in
    # training holds it: a part of that operator, which nobody times by itself
    FUSED_NORM = "fused_norm"
    LAYER = "layer"  # (micro_batch, heads, seq, hidden, tp): a whole transformer layer

    @property
    def is_linear(self) -> bool:
        """True where the work is one matrix product per phase (two in the backward phase)."""
        return self in _LINEARS

    @property
    def is_product(self) -> bool:
        """True where the work is products of weights, of one matrix or of several."""
        return self.is_linear or self is OperatorKind.GROUPED_LINEAR

    @property
    def is_quantized(self) -> bool:
        """True where the work runs in 8 or 4 bits under such a recipe, which Megatron leaves the
        logits and the router out of."""
        return self.is_product and self is not OperatorKind.LOGITS


_LINEARS = frozenset(
    {
        OperatorKind.LINEAR_QKV,
        OperatorKind.LINEAR_PROJ,
        OperatorKind.LINEAR_FC1,
        OperatorKind.LINEAR_FC2,
        OperatorKind.LOGITS,
        OperatorKind.LINEAR,
    }
)


MODULES_BY_ATTRIBUTE: Mapping[str, OperatorKind] = {
    "input_layernorm": OperatorKind.NORM,
    "pre_mlp_layernorm": OperatorKind.NORM,
    "q_layernorm": OperatorKind.NORM,
    "k_layernorm": OperatorKind.NORM,
    "kv_layernorm": OperatorKind.NORM,
    "enorm": OperatorKind.NORM,
    "hnorm": OperatorKind.NORM,
    "final_layernorm": OperatorKind.NORM,
    "linear_q_proj": OperatorKind.LINEAR,
    "linear_q_down_proj": OperatorKind.LINEAR,
    "linear_q_up_proj": OperatorKind.LINEAR,
    "linear_kv_down_proj": OperatorKind.LINEAR,
    "linear_kv_up_proj": OperatorKind.LINEAR,
    "eh_proj": OperatorKind.LINEAR,
    "linear_qkv": OperatorKind.LINEAR_QKV,
    "core_attention": OperatorKind.CORE_ATTENTION,
    "linear_proj": OperatorKind.LINEAR_PROJ,
    "linear_fc1": OperatorKind.LINEAR_FC1,
    "linear_fc2": OperatorKind.LINEAR_FC2,
    "output_layer": OperatorKind.LOGITS,
}
"""Where hooks find a kind in a Megatron model: the last part of a module's name."""
MODULES_BY_CLASS: Mapping[str, OperatorKind] = {
    "LanguageModelEmbedding": OperatorKind.EMBEDDING,
    "SelfAttention": OperatorKind.POSITION,
    "MLASelfAttention": OperatorKind.POSITION,
    "MLP": OperatorKind.ACTIVATION,
    "TEGroupedMLP": OperatorKind.ACTIVATION,
    "SequentialMLP": OperatorKind.PERMUTE,
    "TopKRouter": OperatorKind.ROUTER,
    "TransformerLayer": OperatorKind.RESIDUAL,
}
"""The same by the name of its class, or of one that it is derived from."""


class Phase(QuickEnum):
    """Which pass an operator runs in.  Backward is input and weight gradient together."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"
    RECOMPUTE = "recompute"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One piece of work on one rank."""

    kind: OperatorKind
    phase: Phase
    shape: tuple[int, ...]
    element_nbytes: int
    is_wide: bool = False
    """A product that stays in 16 bits in a layout whose others run in 8 or 4."""


OperatorCount = tuple[Operator, int]
"""An operator and how often it runs in its pass."""


def optimizer_operator(
    parameters: int,
    *,
    calls: int = 0,
    moved_nbytes: int = 0,
    host_parameters: int = 0,
    is_overlapped: bool = False,
) -> Operator:
    """The optimizer of one rank over so many parameters, as hooks record and layouts have it.

    ``calls`` on sharded tensors go before a width of its own states (``moved_nbytes``).

    >>> optimizer_operator(8).shape, optimizer_operator(8, moved_nbytes=22).shape
    ((8,), (8, 22, 0, 0))
    """
    kind, sizes = OperatorKind.OPTIMIZER, ()
    if calls:
        kind, sizes = OperatorKind.SHARDED_OPTIMIZER, (calls,)
    elif moved_nbytes:
        kind = OperatorKind.STATED_OPTIMIZER
        sizes = (moved_nbytes, host_parameters, int(is_overlapped))
    return Operator(
        kind=kind,
        phase=Phase.STEP,
        shape=(parameters, *sizes),
        element_nbytes=OPTIMIZER_ELEMENT_NBYTES,
    )
