"""Seconds of items: base times adapted to a layout's stack, and the constants applied to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..fit.estimates import Estimates, Source
from ..network.cluster import LINK_SIGMA_LOG, host_copy_s
from ..timeline.compiled import Compiled
from ..timeline.items import Floats, Item, family
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.model_shape import Normalization, PositionEmbedding
from ..workload.operators import Operator, OperatorKind, Phase
from ._scales import OPTIMIZERS, Scale, optimizer_s, scales, weights
from .base_times import BaseTimes, GenericAttention, decomposed, mean_scores_frac

Kind = OperatorKind
_FASTEST_S = 1e-7
"""Keeps logarithms finite; no kernel is this short."""
_INSIDE_S = 1e-9
"""Time of operators that are included in others: keeps logarithms finite and adds nothing."""
_FP4_FRAC = 0.6
"""Time of 4-bit over 8-bit products: a peak ratio of 0.5, and kernels that reach less of it."""
KNOWN_FRAC = 0.15
"""Share of a constant's deviation that remains for items sampled in training itself."""
SCALE, FAMILY = "scale", "family"
Constant = tuple[object, ...]
"""Identity of a constant: equal names are the same constant."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedItems:
    """Items with the constants that their times depend on."""

    base_s: Floats
    """Seconds of each item with all constants at their centres."""
    sources: tuple[Source, ...]
    """Provenance of the time of each item."""
    is_rescaled: NDArray[np.bool_]
    """True for operators that were measured in training at another number of rows."""
    weights: Floats
    """Power of each scale and family in each item, shape (items, scales + families)."""
    scales: tuple[Scale, ...]
    families: tuple[str, ...]

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Names of scales and families, in the order of all vectors of constants."""
        named = [(SCALE, scale.name) for scale in self.scales]
        return (*named, *((FAMILY, name) for name in self.families))

    def time_s(self, theta: Floats) -> Floats:
        """Return seconds, shape (items, columns), for constants of shape (constants, columns)."""
        return self.base_s[:, np.newaxis] * np.exp(
            weighted_sums(self.weights, theta[: len(self.constants)])
        )

    def named(self, theta: Floats, name: str) -> Floats:
        """Return the value of a constant that is a time or a ratio of its own, shape (columns,)."""
        place = next(i for i, scale in enumerate(self.scales) if scale.name == name)
        return np.exp(self.scales[place].log_center + theta[place])


def weighted_sums(powers: Floats, values: Floats) -> Floats:
    """Return ``powers @ values``, one column after the other.

    Unlike a product of BLAS, the sum of a row depends neither on the number of rows nor on columns
    of which it has none.
    """
    out = np.zeros((len(powers), *values.shape[1:]))
    for column, value in zip(powers.T, values, strict=True):
        out += column.reshape(-1, *(1,) * value.ndim) * value
    return out


def priced_items(compiled: Compiled, base: BaseTimes) -> PricedItems:
    """Price the items of compiled layouts, or of parts of them, over base times."""
    known = base.conditions
    chosen = scales(known)
    estimates = base_estimates(compiled, base)
    _refuse_unmeasured(compiled, estimates)
    is_prior = np.array([source is Source.PRIOR for source in estimates.sources], dtype=bool)
    is_new = is_prior | (not known.is_in_situ)
    powers = weights(compiled.items, chosen)
    centers = np.array([scale.log_center for scale in chosen])
    families, spreads = _families(compiled.items, estimates.sigma_log)
    remaining_powers = powers * np.where(is_new, 1.0, KNOWN_FRAC)[:, np.newaxis]
    return PricedItems(
        base_s=estimates.time_s * np.exp(np.where(is_new, weighted_sums(powers, centers), 0.0)),
        sources=estimates.sources,
        is_rescaled=_flags(estimates),
        weights=np.hstack([remaining_powers, spreads]),
        scales=chosen,
        families=families,
    )


def _flags(estimates: Estimates) -> NDArray[np.bool_]:
    if estimates.is_rescaled is None:
        return np.zeros(len(estimates.sources), dtype=np.bool_)
    return estimates.is_rescaled


