"""What each operator and collective takes before any step was measured: tables, else priors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pandas as pd

from ..fit.batches import batch_of
from ..fit.collectives import CollectiveModel
from ..fit.groups import canonical, group_of
from ..fit.machine import MachineModel
from ..fit.networks import NetworkPrior
from ..timeline.items import Floats, Item
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator, OperatorKind, Phase
from .memory_laws import is_law, law_time_s
from .operator_tables import OperatorTables, operator_tables
from .transfer_tables import transfer_tables

_FASTEST_S = 1e-7


class BaseTimes(Protocol):
    """Times of the operators and transfers of one machine."""

    @property
    def is_attention_fused(self) -> bool:
        """Attention is one kernel, as is most else of the stack."""
        ...

    @property
    def machine(self) -> MachineModel:
        """The fit of the device; ``pools`` tells which operators were measured."""
        ...

    @property
    def log_centers(self) -> Mapping[str, float]:
        """Logs of the constants of a step model, by name, that these times know better than its
        priors do."""
        ...

    def times_s(self, items: Sequence[Item]) -> Floats:
        """Median seconds of each item, shape (items,); 1 for what only the host does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTimes:
    """Models of the operators and transfers of one machine."""

    operators: OperatorTables
    transfers: CollectiveModel
    is_attention_fused: bool
    log_centers: Mapping[str, float] = field(default_factory=dict)
    has_fused_kernels: bool = False
    """What no table has moves the bytes of fused kernels; otherwise those of the device's prior."""

    @property
    def machine(self) -> MachineModel:
        """The fit of the device."""
        return self.operators.machine

    def times_s(self, items: Sequence[Item]) -> Floats:
        """Median seconds of each item, shape (items,); 1 for what only the host does."""
        out = np.ones(len(items))
        parts: list[Operator] = []
        places: list[int] = []
        groups: defaultdict[CollectiveCall, list[int]] = defaultdict(list)
        for place, item in enumerate(items):
            if isinstance(item, CollectiveCall):
                groups[replace(item, nbytes=1)].append(place)
            elif item.kind not in _HOST:
                out[place] = 0.0
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
        for part in decomposed(operator, is_fused=self.is_attention_fused):
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
                    parts = tuple(self._widened(operator, kind, phase) for phase in found)
                    # Tables time one addition; a layer has two.
                    return parts * (2 if kind is OperatorKind.RESIDUAL else 1)
        return (operator,)

    def _widened(self, operator: Operator, kind: OperatorKind, phase: Phase) -> Operator:
        """With a head's key and value as wide as in the tables, where these are not alike."""
        shape = operator.shape
        if kind is OperatorKind.FLASH_ATTENTION:
            shape = (*shape[:4], *(self.operators.channels(shape[4] + shape[5]) or shape[4:]))
        return replace(operator, kind=kind, phase=phase, shape=shape)

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


def prior_times(device: str, *, is_attention_fused: bool) -> FittedTimes:
    """What public tables and data sheets say of a device."""
    return FittedTimes(
        operators=operator_tables((), device=device),
        transfers=transfer_tables((), device=device),
        is_attention_fused=is_attention_fused,
    )


def table_times(
    operators: Sequence[pd.DataFrame],
    collectives: Sequence[pd.DataFrame] = (),
    *,
    device: str,
    is_attention_fused: bool,
    network: NetworkPrior | None = None,
) -> FittedTimes:
    """What canonical tables of operators and collectives say of a device.

    What they lack is the prior of the device, and on a stack with fused attention the bytes of
    fused kernels over the bandwidth of the memory.
    """
    return FittedTimes(
        operators=operator_tables(operators, device=device),
        transfers=transfer_tables(collectives, device=device, network=network),
        is_attention_fused=is_attention_fused,
        has_fused_kernels=is_attention_fused,
    )


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


_HOST = frozenset({OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP})
