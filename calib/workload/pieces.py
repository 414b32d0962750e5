"""Part of a layer as one Megatron module runs it, and the tensor-parallel traffic around it."""

from __future__ import annotations

from dataclasses import dataclass

from .collectives import (
    Collective,
    CollectiveCall,
    CollectiveUse,
    GroupRole,
    Placement,
)
from .config import Normalization, RunConfig
from .operators import OperatorKind
from .ranks import group_call
from .tensors import ParameterTensor

Shaped = tuple[OperatorKind, tuple[int, ...], int]
"""Kind, shape and how often one micro-batch runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one module does for one micro-batch on one rank, forwards; backwards follows."""

    module: str
    """Name by which ``--recompute-modules`` knows it; other names are never recomputed alone."""
    operators: tuple[Shaped, ...] = ()
    uses: tuple[CollectiveUse, ...] = ()
    """Collectives of the forward and of the backward pass."""
    tensors: tuple[ParameterTensor, ...] = ()


def tokens_of(config: RunConfig) -> int:
    """Tokens of one micro-batch on one rank, whole over tp."""
    return config.batch.micro_batch_size * config.local_seq_length


def local_tokens(config: RunConfig) -> int:
    """The same where sequence parallelism splits them over tp."""
    par = config.parallelism
    return tokens_of(config) // par.tp if par.is_sequence_parallel else tokens_of(config)


def hidden_nbytes(config: RunConfig) -> int:
    """Bytes of (tokens, hidden) in the element size of activations."""
    return tokens_of(config) * config.model.hidden_size * config.precision.nbytes


def hidden_call(config: RunConfig, collective: Collective) -> CollectiveCall:
    """A collective over tp that carries (tokens, hidden)."""
    return group_call(config, collective, GroupRole.TP, hidden_nbytes(config))


def norm_piece(config: RunConfig, name: str, count: int = 1) -> Piece:
    """One norm over hidden; its weights' gradients are partial under sequence parallelism."""
    width = config.model.hidden_size
    return Piece(
        module="layernorm",
        operators=((OperatorKind.NORM, (local_tokens(config), width), count),),
        tensors=norm_tensors(config, name, width),
    )


def norm_tensors(config: RunConfig, name: str, width: int) -> tuple[ParameterTensor, ...]:
    """Weight, and for LayerNorm bias, of a norm."""
    is_layer_norm = config.model.normalization is Normalization.LAYER_NORM
    parts = ("weight", "bias") if is_layer_norm else ("weight",)
    return tuple(
        ParameterTensor(name=f"{name}.{part}", numel=width, is_sequence_parallel=True)
        for part in parts
    )


def linear_tensors(
    name: str, num_in: int, num_out: int, *, has_bias: bool, is_row: bool = False
) -> tuple[ParameterTensor, ...]:
    """Weight and bias of a linear; a row-parallel bias is whole on every tp rank."""
    weight = ParameterTensor(name=f"{name}.weight", numel=num_in * num_out)
    if not has_bias:
        return (weight,)
    return weight, ParameterTensor(name=f"{name}.bias", numel=num_out, is_sequence_parallel=is_row)


def column_uses(config: RunConfig, kind: OperatorKind) -> tuple[CollectiveUse, ...]:
    """Around a column-parallel linear whose input is (tokens, hidden).

    Forwards the input is gathered under sequence parallelism; backwards its gradient is summed,
    asynchronously behind one of the two products.
    """
    if config.parallelism.tp == 1:
        return ()
    kinds = [Collective.ALL_REDUCE]
    uses: list[CollectiveUse] = []
    if config.parallelism.is_sequence_parallel:
        kinds = [Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
        gather = hidden_call(config, Collective.ALL_GATHER)
        uses.append(CollectiveUse(call=gather, count=1, placement=Placement.FORWARD))
    uses += [
        CollectiveUse(
            call=hidden_call(config, collective),
            count=1,
            placement=Placement.BACKWARD,
            is_overlapped=True,
            hides_behind=kind,
        )
        for collective in kinds
    ]
    return tuple(uses)


def row_uses(config: RunConfig) -> tuple[CollectiveUse, ...]:
    """After a row-parallel linear whose output is (tokens, hidden)."""
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        call = hidden_call(config, Collective.ALL_REDUCE)
        return (CollectiveUse(call=call, count=1, placement=Placement.FORWARD),)
    scatter = hidden_call(config, Collective.REDUCE_SCATTER)
    gather = hidden_call(config, Collective.ALL_GATHER)
    return (
        CollectiveUse(call=scatter, count=1, placement=Placement.FORWARD),
        CollectiveUse(call=gather, count=1, placement=Placement.BACKWARD),
    )
