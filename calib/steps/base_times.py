"""What each operator and collective takes before any step was measured: tables, else priors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..fit.batches import Batch, batch_of
from ..fit.collectives import CollectiveModel, fit_transfers
from ..fit.groups import canonical, group_of
from ..fit.machine import MachineModel, fit_machine
from ..fit.priors import device_prior
from ..timeline.items import Floats, Item
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator, OperatorKind, Phase

_FASTEST_S = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseTimes:
    """Models of the operators and transfers of one machine."""

    machine: MachineModel
    transfers: CollectiveModel
    is_attention_fused: bool

    def times_s(self, items: Sequence[Item]) -> Floats:
        """Median seconds of each item, shape (items,); 1 for what only the host does."""
        out = np.ones(len(items))
        batches: defaultdict[tuple[str, OperatorKind, Phase], list[tuple[int, Operator]]]
        batches = defaultdict(list)
        groups: defaultdict[tuple[CollectiveCall, int], list[int]] = defaultdict(list)
        for place, item in enumerate(items):
            if isinstance(item, CollectiveCall):
                groups[_without_size(item), item.num_nodes].append(place)
            elif item.kind not in _HOST:
                out[place] = 0.0
                for part in decomposed(item, is_fused=self.is_attention_fused):
                    batches[self._name(part), part.kind, part.phase].append((place, part))
        for (name, _, _), members in batches.items():
            found = self._log_time(name, batch_of([part for _, part in members]))
            np.add.at(out, [place for place, _ in members], np.exp(found))
        for (call, num_nodes), places in groups.items():
            nbytes = np.array([float(items[place].nbytes) for place in places])  # type: ignore[union-attr]
            found = self.transfers.estimate(group_of(canonical(call), nodes=num_nodes), nbytes)
            out[places] = np.exp(found.log_time)
        return np.maximum(out, _FASTEST_S)

    def _name(self, operator: Operator) -> str:
        """The fitted model that speaks for an operator; "" where none does."""
        kinds = (
            (operator.kind, OperatorKind.LINEAR) if operator.kind.is_linear else (operator.kind,)
        )
        names = [f"{kind.value}/{operator.phase.value}" for kind in kinds]
        return next((name for name in names if name in self.machine.pools), "")

    def _log_time(self, name: str, batch: Batch) -> Floats:
        if name:
            return self.machine.predict(name, batch).log_time
        return self.machine.predict_unmeasured(batch).log_time


def prior_times(device: str, *, is_attention_fused: bool) -> BaseTimes:
    """What public tables and data sheets say of a device."""
    return BaseTimes(
        machine=fit_machine({}, device=device, use_prior=True),
        transfers=fit_transfers({}, device_prior(device).network),
        is_attention_fused=is_attention_fused,
    )


def decomposed(operator: Operator, *, is_fused: bool) -> Iterable[Operator]:
    """The operators of public tables that one of a layout consists of.

    Recomputation is a forward pass; attention is one fused kernel, or two batched products with a
    softmax between them.
    """
    if operator.phase is Phase.RECOMPUTE:
        operator = _changed(operator, phase=Phase.FORWARD)
    if operator.kind is not OperatorKind.CORE_ATTENTION:
        return (operator,)
    batch, heads, groups, seq, channels = operator.shape
    if is_fused:
        shape = (batch, heads, groups, seq, channels, channels)
        return (_changed(operator, kind=OperatorKind.FLASH_ATTENTION, shape=shape),)
    matrices = batch * heads
    return (
        _changed(operator, kind=OperatorKind.BATCHED_PRODUCT, shape=(matrices, seq, channels, seq)),
        _changed(operator, kind=OperatorKind.FUSED_SOFTMAX, shape=(matrices, seq, seq)),
        _changed(operator, kind=OperatorKind.ELEMENTWISE, shape=(matrices * seq, seq)),
        _changed(operator, kind=OperatorKind.BATCHED_PRODUCT, shape=(matrices, seq, seq, channels)),
    )


_HOST = frozenset({OperatorKind.HOST_MICROBATCH, OperatorKind.HOST_STEP})


def _changed(
    operator: Operator,
    *,
    kind: OperatorKind | None = None,
    phase: Phase | None = None,
    shape: tuple[int, ...] | None = None,
) -> Operator:
    return Operator(
        kind=kind or operator.kind,
        phase=phase or operator.phase,
        shape=shape or operator.shape,
        element_nbytes=operator.element_nbytes,
    )


def _without_size(call: CollectiveCall) -> CollectiveCall:
    return CollectiveCall(
        collective=call.collective, role=call.role, num_ranks=call.num_ranks, nbytes=1
    )
