"""The operators that we model: identity, and the list of them that a layout runs.

The identity (kind, phase, shape) is the meeting point of what hooks record and what a layout
generates: both sides build ``Operator`` values, and equal values are the same work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .config import Recompute, RunConfig
from .parameters import check_stage, parameters, updated_parameters

__all__ = [
    "Operator",
    "OperatorCount",
    "OperatorKind",
    "Phase",
    "StageOperators",
    "parameters",
    "recomputed_layers",
    "stage_operators",
]

OPTIMIZER_ELEMENT_NBYTES = 4
"""The optimizer works on fp32 copies in every precision."""


class OperatorKind(Enum):
    """What is computed.  The comment gives the canonical shape, sizes local to one rank.

    The kinds down to the two host remainders are what ``stage_operators`` generates; the rest are
    operators of other builds of Megatron and of public measurements, and have laws only.
    """

    EMBEDDING = "embedding"  # (tokens, hidden, vocab)
    NORM = "norm"  # (tokens, hidden)
    LINEAR_QKV = "linear_qkv"  # (tokens, in, out)
    POSITION = "position"  # (tokens, qkv width): rotary embedding, split and reshape of q, k, v
    CORE_ATTENTION = "core_attention"  # (micro_batch, heads, query_groups, seq, kv_channels)
    LINEAR_PROJ = "linear_proj"  # (tokens, in, out)
    RESIDUAL = "residual"  # (tokens, hidden): both bias-dropout-adds of a layer together
    LINEAR_FC1 = "linear_fc1"  # (tokens, in, out)
    ACTIVATION = "activation"  # (tokens, in, out): in = fc1's out, out = fc2's in
    LINEAR_FC2 = "linear_fc2"  # (tokens, in, out)
    LOGITS = "logits"  # (tokens, in, vocab)
    LOSS = "loss"  # (tokens, vocab): cross-entropy
    OPTIMIZER = "optimizer"  # (parameters,): those that this rank updates
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
    PERMUTE = "permute"  # (tokens, hidden, copies of each token)
    EXPERTS = "experts"  # (tokens, hidden, ffn, top-k, experts here, experts in all): fused
    LAYER = "layer"  # (micro_batch, heads, seq, hidden, tp): a whole transformer layer

    @property
    def is_linear(self) -> bool:
        """True where the work is one matrix product per phase (two in the backward phase)."""
        return self in _LINEARS


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


class Phase(Enum):
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


OperatorCount = tuple[Operator, int]
"""An operator and how often it runs in its pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOperators:
    """What one rank of a stage runs: three lists per micro-batch, one per step."""

    forward: tuple[OperatorCount, ...]
    backward: tuple[OperatorCount, ...]
    recompute: tuple[OperatorCount, ...]
    """Forward operators that run again within the backward pass."""
    step: tuple[OperatorCount, ...]


def stage_operators(config: RunConfig, stage: int) -> StageOperators:
    """The operators of one micro-batch on one rank of ``stage``, and those of a step.

    Every model operator carries the element size of the activations, ``OPTIMIZER`` that of fp32,
    and the two host remainders none (0).
    """
    check_stage(config, stage)
    nbytes = config.precision.nbytes
    layer = _layer_shapes(config)
    num_layers = config.layers_per_stage
    whole = [(kind, shape, count * num_layers) for kind, shape, count in layer]
    whole += _edge_shapes(config, stage)
    again: list[_Shaped] = []
    if config.recompute is Recompute.FULL:
        covered = recomputed_layers(config)
        again = [(kind, shape, count * covered) for kind, shape, count in layer]
    elif config.recompute is Recompute.SELECTIVE:
        again = [s for s in whole if s[0] is OperatorKind.CORE_ATTENTION]
    return StageOperators(
        forward=_counted(_merged(whole), Phase.FORWARD, nbytes),
        backward=_counted(_merged(whole), Phase.BACKWARD, nbytes),
        recompute=_counted(again, Phase.RECOMPUTE, nbytes),
        step=(
            _count(
                OperatorKind.OPTIMIZER,
                Phase.STEP,
                (updated_parameters(config, stage),),
                OPTIMIZER_ELEMENT_NBYTES,
                1,
            ),
            _count(OperatorKind.HOST_STEP, Phase.STEP, (), 0, 1),
        ),
    )


