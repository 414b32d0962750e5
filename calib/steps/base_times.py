"""What each operator and collective takes before any step was measured: tables, else priors.

What a modern stack pays for operators that no table times follows from the bytes that fused kernels
move, counted from what each kernel reads and writes.  Rate and fixed cost of a kernel are those
that SimuMax publishes with its system tables (v1.2, ``configs/system``): two thirds of the data
sheet on B200, and 30 us (B200) to 40 us (A100) a kernel.  No constant was fitted here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..fit import UNKNOWN_DEVICE, DevicePrior, Estimates, Source, batch_of, generation, rates_prior
from ..network import CollectiveModel, NetworkPrior, canonical, group_of
from ..timeline import Floats, Item
from ..workload import CollectiveCall, Fp8Recipe, Operator, OperatorKind, Phase

if TYPE_CHECKING:
    import pandas as pd

    from .operator_tables import OperatorTables

_FASTEST_S = 1e-7
"""Keeps logarithms finite; no kernel is as short."""
# B200's, for all devices.
_KERNEL_S = 30e-6
_RATE_FRAC = 0.666
_FP32_NBYTES = 4
Passes = tuple[float, float]
Kernels = tuple[int, int]

_COUNTED: dict[OperatorKind, tuple[Passes, Kernels]] = {
    # Read the input, write the output; backward reads input and gradient, writes a gradient.
    OperatorKind.NORM: ((2.0, 3.0), (1, 1)),
    # Queries, keys and values become tensors of their own, then queries and keys are rotated.
    OperatorKind.POSITION: ((4.0, 4.0), (2, 2)),
    # Two sums of a branch and the stream; backward two sums of their gradients.
    OperatorKind.RESIDUAL: ((6.0, 6.0), (2, 2)),
    # 40 bytes for each two-byte logit: an fp32 copy, its largest value, exponentials and their
    # sum; backward the gradient and its two-byte copy.
    OperatorKind.LOSS: ((13.0, 7.0), (4, 2)),
}
_OWN = frozenset({OperatorKind.EMBEDDING, OperatorKind.ACTIVATION, OperatorKind.PERMUTE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which operators and transfers were timed, and what is known of a step model by that."""

    is_attention_fused: bool
    """Attention is one kernel, as is most else of the stack."""
    bytes_per_s: float
    """Rate of the device's memory."""
    is_in_situ: bool = False
    """Sampled in training itself, launches and neighbours included, so that constants of the
    machine move only what was not sampled; tables time each operator alone."""
    launched_frac: float = 1.0
    """Share of the host's launches that no time of an operator holds, 0 to 1."""
    fp8: Fp8Recipe = Fp8Recipe.NONE
    """The recipe under which products were timed."""
    has_norms_inside: bool = False
    """Products were timed with the norms that run inside them."""
    weight_fracs: Mapping[OperatorKind, float] = field(default_factory=dict)
    """What a traced step told of linears' backward phases."""
    log_centers: Mapping[str, float] = field(default_factory=dict)
    """Logs of the constants of a step model, by name, that these times know better than its priors
    do."""
    log_sigmas: Mapping[str, float] = field(default_factory=dict)
    """Deviations of such constants, by name, that differ from the priors'."""
    network: NetworkPrior | None = None
    """The links that transfers were priced on, as far as they are known."""
    generic_attention: tuple[float, float] = (0.0, 0.0)
    """Log ratio of fused attention in 16 bits in a kernel that is not made for the device to these
    times, and its deviation where nobody states the kernel."""
    has_tf32: bool = False
    """Products in fp32 were not timed on this machine and may run in TF32."""


class BaseTimes(Protocol):
    """Times of the operators and transfers of one machine."""

    @property
    def conditions(self) -> Conditions:
        """What they were timed under."""
        ...

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Whether operators of a kind were timed under that very name."""
        ...

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """Medians with deviation and provenance, one for each item.

        Where no host was measured, what it does in a step counts as 1 and in a pass as 0.5: the
        share of the constant.

        A deviation is of what is not among the constants of a step model.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTimes:
    """Models of the operators and transfers of one machine."""

    operators: OperatorTables
    transfers: CollectiveModel
    conditions: Conditions
    has_fused_kernels: bool = False
    """What no table has moves the bytes of fused kernels; otherwise those of the device's prior."""

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Whether any table times it."""
        return self.operators.has(kind, phase)

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``; errors of tables and priors are the constants' to hold."""
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
        """Median seconds of each item, shape (items,); shares of a constant for the host."""
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
        """The operators of the tables that one of a layout consists of."""
        for part in decomposed(operator, is_fused=self.conditions.is_attention_fused):
            yield from self._known(part)

    def _known(self, operator: Operator) -> Iterable[Operator]:
        """As the tables have it: by role or as any product, backward in one or in two."""
        kinds = [operator.kind]
        if operator.kind.is_linear and operator.kind is not OperatorKind.LINEAR:
            kinds.append(OperatorKind.LINEAR)
        for kind in kinds:
            phases: list[tuple[Phase, ...]] = [(operator.phase,)]
            if operator.phase is Phase.BACKWARD:
                phases.append((Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT))
            for found in phases:
                if all(self.operators.has(kind, phase) for phase in found):
                    parts = tuple(replace(operator, kind=kind, phase=phase) for phase in found)
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
    """Times by public tables and data sheets of a device, and by tables of transfers as they are.

    Priors leave out the public tables that ``without`` names.
    """
    from .operator_tables import (
        operator_tables,  # tables need pandas, which is slow to import
        transfer_tables,
    )

    operators = operator_tables((), device=device, without=without)
    transfers = transfer_tables(collectives, device=device, network=network)
    known = _alone(operators, is_attention_fused, without)
    products = rates_prior(device, OperatorKind.LINEAR, Phase.FORWARD, 2, without=without)
    # A generation without a table is as open as another source of its products would be.
    is_far = products is not None and products.steps > 0
    far = {"compute": products.flop_sigma_log} if products is not None and is_far else {}
    return FittedTimes(
        operators=operators,
        transfers=transfers,
        conditions=replace(
            known,
            network=transfers.carrying,
            log_sigmas=known.log_sigmas or far,
            has_tf32=generation(operators.machine.prior.name).has_tf32,
        ),
    )


