"""Base times of operators and collectives before any step was measured: tables, else priors.

On a stack with fused kernels, operators that no table times are priced by the bytes that each
kernel reads and writes. Rate and fixed cost of a kernel are those that SimuMax publishes with its
system tables (v1.2, ``configs/system``): two thirds of the data sheet on B200, and 30 us (B200) to
40 us (A100) a kernel. No constant was fitted here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..fit.batches import batch_of
from ..fit.estimates import Estimates, Source
from ..fit.priors import UNKNOWN_DEVICE, DevicePrior
from ..fit.rate_priors import generation, rates_prior
from ..network.collective_times import CollectiveModel
from ..network.groups import canonical, group_of
from ..network.systems import NetworkPrior
from ..timeline.items import Floats, Item
from ..workload.collectives import CollectiveCall
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.operators import Operator, OperatorKind, Phase

if TYPE_CHECKING:
    import pandas as pd

    from ._operator_tables import OperatorTables

_FASTEST_S = 1e-7
"""Keeps logarithms finite; no kernel is this short."""
# The values for B200, used for all devices.
_KERNEL_S = 30e-6
_RATE_FRAC = 0.666
_FP32_NBYTES = 4
Passes = tuple[float, float]
Kernels = tuple[int, int]

_COUNTED: dict[OperatorKind, tuple[Passes, Kernels]] = {
    # Read the input, write the output; backward reads input and gradient, writes a gradient.
    OperatorKind.NORM: ((2.0, 3.0), (1, 1)),
    # Queries, keys and values are copied to separate tensors, then queries and keys are rotated.
    OperatorKind.POSITION: ((4.0, 4.0), (2, 2)),
    # Two sums of a branch and the stream; backward two sums of their gradients.
    OperatorKind.RESIDUAL: ((6.0, 6.0), (2, 2)),
    # 40 bytes per two-byte logit: an fp32 copy, its maximum, exponentials and their sum; backward
    # the gradient and its two-byte copy.
    OperatorKind.LOSS: ((13.0, 7.0), (4, 2)),
}
_FORMULA_KINDS = frozenset({OperatorKind.EMBEDDING, OperatorKind.ACTIVATION, OperatorKind.PERMUTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericAttention:
    """16-bit fused attention in FlashAttention-2, relative to the times of tables."""

    forward_log: float
    """Log ratio of its forward pass to these times."""
    backward_log: float
    sigma_log: float
    """Deviation of another source of these times."""
    is_only_one: bool
    """No other fused kernel is faster on the device, so that all stacks run it."""

    def ratio(self, phase: Phase, *, is_stated: bool) -> tuple[float, float]:
        """Return the log ratio of one pass and its deviation: between this kernel and that of the
        tables, if which of both runs is not stated (PyTorch prefers this one up to 2.9, cuDNN's
        from 2.10 on: ``check_prefer_cudnn_attention`` of its ``sdp_utils.cpp``)."""
        shift = self.backward_log if phase is Phase.BACKWARD else self.forward_log
        return (shift, 0.0) if is_stated else (shift / 2, max(self.sigma_log, abs(shift) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Conditions under which operators and transfers were timed, and what they imply for a step
    model."""

    is_attention_fused: bool
    """Attention is one kernel, and most other operators are fused too."""
    bytes_per_s: float
    """Rate of the device's memory."""
    scores_frac: float = 1.0
    """Mean scores of attention under the windows of its layers, over those of causal attention."""
    is_in_situ: bool = False
    """Sampled in training itself, including launches and neighbouring work, so that the machine's
    constants mainly affect items that were not sampled; tables time each operator alone."""
    launched_frac: float = 1.0
    """Share of the host's launches that is not part of any operator's time, 0 to 1."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """The recipe under which products were timed."""
    has_norms_inside: bool = False
    """Products were timed together with the norms that run inside them."""
    log_centers: Mapping[str, float] = field(default_factory=dict)
    """Log centres of the step model's constants, by name, for which these times are better than the
    priors."""
    log_sigmas: Mapping[str, float] = field(default_factory=dict)
    """Deviations of such constants, by name, that differ from the priors'."""
    network: NetworkPrior | None = None
    """The links that transfers were priced on, as far as known."""
    generic_attention: GenericAttention | None = None
    """Kernels that run everywhere, relative to these times; None if these stand for all."""
    has_tf32: bool = False
    """Products in fp32 were not timed on this machine and may run in TF32."""


