"""Layer modules: the part of a layer that one Megatron module runs, with its transfers over tp.

``ADDED_MODULES`` is the one place to add a module to every transformer layer: its operators, and
the bytes that it saves (docs/extending/operator_kind.md adds one with a new operator kind).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ..workload.collectives import Collective, CollectiveCall, CollectiveUse, GroupRole, Placement
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.model_shape import Normalization
from ..workload.operators import OperatorKind
from ..workload.parallelism import Engine
from ..workload.ranks import group_call
from .tensors import ParameterTensor

Shaped = tuple[OperatorKind, tuple[int, ...], int]
"""Kind, shape and count per micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModule:
    """Forward operators of one module for one micro-batch on one rank; backward ones derive from
    them."""

    module: str
    """Name in ``--recompute-modules``; modules with other names are never recomputed alone."""
    operators: tuple[Shaped, ...] = ()
    uses: tuple[CollectiveUse, ...] = ()
    """Collectives of the forward and of the backward pass."""
    tensors: tuple[ParameterTensor, ...] = ()
    saved_nbytes: float = 0.0
    """Activations of an added module; ``memory.activations`` counts those of Megatron's modules."""


def tokens_of(config: RunConfig) -> int:
    """Return the tokens of one micro-batch on one rank, before tp splits them."""
    return config.batch.micro_batch_size * config.local_seq_length


def local_tokens(config: RunConfig) -> int:
    """Return the tokens of one micro-batch on one rank, over tp under sequence parallelism."""
    par = config.parallelism
    return tokens_of(config) // par.tp if par.is_sequence_parallel else tokens_of(config)


def hidden_nbytes(config: RunConfig) -> int:
    """Return the bytes of (tokens, hidden) in the element size of activations."""
    return tokens_of(config) * config.model.hidden_size * config.precision.nbytes


def hidden_call(config: RunConfig, collective: Collective, width: int = 0) -> CollectiveCall:
    """Return a collective over tp that carries (tokens, width); width 0 means hidden."""
    nbytes = tokens_of(config) * (width or config.model.hidden_size) * config.precision.nbytes
    return group_call(config, collective, GroupRole.TP, nbytes)


_GATHERED_BITS = {
    Fp8Recipe.DELAYED: 8.0,
    Fp8Recipe.TENSORWISE: 8.0,
    Fp8Recipe.MXFP8: 8 + 8 / 32,
    Fp8Recipe.BLOCKWISE: 8 + 32 / 128,
    Fp8Recipe.NVFP4: 4 + 8 / 16,
}
"""Bits of an element quantized before the gather, including its share of a block's scale."""


def gathered_call(config: RunConfig, *, is_quantized: bool, width: int = 0) -> CollectiveCall:
    """Return the gather of (tokens, width) over tp; ``is_quantized``: for a product in 8 bits.

    TransformerEngine quantizes before the gather.
    """
    call = hidden_call(config, Collective.ALL_GATHER, width)
    bits = _GATHERED_BITS.get(config.fp8) if is_quantized else None
    if bits is None:
        return call
    numel = call.nbytes // config.precision.nbytes
    return replace(call, nbytes=round(numel * bits / 8))


def norm_kind(config: RunConfig) -> OperatorKind:
    """Return the kind of a norm before a product: fused if Transformer Engine runs it inside."""
    return OperatorKind.FUSED_NORM if config.has_norms_inside else OperatorKind.NORM


def with_norm(config: RunConfig, name: str, part: LayerModule) -> tuple[LayerModule, LayerModule]:
    """Return a norm and the module after it; a fused norm moves into that module's operators."""
    norm = norm_module(config, name)
    if not config.has_norms_inside:
        return norm, part
    inside = tuple((norm_kind(config), shape, count) for _, shape, count in norm.operators)
    inner = replace(part, operators=(*inside, *part.operators))
    return replace(norm, module="", operators=()), inner


def norm_module(config: RunConfig, name: str, *, module: str = "layernorm") -> LayerModule:
    """Return one norm over hidden; its weight gradients are partial under sequence parallelism."""
    width = config.model.hidden_size
    return LayerModule(
        module=module,
        operators=((OperatorKind.NORM, (local_tokens(config), width), 1),),
        tensors=norm_tensors(config, name, width),
    )


def norm_tensors(config: RunConfig, name: str, width: int) -> tuple[ParameterTensor, ...]:
    """Return the weight of a norm, and for LayerNorm its bias."""
    is_layer_norm = config.model.normalization is Normalization.LAYER_NORM
    parts = ("weight", "bias") if is_layer_norm else ("weight",)
    return tuple(
        ParameterTensor(name=f"{name}.{part}", numel=width, is_sequence_parallel=True)
        for part in parts
    )


def linear_tensors(
    name: str, num_in: int, num_out: int, *, has_bias: bool, is_row: bool = False
) -> tuple[ParameterTensor, ...]:
    """Return weight and bias of a linear; a row-parallel bias is replicated over tp."""
    weight = ParameterTensor(name=f"{name}.weight", numel=num_in * num_out, is_quantized=True)
    if not has_bias:
        return (weight,)
    return weight, ParameterTensor(name=f"{name}.bias", numel=num_out, is_sequence_parallel=is_row)


def column_uses(
    config: RunConfig, kind: OperatorKind, *, width: int = 0, is_in_layer: bool = True
) -> tuple[CollectiveUse, ...]:
    """Return the collectives of a column-parallel linear with input (tokens, width); 0: hidden.

    Under sequence parallelism the forward pass gathers the input; the backward pass sums its
    gradient, overlapping one of the two products.  A linear in a layer may be quantized, and its
    gather may run inside the product; neither holds for the logits.
    """
    if config.parallelism.tp == 1:
        return ()
    if not config.parallelism.is_sequence_parallel:
        reduce = hidden_call(config, Collective.ALL_REDUCE, width)
        is_overlapped = config.parallelism.engine is Engine.MEGATRON
        return (transfer(reduce, Placement.BACKWARD, kind if is_overlapped else None),)
    gather = gathered_call(config, is_quantized=is_in_layer, width=width)
    scatter = hidden_call(config, Collective.REDUCE_SCATTER, width)
    is_inside = config.parallelism.overlaps_tp and is_in_layer
    return (
        transfer(gather, Placement.FORWARD, kind if is_inside else None),
        transfer(gather, Placement.BACKWARD, kind),
        transfer(scatter, Placement.BACKWARD, kind),
    )


def row_uses(config: RunConfig, kind: OperatorKind | None = None) -> tuple[CollectiveUse, ...]:
    """Return the collectives of a row-parallel linear of that kind with output (tokens, hidden)."""
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
    """Return one use of a collective; it is also overlapped if ``behind`` names an operator."""
    return CollectiveUse(
        call=call,
        count=1,
        placement=placement,
        is_overlapped=is_overlapped or behind is not None,
        overlaps_with=behind,
    )


def between_ranks(uses: Iterable[CollectiveUse]) -> tuple[CollectiveUse, ...]:
    """Return the collectives over more than one rank; the others carry nothing."""
    return tuple(use for use in uses if use.call.num_ranks > 1)


ADDED_MODULES: tuple[Callable[[RunConfig], LayerModule], ...] = ()
"""Factories of added modules, from a layout; each returns an empty module if the model has none."""


def added_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Return the added modules of a layer, in execution order."""
    return tuple(make(config) for make in ADDED_MODULES)


def added_saved_nbytes(config: RunConfig) -> float:
    """Return the bytes that added modules save of one micro-batch until its backward pass."""
    return float(sum(module.saved_nbytes for module in added_modules(config)))
