"""Modelled operators and their identity.

The identity (kind, phase, shape) connects hooks with layouts: both build ``Operator`` values, and
equal values are the same work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .argument_values import QuickEnum

OPTIMIZER_ELEMENT_NBYTES = 4
"""The optimizer works on fp32 copies in every precision."""


class OperatorKind(QuickEnum):
    """Kind of computation.  The comment gives the canonical shape, sizes local to one rank.

    A dense layout generates the kinds down to the two host remainders; some of the others are
    operators of other builds of Megatron and of public measurements, and have only laws.
    """

    EMBEDDING = "embedding"  # (tokens, hidden, vocab)
    NORM = "norm"  # (tokens, hidden)
    LINEAR_QKV = "linear_qkv"  # (tokens, in, out)
    # (tokens, qkv width): rotary embedding, split and reshape of q, k, v; under latent attention,
    # the rotated width, which is a part of each head
    POSITION = "position"
    # (micro_batch, heads, query_groups, seq, channels of a head: the mean if values have others)
    CORE_ATTENTION = "core_attention"
    LINEAR_PROJ = "linear_proj"  # (tokens, in, out)
    RESIDUAL = "residual"  # (tokens, hidden): both bias-dropout-adds of a layer together
    LINEAR_FC1 = "linear_fc1"  # (tokens, in, out)
    ACTIVATION = "activation"  # (tokens, in, out): in = fc1's out, out = fc2's in
    LINEAR_FC2 = "linear_fc2"  # (tokens, in, out)
    LOGITS = "logits"  # (tokens, in, vocab)
    LOSS = "loss"  # (tokens, vocab): cross-entropy
    OPTIMIZER = "optimizer"  # (parameters,): those that this rank updates
    # (parameters, calls): optimizer over sharded tensors (DTensor), with host time per call
    SHARDED_OPTIMIZER = "sharded_optimizer"
    # (parameters, bytes that each moves on the device, parameters on the host, 1 if their copies
    # overlap the host's update): optimizer with states of stated width, or on the host
    STATED_OPTIMIZER = "stated_optimizer"
    SHARD_UNIT = "shard_unit"  # (): host time added to one pass of an FSDP unit
    HOST_MICROBATCH = "host_microbatch"  # (): rest of one forward or backward of a stage
    HOST_STEP = "host_step"  # (): rest of one step
    LINEAR = "linear"  # (tokens, in, out): a product in none of the roles above
    BATCHED_PRODUCT = "batched_product"  # (batch, rows, inner, columns)
    GROUPED_LINEAR = "grouped_linear"  # (experts, tokens over all of them, in, out)
    # (micro_batch, heads, query_groups, seq, query and key channels, value channels), causal
    FLASH_ATTENTION = "flash_attention"
    MASK = "mask"  # (rows, columns): fill of masked scores
    SOFTMAX = "softmax"  # (rows, columns): the framework's softmax, on masked scores
    FUSED_SOFTMAX = "fused_softmax"  # (matrices, rows, columns): scale, causal mask and softmax
    RMS_NORM = "rms_norm"  # (tokens, hidden): as a chain of eager calls
    ROTARY = "rotary"  # (seq, micro_batch, heads, channels): as a chain of eager calls
    ELEMENTWISE = "elementwise"  # (rows, columns)
    ROUTER = "router"  # (tokens, hidden, experts): product, top-k and weights
    # (tokens, hidden, copies of each token); in an expert layer each row counts as a token
    PERMUTE = "permute"
    EXPERTS = "experts"  # (tokens, hidden, ffn, top-k, experts here, experts in all): fused
    HOST_COPY = "host_copy"  # (bytes,): activations to host memory in the forward phase, then back
    # (tokens, hidden): a norm inside the product after it (Transformer Engine); measured times of
    # that product include it, so that it is never timed separately
    FUSED_NORM = "fused_norm"
    # (tokens, parameters on the rank): mixers of opaque layers, which only runs with them measure
    MAMBA = "mamba"
    DELTA_NET = "delta_net"
    SPARSE_ATTENTION = "sparse_attention"
    LINEAR_ATTENTION = "linear_attention"
    LAYER = "layer"  # (micro_batch, heads, seq, hidden, tp): a whole transformer layer

    @property
    def is_linear(self) -> bool:
        """True if the work is one matrix product per phase (two in the backward phase)."""
        return self in _LINEARS

    @property
    def is_product(self) -> bool:
        """True if the work is products with weights, of one matrix or several."""
        return self.is_linear or self is OperatorKind.GROUPED_LINEAR

    @property
    def is_opaque(self) -> bool:
        """True for the mixer of an opaque layer."""
        return self in OPAQUE_OPERATORS.values()

    @property
    def is_quantized(self) -> bool:
        """True if the work runs in 8 or 4 bits under such a recipe, from which Megatron excludes
        the logits and the router."""
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


OPAQUE_OPERATORS: Mapping[str, OperatorKind] = {
    "M": OperatorKind.MAMBA,
    "G": OperatorKind.DELTA_NET,
    "D": OperatorKind.SPARSE_ATTENTION,
    "L": OperatorKind.LINEAR_ATTENTION,
}
"""Operator of an opaque layer's mixer, by symbol in ``ModelShape.layer_kinds``."""
MODULES_BY_ATTRIBUTE: Mapping[str, OperatorKind] = {
    "input_layernorm": OperatorKind.NORM,
    "pre_mlp_layernorm": OperatorKind.NORM,
    "q_layernorm": OperatorKind.NORM,
    "k_layernorm": OperatorKind.NORM,
    "kv_layernorm": OperatorKind.NORM,
    "enorm": OperatorKind.NORM,
    "hnorm": OperatorKind.NORM,
    "final_layernorm": OperatorKind.NORM,
    "final_norm": OperatorKind.NORM,
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
"""Kinds that hooks assign to modules of a Megatron model, by the last part of the module's name."""
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
"""Kinds that hooks assign by the name of the module's class, or of one of its bases."""


class Phase(QuickEnum):
    """Phase of an operator.  Backward is input and weight gradient together."""

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
    """True for a product that stays in 16 bits while the layout's others run in 8 or 4."""


OperatorCount = tuple[Operator, int]
"""An operator and its count per pass."""


def optimizer_operator(
    parameters: int,
    *,
    calls: int = 0,
    moved_nbytes: int = 0,
    host_parameters: int = 0,
    is_overlapped: bool = False,
) -> Operator:
    """Return the optimizer of one rank over its parameters, in the form that hooks and layouts use.

    ``calls`` (on sharded tensors) takes precedence over ``moved_nbytes`` (stated width of states).

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