def _refuse_unmeasured(compiled: Compiled, estimates: Estimates) -> None:
    """Raise ``ConfigError`` if a layer that has no law was not measured."""
    unmeasured = {
        item.kind.value
        for item, source in zip(compiled.items, estimates.sources, strict=True)
        if isinstance(item, Operator) and item.kind.is_opaque and source is Source.PRIOR
    }
    if unmeasured:
        raise ConfigError(
            f"the model has {' and '.join(sorted(unmeasured))} layers, whose time only a run that "
            f"trains them measures; run it with --calibrate and predict from its directory"
        )


def _families(items: Sequence[Item], sigma_log: Floats) -> tuple[tuple[str, ...], Floats]:
    """Return the families of models with a deviation, and the deviation of each item, (items,
    families).

    The errors of one operator kind or kind of transfer are fully correlated: they add up linearly
    over the step, and in quadrature across kinds.
    """
    names = [family(item) for item in items]
    families = sorted({name for name, sigma in zip(names, sigma_log, strict=True) if sigma > 0})
    is_of = np.array([[name == other for other in families] for name in names], dtype=np.float64)
    return tuple(families), is_of.reshape(len(items), len(families)) * sigma_log[:, np.newaxis]


def base_estimates(compiled: Compiled, base: BaseTimes) -> Estimates:
    """Return each item's median, deviation and provenance, shape (items,).

    Unless measured, an optimizer has no launches of its own, since a step's host constant includes
    them, and the operators between the query-key-value product and attention cost no more than a
    copy in models without rotary embeddings. A norm inside a product costs as much as any norm if
    products were timed without it, and nothing more if they were timed with it.
    """
    estimates = _as_run(compiled, base)
    out, bytes_per_s = estimates.time_s.copy(), base.conditions.bytes_per_s
    sigma_log = estimates.sigma_log.copy()
    splits, device = _splits(compiled), compiled.table.base.device
    for place, item in enumerate(compiled.items):
        if not isinstance(item, Operator) or estimates.sources[place] is not Source.PRIOR:
            continue
        if item.kind is Kind.HOST_COPY:
            out[place] = host_copy_s(item, device)
            sigma_log[place] = LINK_SIGMA_LOG
        elif item.kind in OPTIMIZERS:
            update_s = optimizer_s(item, device=device, bytes_per_s=bytes_per_s)
            out[place] = max(_FASTEST_S, update_s)
        elif item in splits:
            # In the forward they are views; in the backward one copy joins the three gradients.
            is_copied = item.phase is Phase.BACKWARD
            nbytes = 2 * is_copied * math.prod(item.shape) * item.element_nbytes
            out[place] = max(_FASTEST_S, nbytes / bytes_per_s)
    generic = base.conditions.generic_attention
    for place, (shift, sigma) in _generic_attention(compiled, generic).items() if generic else ():
        if estimates.sources[place] is Source.PRIOR:
            out[place] *= math.exp(shift)
            sigma_log[place] = sigma or sigma_log[place]
    if base.conditions.has_norms_inside:
        # The products' times include them.
        inside = [place for place, item in enumerate(compiled.items) if _is_fused_norm(item)]
        out[inside], sigma_log[inside] = _INSIDE_S, 0.0
    for place in _emulated(compiled):
        if estimates.sources[place] is Source.PRIOR:
            wide = replace(cast(Operator, compiled.items[place]), element_nbytes=4)
            out[place] = base.estimates([wide]).time_s[0]
    for places, factor in _quantized(compiled, base.conditions.fp8):
        narrow = [replace(cast(Operator, compiled.items[p]), element_nbytes=1) for p in places]
        casts = np.array([_cast_nbytes(operator) for operator in narrow]) / bytes_per_s
        out[places] = factor * base.estimates(narrow).time_s + casts
    return replace(estimates, time_s=out, sigma_log=sigma_log)