class BaseTimes(Protocol):
    """Times of the operators and transfers of one machine."""

    @property
    def conditions(self) -> Conditions:
        """Conditions under which they were timed."""
        ...

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Return True if operators of a kind were timed under that very name."""
        ...

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """Return medians with deviation and provenance, one for each item.

        If the host was not measured, its work in a step counts as 1 and in a pass as 0.5: shares of
        the constant.

        Deviations exclude the errors that the constants of a step model represent.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTimes:
    """Models of the operators and transfers of one machine."""

    operators: OperatorTables
    transfers: CollectiveModel
    conditions: Conditions
    has_fused_kernels: bool = False
    """Operators without a table are priced by the bytes of fused kernels; otherwise by the device's
    prior."""

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Return True if any table times the operator."""
        return self.operators.has(kind, phase)

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``; errors of tables and priors are represented by the constants."""
        return Estimates(
            time_s=self.times_s(items),
            sigma_log=np.zeros(len(items)),
            sources=tuple(self._source(item) for item in items),
        )

    def _source(self, item: Item) -> Source:
        if isinstance(item, CollectiveCall):
            is_known = self.transfers.has(group_of(canonical(item)))
        else:
            parts = [] if item.kind in _HOST else [*self._decomposed(item)]
            is_known = any(self.operators.has(part.kind, part.phase) for part in parts)
        return Source.FITTED if is_known else Source.PRIOR

    def times_s(self, items: Sequence[Item]) -> Floats:
        """Return the median seconds of each item, shape (items,); shares of a constant for the
        host."""
        out = np.array(
            [_HOST.get(item.kind, 0.0) if isinstance(item, Operator) else 0.0 for item in items]
        )
        parts: list[Operator] = []
        places: list[int] = []
        groups: defaultdict[CollectiveCall, list[int]] = defaultdict(list)
        for place, item in enumerate(items):
            if isinstance(item, CollectiveCall):
                groups[replace(item, nbytes=1)].append(place)
            elif item.kind not in _HOST:
                for part in self._decomposed(item):
                    parts.append(part)
                    places.append(place)
        np.add.at(out, places, self._operator_times(parts))
        for call, members in groups.items():
            nbytes = np.array([float(items[place].nbytes) for place in members])  # type: ignore[union-attr]
            group = group_of(canonical(call))
            out[members] = np.exp(self.transfers.estimate(group, nbytes).log_time)
        return np.maximum(out, _FASTEST_S)

    def _decomposed(self, operator: Operator) -> Iterable[Operator]:
        """Yield the operators of the tables that an operator of a layout consists of."""
        for part in decomposed(operator, is_fused=self.conditions.is_attention_fused):
            yield from self._known(part)

    def _known(self, operator: Operator) -> Iterable[Operator]:
        """Return an operator as the tables have it: by role or as any product, its backward whole
        or as two gradients."""
        kinds = [operator.kind]
        if operator.kind.is_linear and operator.kind is not OperatorKind.LINEAR:
            kinds.append(OperatorKind.LINEAR)
        for kind in kinds:
            phases: list[tuple[Phase, ...]] = [(operator.phase,)]
            if operator.phase is Phase.BACKWARD:
                phases.append((Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT))
            for phase_parts in phases:
                if all(self.operators.has(kind, phase) for phase in phase_parts):
                    parts = tuple(
                        replace(operator, kind=kind, phase=phase) for phase in phase_parts
                    )
                    # Tables time one addition; a layer has two.
                    return parts * (2 if kind is OperatorKind.RESIDUAL else 1)
        return (operator,)

    def _operator_times(self, operators: Sequence[Operator]) -> Floats:
        out = np.empty(len(operators))
        tabled: list[int] = []
        others: defaultdict[tuple[OperatorKind, Phase], list[int]] = defaultdict(list)
        for place, operator in enumerate(operators):
            if self.operators.has(operator.kind, operator.phase):
                tabled.append(place)
            elif self.has_fused_kernels and is_law(operator.kind):
                out[place] = law_time_s(operator, self.operators.machine.prior)
            else:
                others[operator.kind, operator.phase].append(place)
        out[tabled] = self.operators.times_s([operators[place] for place in tabled])
        for members in others.values():
            batch = batch_of([operators[place] for place in members])
            out[members] = np.exp(self.operators.machine.predict_unmeasured(batch).log_time)
        return out


def prior_times(
    device: str,
    *,
    is_attention_fused: bool,
    collectives: Sequence[pd.DataFrame] = (),
    network: NetworkPrior | None = None,
    without: tuple[str, ...] = (),
) -> FittedTimes:
    """Build times from a device's public tables and data sheets, and from the given tables of
    transfers.

    Priors leave out the public tables that ``without`` names.
    """
    from ._operator_tables import (
        operator_tables,  # tables need pandas, which is slow to import
        transfer_tables,
    )

    operators = operator_tables((), device=device, without=without)
    transfers = transfer_tables(collectives, device=device, network=network)
    known = _alone(operators, is_attention_fused, without)
    products = rates_prior(device, OperatorKind.LINEAR, Phase.FORWARD, 2, without=without)
    # A generation without a table is as uncertain as another source of its products.
    is_far = products is not None and products.steps > 0
    far = {"compute": products.flop_sigma_log} if products is not None and is_far else {}
    return FittedTimes(
        operators=operators,
        transfers=transfers,
        conditions=replace(
            known,
            network=transfers.fitted_prior,
            log_sigmas=known.log_sigmas or far,
            has_tf32=generation(operators.machine.prior.name).has_tf32,
        ),
    )