_FLASH_2_FRAC = 0.35
_AFTER_FLASH_2 = frozenset({"hopper", "blackwell"})
"""FlashAttention-2, which PyTorch and most libraries run in 16 bits, reaches 35 % of an H100's peak
(Shah et al. 2024, "FlashAttention-3", abstract); what public tables time on these devices is made
for them."""


def table_times(
    operators: Sequence[pd.DataFrame],
    collectives: Sequence[pd.DataFrame] = (),
    *,
    device: str,
    is_attention_fused: bool,
    network: NetworkPrior | None = None,
    is_flagged_used: bool = False,
    without: tuple[str, ...] = (),
) -> FittedTimes:
    """What canonical tables of operators and collectives say of a device.

    What they lack is the prior of the device, and on a stack with fused attention the bytes of
    fused kernels over the bandwidth of the memory.
    """
    from .operator_tables import operator_tables, transfer_tables

    tables = operator_tables(operators, device=device, without=without)
    sigmas = {
        **(_OPERATOR_SIGMAS if operators else {}),
        **(_TRANSFER_SIGMAS if collectives else {}),
    }
    found = _alone(tables, is_attention_fused, without)
    transfers = transfer_tables(
        collectives, device=device, network=network, is_flagged_used=is_flagged_used
    )
    return FittedTimes(
        operators=tables,
        transfers=transfers,
        conditions=replace(
            found,
            network=transfers.carrying,
            log_centers={**found.log_centers, **(_MEASURED_TRANSFERS if collectives else {})},
            log_sigmas=found.log_sigmas or sigmas,
        ),
        has_fused_kernels=is_attention_fused,
    )


def _alone(
    operators: OperatorTables, is_attention_fused: bool, without: tuple[str, ...]
) -> Conditions:
    """Those of operators timed one by one; the device's prior says how open all work is where
    nobody knows the device and no table times it."""
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
    """The centre of what rows cost that are no multiple of 16 bytes, where they cannot run in the
    newest instructions."""
    is_new = generation(device).name in _AFTER_FLASH_2
    return {MISALIGNED: MISALIGNED_LOG - math.log(_MMA_FRAC)} if is_new else {}


def _generic_attention(device: str, without: tuple[str, ...]) -> tuple[float, float]:
    """See ``Conditions``: as far off as another source of the rates would be."""
    attention = rates_prior(device, OperatorKind.FLASH_ATTENTION, Phase.FORWARD, 2, without=without)
    if attention is None or generation(device).name not in _AFTER_FLASH_2:
        return 0.0, 0.0
    return -math.log(_FLASH_2_FRAC) - attention.flop_log_factor, attention.flop_sigma_log


MISALIGNED = "misaligned"
MISALIGNED_LOG = 0.5
"""Log of how much longer a product of odd rows takes.  It was chosen; that nanoGPT's step gained a
quarter on A100 by padding 50,257 tokens to 50,304 agrees, at a head of a third of the step."""
_MMA_FRAC = 0.629
"""Share of the peak that Hopper's older instructions reach (Luo et al. 2024, arXiv:2402.13499);
those for groups of warps want operands at multiples of 16 bytes (NVIDIA's guide of cuBLASDx)."""
_MEASURED_TRANSFERS: Mapping[str, float] = dict.fromkeys(("tp", "dp", "pp", "network"), 0.0)
"""Collectives of the cluster itself need no allowance for what data sheets promise."""
_TRANSFER_SIGMAS: Mapping[str, float] = {"tp": 0.1, "dp": 0.1, "pp": 0.3, "network": 0.1}
"""What is left open once the cluster's own collectives are known; messages between stages are in no
table, so three times as much."""
_OPERATOR_SIGMAS: Mapping[str, float] = {
    "compute": 0.055,
    "backward": 0.04,
    "attention": 0.1,
    "head": 0.1,
}
"""Half of what priors leave open: what is left is how an operator alone differs from one between
others."""


def decomposed(operator: Operator, *, is_fused: bool) -> Iterable[Operator]:
    """The operators of public tables that one of a layout consists of.

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
"""A pass has half of a micro-batch's host time, forward or backward."""


def is_law(kind: OperatorKind) -> bool:
    """Whether the bytes of an operator are known here."""
    return kind in _COUNTED or kind in _OWN


def law_time_s(operator: Operator, prior: DevicePrior) -> float:
    """Seconds of one operator on a device."""
    rate = _RATE_FRAC * prior.peaks_for(operator.element_nbytes).bytes_per_s
    _, kernels = _COUNTED.get(operator.kind, ((), (1, 1)))
    return kernels[operator.phase is Phase.BACKWARD] * _KERNEL_S + fused_nbytes(operator) / rate


def fused_nbytes(operator: Operator) -> float:
    """Bytes read and written by one operator.

    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 4), element_nbytes=2)
    >>> fused_nbytes(norm)
    128.0
    """
    is_backward, width = operator.phase is Phase.BACKWARD, operator.element_nbytes
    shape = operator.shape
    match operator.kind:
        case OperatorKind.EMBEDDING:
            tokens, hidden, vocab = shape
            # Backward writes a dense gradient and adds that into the fp32 buffer.
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