def _generic_attention(
    compiled: Compiled, generic: GenericAttention
) -> dict[int, tuple[float, float]]:
    """Return the log ratio and deviation of attention that may run in a kernel not made for the
    device, by its index."""
    index = {item: place for place, item in enumerate(compiled.items)}
    return {
        index[operator]: generic.ratio(
            operator.phase, is_stated=generic.is_only_one or not config.is_attention_unstated
        )
        for block, config in zip(compiled.blocks, compiled.block_configs, strict=True)
        if (config.may_run_flash_2 if generic.is_only_one else config.is_attention_generic)
        for operator, _ in block.operators
        if operator.kind is Kind.CORE_ATTENTION
    }


def _is_fused_norm(item: Item) -> bool:
    return isinstance(item, Operator) and item.kind is Kind.FUSED_NORM


def _as_run(compiled: Compiled, base: BaseTimes) -> Estimates:
    """Estimate items with operators under the names that tables have for the stack of each
    layout."""
    parts: list[tuple[tuple[float, Item], ...]] = [((1.0, item),) for item in compiled.items]
    index = {item: place for place, item in enumerate(compiled.items)}
    for block, config in zip(compiled.blocks, compiled.block_configs, strict=True):
        for operator, _ in block.operators:
            if operator.kind in _RENAMED:
                parts[index[operator]] = tuple(
                    (share, part)
                    for share, one in _by_window(operator, config, base)
                    for part in _stack_operators(one, config, base)
                )
    estimates = base.estimates([part for one in parts for _, part in one])
    numbers = np.array([len(one) for one in parts])
    shares = np.array([share for one in parts for share, _ in one])
    if (numbers == 1).all() and (shares == 1.0).all():
        return estimates
    first = np.concatenate([[0], np.cumsum(numbers)[:-1]])
    return Estimates(
        time_s=np.add.reduceat(shares * estimates.time_s, first),
        sigma_log=np.maximum.reduceat(estimates.sigma_log, first),
        sources=tuple(estimates.sources[place] for place in first.tolist()),
        is_rescaled=_flags(estimates)[first],
    )


def _by_window(
    operator: Operator, config: RunConfig, base: BaseTimes
) -> list[tuple[float, Operator]]:
    """Return shares of layers, each with the operator that has as many scores as theirs.

    Unfused attention computes scores and masks them.  The operators of a run ran under its windows,
    so that other windows, or another sample length, change them by the ratio of scores.
    """
    if operator.kind is not Kind.CORE_ATTENTION or not config.is_attention_fused:
        return [(1.0, operator)]
    known = base.conditions
    if known.is_in_situ:
        return [(mean_scores_frac(config) / known.scores_frac, operator)]
    limited_frac, scores_frac = config.model.limits
    short = replace(operator, shape=_causal_shape(operator.shape, scores_frac))
    both = [(limited_frac, short), (1.0 - limited_frac, operator)]
    return [one for one in both if one[0] > 0.0]