_FLASH_2_FRACS: Mapping[str, tuple[float, float]] = {
    "ampere": (0.73, 0.63),
    "hopper": (0.35, 0.3),
    "blackwell": (0.17, 0.15),
    "cdna3": (0.27, 0.155),
    "cdna4": (0.27, 0.155),
}
"""Share of the data sheet that FlashAttention-2 reaches on long sequences, forward and backward: up
to 73 and 63 % on A100 (Dao 2023, arXiv:2307.08691, section 1), 35 % on H100 (Shah et al. 2024,
"FlashAttention-3", abstract; backward as its own benchmark prints, flash-attention PR 2688), 379
and 334 TFLOP/s on B200 (flash-attention issue 1589), 353 and 203 on MI300X (ROCm/flash-attention
issue 142), which stands for its successor too."""
_NEW_INSTRUCTIONS = frozenset({"hopper", "blackwell"})
_IS_MADE_FOR = "ampere"
"""The generation whose fastest kernel FlashAttention-2 is: PyTorch and flash-attn run it there, and
Transformer Engine prefers it below compute capability 9.0 (``get_attention_backend`` of its
``dot_product_attention/utils.py``), while public tables time its predecessors."""


def table_times(
    operators: Sequence[pd.DataFrame],
    collectives: Sequence[pd.DataFrame] = (),
    *,
    device: str,
    is_attention_fused: bool,
    network: NetworkPrior | None = None,
    without: tuple[str, ...] = (),
) -> FittedTimes:
    """Build times of a device from canonical tables of operators and collectives.

    Items without a table use the device's prior, or with fused attention the bytes of fused kernels
    over the memory bandwidth.
    """
    from ._operator_tables import operator_tables, transfer_tables

    tables = operator_tables(operators, device=device, without=without)
    sigmas = {
        **(_OPERATOR_SIGMAS if operators else {}),
        **(_TRANSFER_SIGMAS if collectives else {}),
    }
    known = _alone(tables, is_attention_fused, without)
    transfers = transfer_tables(collectives, device=device, network=network)
    return FittedTimes(
        operators=tables,
        transfers=transfers,
        conditions=replace(
            known,
            network=transfers.fitted_prior,
            log_centers={**known.log_centers, **(_MEASURED_TRANSFERS if collectives else {})},
            log_sigmas=known.log_sigmas or sigmas,
        ),
        has_fused_kernels=is_attention_fused,
    )


def _alone(
    operators: OperatorTables, is_attention_fused: bool, without: tuple[str, ...]
) -> Conditions:
    """Return the conditions of operators timed one by one; the device's prior gives the deviation
    of all work if the device is unknown and no table times it."""
    prior = operators.machine.prior
    is_unknown = prior.name == UNKNOWN_DEVICE and not operators.names
    return Conditions(
        is_attention_fused=is_attention_fused,
        bytes_per_s=prior.ceilings.bytes_per_s,
        log_centers=_misaligned(prior.name),
        log_sigmas={"compute": prior.sigma_log} if is_unknown else {},
        generic_attention=_generic_attention(prior.name, without),
    )


def _misaligned(device: str) -> Mapping[str, float]:
    """Return the centre of the misalignment cost, for devices whose newest instructions need rows
    of a multiple of 16 bytes."""
    is_new = generation(device).name in _NEW_INSTRUCTIONS
    return {MISALIGNED: MISALIGNED_LOG - math.log(_MMA_FRAC)} if is_new else {}