def recomputed_layers(config: RunConfig) -> int:
    """Layers of each stage whose forward runs again under ``FULL`` (0 otherwise)."""
    if config.recompute is not Recompute.FULL:
        return 0
    return min(config.recompute_num_layers or config.layers_per_stage, config.layers_per_stage)


_Shaped = tuple[OperatorKind, tuple[int, ...], int]


def _layer_shapes(config: RunConfig) -> list[_Shaped]:
    model, tp = config.model, config.parallelism.tp
    batch = config.batch.micro_batch_size
    hidden, channels = model.hidden_size, model.kv_channels
    tokens, local = batch * model.seq_length, _local_tokens(config)
    heads, groups = model.num_attention_heads // tp, model.num_query_groups // tp
    qkv = (heads + 2 * groups) * channels
    ffn = model.ffn_hidden_size // tp
    fc1 = ffn * (2 if model.is_gated else 1)
    kind = OperatorKind
    return [
        (kind.NORM, (local, hidden), 2),
        (kind.LINEAR_QKV, (tokens, hidden, qkv), 1),
        (kind.POSITION, (tokens, qkv), 1),
        (kind.CORE_ATTENTION, (batch, heads, groups, model.seq_length, channels), 1),
        (kind.LINEAR_PROJ, (tokens, heads * channels, hidden), 1),
        (kind.RESIDUAL, (local, hidden), 1),
        (kind.LINEAR_FC1, (tokens, hidden, fc1), 1),
        (kind.ACTIVATION, (tokens, fc1, ffn), 1),
        (kind.LINEAR_FC2, (tokens, ffn, hidden), 1),
    ]


def _edge_shapes(config: RunConfig, stage: int) -> list[_Shaped]:
    model, par = config.model, config.parallelism
    tokens, local = config.batch.micro_batch_size * model.seq_length, _local_tokens(config)
    vocab = model.vocab_size // par.tp
    out: list[_Shaped] = [(OperatorKind.HOST_MICROBATCH, (), 1)]
    if stage == 0:
        out.append((OperatorKind.EMBEDDING, (tokens, model.hidden_size, vocab), 1))
    if stage == par.pp - 1:
        out.append((OperatorKind.NORM, (local, model.hidden_size), 1))
        out.append((OperatorKind.LOGITS, (tokens, model.hidden_size, vocab), 1))
        out.append((OperatorKind.LOSS, (tokens, vocab), 1))
    return out


def _local_tokens(config: RunConfig) -> int:
    par = config.parallelism
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return tokens // par.tp if par.is_sequence_parallel else tokens


def _merged(shaped: list[_Shaped]) -> list[_Shaped]:
    counts: dict[tuple[OperatorKind, tuple[int, ...]], int] = {}
    for kind, shape, count in shaped:
        counts[kind, shape] = counts.get((kind, shape), 0) + count
    return [(kind, shape, count) for (kind, shape), count in counts.items()]


def _counted(shaped: list[_Shaped], phase: Phase, nbytes: int) -> tuple[OperatorCount, ...]:
    return tuple(
        _count(kind, phase, shape, 0 if kind is OperatorKind.HOST_MICROBATCH else nbytes, count)
        for kind, shape, count in shaped
        if count
    )


def _count(
    kind: OperatorKind, phase: Phase, shape: tuple[int, ...], nbytes: int, count: int
) -> OperatorCount:
    return Operator(kind=kind, phase=phase, shape=shape, element_nbytes=nbytes), count