def _stack_operators(
    operator: Operator, config: RunConfig, base: BaseTimes
) -> tuple[Operator, ...]:
    """Return the operators timed in place of a layout's operator, or the operator itself.

    Eager stacks run RMSNorm and rotation as chains of calls: those that tables time so, and models
    of transformers (``LlamaRMSNorm.forward``, ``apply_rotary_pos_emb``).
    """
    is_chain = config.is_eager_torch and config.framework.startswith("transformers")
    model, phase = config.model, operator.phase
    phase = Phase.FORWARD if phase is Phase.RECOMPUTE else phase
    is_rms = model.normalization is Normalization.RMS_NORM
    if operator.kind in (Kind.NORM, Kind.FUSED_NORM):
        if is_rms and (is_chain or base.has(Kind.RMS_NORM, phase)):
            return (replace(operator, kind=Kind.RMS_NORM, phase=phase),)
        return (replace(operator, kind=Kind.NORM),)
    is_rotated = model.position_embedding is PositionEmbedding.ROPE
    has_rotary = is_chain or base.has(Kind.ROTARY, phase)
    if operator.kind is Kind.POSITION and is_rotated and has_rotary:
        # With context parallelism as many tokens of shorter samples.
        tokens, heads = operator.shape[0], model.num_attention_heads // config.parallelism.tp
        samples = max(1, tokens // model.seq_length)
        shape = (tokens // samples, samples, heads, model.kv_channels)
        return (replace(operator, kind=Kind.ROTARY, phase=phase, shape=shape),)
    # Base times have attention as in the layouts that they are made for; a run's own, as it ran.
    known = base.conditions
    is_other = known.is_attention_fused is not config.is_attention_fused and not known.is_in_situ
    if operator.kind is Kind.CORE_ATTENTION and config.is_attention_fused:
        if not (is_other or base.has(Kind.FLASH_ATTENTION, phase)):
            return (operator,)
        shape = (*operator.shape, operator.shape[-1])
        return (replace(operator, kind=Kind.FLASH_ATTENTION, phase=phase, shape=shape),)
    if operator.kind is Kind.CORE_ATTENTION and is_other:
        return tuple(decomposed(replace(operator, phase=phase), is_fused=False))
    return (operator,)


def _causal_shape(shape: tuple[int, ...], scores_frac: float) -> tuple[int, ...]:
    """Return the shape of causal attention with as many scores as fused attention under a window:
    more, shorter samples, about as many tokens.

    >>> _causal_shape((1, 32, 8, 4096, 128), 0.25)
    (4, 32, 8, 1024, 128)
    """
    batch, heads, groups, seq, channels = shape
    number = max(1, round(batch / scores_frac))
    length = max(1, round(seq * math.sqrt(batch * scores_frac / number)))
    return number, heads, groups, length, channels


_RENAMED = (Kind.NORM, Kind.FUSED_NORM, Kind.POSITION, Kind.CORE_ATTENTION)


def _emulated(compiled: Compiled) -> set[int]:
    """Return the indices of 16-bit products for which the device has no tensor cores."""
    index = {item: place for place, item in enumerate(compiled.items)}
    return {
        index[operator]
        for block, config in zip(compiled.blocks, compiled.block_configs, strict=True)
        if config.is_without_tensor_cores
        for operator, _ in block.operators
        if operator.kind.is_product
    }


def _quantized(compiled: Compiled, timed: Fp8Recipe) -> list[tuple[list[int], float]]:
    """Return indices of products that run in 8 or 4 bits, with the ratio of their time to that in 8
    bits.

    Products of 4 bits have twice the peak of those of 8. Items ``timed`` under a recipe already
    have its times.
    """
    index = {item: place for place, item in enumerate(compiled.items)}
    places_by_factor: dict[float, dict[int, None]] = {}
    for block, config in zip(compiled.blocks, compiled.block_configs, strict=True):
        if config.fp8 in (Fp8Recipe.NONE, timed):
            continue
        places = places_by_factor.setdefault(
            _FP4_FRAC if config.fp8 is Fp8Recipe.NVFP4 else 1.0, {}
        )
        for operator, _ in block.operators:
            if operator.kind.is_quantized and not operator.is_wide:
                places[index[operator]] = None
    return [(list(places), factor) for factor, places in places_by_factor.items()]


def _cast_nbytes(operator: Operator) -> float:
    """Return the traffic of quantising a product's input: 2 bytes in, the values and their
    transpose out.

    That is the input in the forward, and the gradient of the output in the backward; quantised
    weights are cached.
    """
    tokens, num_in, num_out = operator.shape[-3:]
    return 4.0 * tokens * (num_out if operator.phase is Phase.BACKWARD else num_in)


def _splits(compiled: Compiled) -> set[Operator]:
    """Return the operators before attention in models without rotary embeddings."""
    return {
        operator
        for block, config in zip(compiled.blocks, compiled.block_configs, strict=True)
        if config.model.position_embedding is not PositionEmbedding.ROPE
        for operator, _ in block.operators
        if operator.kind is Kind.POSITION
    }
