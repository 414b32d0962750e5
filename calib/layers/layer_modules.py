"""Part of a layer as one Megatron module runs it, and the tensor-parallel traffic around it.

``ADDED_MODULES`` is the one place to add a module to every transformer layer: what it runs, and
what it keeps (docs/extending/operator_kind.md adds one with an operator of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..workload import (
    Collective,
    CollectiveCall,
    CollectiveUse,
    Engine,
    Fp8Recipe,
    GroupRole,
    Normalization,
    OperatorKind,
    Placement,
    RunConfig,
    group_call,
)
from .tensors import ParameterTensor

Shaped = tuple[OperatorKind, tuple[int, ...], int]
"""Kind, shape and how often one micro-batch runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModule:
    """What one module does for one micro-batch on one rank, forwards; backwards follows."""

    module: str
    """Name by which ``--recompute-modules`` knows it; other names are never recomputed alone."""
    operators: tuple[Shaped, ...] = ()
    uses: tuple[CollectiveUse, ...] = ()
    """Collectives of the forward and of the backward pass."""
    tensors: tuple[ParameterTensor, ...] = ()
    kept_nbytes: float = 0.0
    """Of an added module alone: ``memory.activations`` knows those of Megatron."""


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


def hidden_call(config: RunConfig, collective: Collective, width: int = 0) -> CollectiveCall:
    """A collective over tp that carries (tokens, width); 0 means hidden."""
    nbytes = tokens_of(config) * (width or config.model.hidden_size) * config.precision.nbytes
    return group_call(config, collective, GroupRole.TP, nbytes)


_GATHERED_BITS = {
    Fp8Recipe.DELAYED: 8.0,
    Fp8Recipe.TENSORWISE: 8.0,
    Fp8Recipe.MXFP8: 8 + 8 / 32,
    Fp8Recipe.BLOCKWISE: 8 + 32 / 128,
    Fp8Recipe.NVFP4: 4 + 8 / 16,
}
"""Bits of an element that is quantized before it is gathered, with its share of a block's scale."""


def gathered_call(config: RunConfig, *, is_quantized: bool, width: int = 0) -> CollectiveCall:
    """The gather of (tokens, width) over tp; ``is_quantized``: for a product in 8 bits.

    TransformerEngine quantizes first and gathers what the product reads.
    """
    call = hidden_call(config, Collective.ALL_GATHER, width)
    bits = _GATHERED_BITS.get(config.fp8) if is_quantized else None
    if bits is None:
        return call
    numel = call.nbytes // config.precision.nbytes
    return replace(call, nbytes=round(numel * bits / 8))


def norm_kind(config: RunConfig) -> OperatorKind:
    """The kind of a norm before a product, inside which Transformer Engine runs it."""
    return OperatorKind.FUSED_NORM if config.has_norms_inside else OperatorKind.NORM


def with_norm(config: RunConfig, name: str, part: LayerModule) -> tuple[LayerModule, LayerModule]:
    """A norm and the module whose first product it may run inside: then it is part of that."""
    norm = norm_module(config, name)
    if not config.has_norms_inside:
        return norm, part
    inside = tuple((norm_kind(config), shape, count) for _, shape, count in norm.operators)
    inner = replace(part, operators=(*inside, *part.operators))
    return replace(norm, module="", operators=()), inner


def norm_module(config: RunConfig, name: str, *, module: str = "layernorm") -> LayerModule:
    """One norm over hidden; its weights' gradients are partial under sequence parallelism."""
    width = config.model.hidden_size
    return LayerModule(
        module=module,
        operators=((OperatorKind.NORM, (local_tokens(config), width), 1),),
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
    weight = ParameterTensor(name=f"{name}.weight", numel=num_in * num_out, is_quantized=True)
    if not has_bias:
        return (weight,)
    return weight, ParameterTensor(name=f"{name}.bias", numel=num_out, is_sequence_parallel=is_row)


def column_uses(
    config: RunConfig, kind: OperatorKind, *, width: int = 0, is_in_layer: bool = True
) -> tuple[CollectiveUse, ...]:
    """Around a column-parallel linear whose input is (tokens, width); 0 means hidden.

    Forwards the input is gathered under sequence parallelism; backwards its gradient is summed,
    asynchronously behind one of the two products.  A linear in a layer may be quantized, and its
    gather run inside the product; that of the logits never.
    """
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        reduce = hidden_call(config, Collective.ALL_REDUCE, width)
        is_beside = config.parallelism.engine is Engine.MEGATRON
        return (transfer(reduce, Placement.BACKWARD, kind if is_beside else None),)
    gather = gathered_call(config, is_quantized=is_in_layer, width=width)
    scatter = hidden_call(config, Collective.REDUCE_SCATTER, width)
    is_inside = config.parallelism.overlaps_tp and is_in_layer
    return (
        transfer(gather, Placement.FORWARD, kind if is_inside else None),
        transfer(gather, Placement.BACKWARD, kind),
        transfer(scatter, Placement.BACKWARD, kind),
    )


def row_uses(config: RunConfig, kind: OperatorKind | None = None) -> tuple[CollectiveUse, ...]:
    """After a row-parallel linear of that kind whose output is (tokens, hidden)."""
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        return (transfer(hidden_call(config, Collective.ALL_REDUCE), Placement.FORWARD),)
    behind = kind if config.parallelism.overlaps_tp else None
    scatter = hidden_call(config, Collective.REDUCE_SCATTER)
    gather = gathered_call(config, is_quantized=True)
    return (
        transfer(scatter, Placement.FORWARD, behind),
        transfer(gather, Placement.BACKWARD, behind),
    )


def transfer(
    call: CollectiveCall,
    placement: Placement,
    behind: OperatorKind | None = None,
    *,
    is_overlapped: bool = False,
) -> CollectiveUse:
    """One transfer; one that runs beside the operator ``behind`` is overlapped as well."""
    return CollectiveUse(
        call=call,
        count=1,
        placement=placement,
        is_overlapped=is_overlapped or behind is not None,
        overlaps_with=behind,
    )


def between_ranks(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    """Those over more than one rank; the others carry nothing."""
    return tuple(use for use in uses if use.call.num_ranks > 1)


ADDED_MODULES: tuple[Callable[[RunConfig], LayerModule], ...] = ()
"""Each from a layout; one that a model has not, runs no operators and keeps nothing."""


def added_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Those of a layer, in the order in which they run."""
    return tuple(make(config) for make in ADDED_MODULES)


def added_kept_nbytes(config: RunConfig) -> float:
    """What they keep of one micro-batch until its backward pass."""
    return float(sum(module.kept_nbytes for module in added_modules(config)))