def _generic_attention(device: str, without: tuple[str, ...]) -> GenericAttention | None:
    """Return ``Conditions.generic_attention``; None without a measured share or tabled rates."""
    name = generation(device).name
    forward, backward = (
        rates_prior(device, OperatorKind.FLASH_ATTENTION, phase, 2, without=without)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    if name not in _FLASH_2_FRACS or forward is None or backward is None:
        return None
    fracs = _FLASH_2_FRACS[name]
    shifts = [
        -math.log(frac) - prior.flop_log_factor
        for frac, prior in zip(fracs, (forward, backward), strict=True)
    ]
    return GenericAttention(
        forward_log=shifts[0],
        backward_log=shifts[1],
        sigma_log=forward.flop_sigma_log,
        is_only_one=name == _IS_MADE_FOR,
    )


def mean_scores_frac(config: RunConfig) -> float:
    """Return ``Conditions.scores_frac`` of a layout; 1 if its attention computes all scores."""
    limited_frac, scores_frac = config.model.limits if config.is_attention_fused else (0.0, 1.0)
    return 1.0 - limited_frac * (1.0 - scores_frac)


MISALIGNED = "misaligned"
MISALIGNED_LOG = 0.5
"""Log factor on the time of a product with odd rows. It was chosen by judgement, and agrees with
nanoGPT's step, which gained a quarter on A100 by padding 50,257 tokens to 50,304, at a head of a
third of the step."""
_MMA_FRAC = 0.629
"""Share of the peak that Hopper's older instructions reach (Luo et al. 2024, arXiv:2402.13499);
warp-group instructions require operands at multiples of 16 bytes (NVIDIA's guide of cuBLASDx)."""
_MEASURED_TRANSFERS: Mapping[str, float] = dict.fromkeys(("tp", "dp", "pp", "network"), 0.0)
"""Centres for the cluster's own collectives, which need no correction of data sheets."""
_TRANSFER_SIGMAS: Mapping[str, float] = {"tp": 0.1, "dp": 0.1, "pp": 0.3, "network": 0.1}
"""Remaining deviations once the cluster's own collectives are known; messages between stages are in
no table, so three times as much."""
_OPERATOR_SIGMAS: Mapping[str, float] = {
    "compute": 0.055,
    "backward": 0.04,
    "attention": 0.1,
    "head": 0.1,
}
"""Half of the priors' deviations: the rest is the difference between an operator timed alone and
one among others."""


def decomposed(operator: Operator, *, is_fused: bool) -> Iterable[Operator]:
    """Return the operators of public tables that an operator of a layout consists of.

    Recomputation is a forward pass; attention is one fused kernel, or two batched products with a
    softmax between them.
    """
    if operator.phase is Phase.RECOMPUTE:
        operator = replace(operator, phase=Phase.FORWARD)
    if operator.kind is not OperatorKind.CORE_ATTENTION:
        return (operator,)
    batch, heads, groups, seq, channels = operator.shape
    if is_fused:
        shape = (batch, heads, groups, seq, channels, channels)
        return (replace(operator, kind=OperatorKind.FLASH_ATTENTION, shape=shape),)
    matrices = batch * heads
    return (
        replace(operator, kind=OperatorKind.BATCHED_PRODUCT, shape=(matrices, seq, channels, seq)),
        replace(operator, kind=OperatorKind.FUSED_SOFTMAX, shape=(matrices, seq, seq)),
        replace(operator, kind=OperatorKind.ELEMENTWISE, shape=(matrices * seq, seq)),
        replace(operator, kind=OperatorKind.BATCHED_PRODUCT, shape=(matrices, seq, seq, channels)),
    )


_HOST = {OperatorKind.HOST_MICROBATCH: 0.5, OperatorKind.HOST_STEP: 1.0}
"""Share of the host's constant; a pass, forward or backward, takes half of a micro-batch's host
time."""


def is_law(kind: OperatorKind) -> bool:
    """Return True if the bytes of an operator are counted here."""
    return kind in _COUNTED or kind in _FORMULA_KINDS


def law_time_s(operator: Operator, prior: DevicePrior) -> float:
    """Return the seconds of one operator on a device."""
    rate = _RATE_FRAC * prior.peaks_for(operator.element_nbytes).bytes_per_s
    _, kernels = _COUNTED.get(operator.kind, ((), (1, 1)))
    return kernels[operator.phase is Phase.BACKWARD] * _KERNEL_S + fused_nbytes(operator) / rate


def fused_nbytes(operator: Operator) -> float:
    """Return the bytes read and written by one operator.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 4), element_nbytes=2)
    >>> fused_nbytes(norm)
    128.0
    """
    is_backward, width = operator.phase is Phase.BACKWARD, operator.element_nbytes
    shape = operator.shape
    match operator.kind:
        case OperatorKind.EMBEDDING:
            tokens, hidden, vocab = shape
            # The backward writes a dense gradient and adds it into the fp32 buffer.
            table = (2.0 * width + 2 * _FP32_NBYTES) * vocab * hidden
            return 2.0 * tokens * hidden * width + (table if is_backward else 0.0)
        case OperatorKind.ACTIVATION:
            tokens, size_in, size_out = shape
            return float(width * tokens * (size_in * (1 + is_backward) + size_out))
        case OperatorKind.PERMUTE:
            tokens, hidden, copies = shape
            return float(width * tokens * hidden * (1 + copies))
        case _:
            passes, _ = _COUNTED[operator.kind]
            return passes[is_backward] * width * math.prod(shape)
