"""What a probe is: one shape or one transfer that is measured beside a run.

Standard library only, since every rank reads it; what is worth a probe is chosen in ``probes``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ..workload.operators import OperatorKind

# First calls load kernels and choose algorithms; the median of five bears two slow ones.
WARMUPS, REPEATS = 2, 5
TRANSFER_RUNS = 2 * REPEATS
"""Of one transfer in all: each repeat lies in a step of its own, after one to warm up, so that what
else the host does for a while (a fit takes seconds of a core) meets few of them."""

_ELEMENTWISE = {
    OperatorKind.EMBEDDING,
    OperatorKind.NORM,
    OperatorKind.POSITION,
    OperatorKind.CORE_ATTENTION,
    OperatorKind.RESIDUAL,
    OperatorKind.ACTIVATION,
    OperatorKind.LOSS,
    OperatorKind.OPTIMIZER,
    OperatorKind.ROUTER,
    OperatorKind.GROUPED_LINEAR,
    OperatorKind.PERMUTE,
}
PROBED_KINDS = frozenset({*_ELEMENTWISE, *(kind for kind in OperatorKind if kind.is_linear)})
"""Operators that can be run outside their model."""
PROBED_COLLECTIVES = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.SEND,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProbe:
    """One shape, to be run forwards and backwards (the optimizer: as a step)."""

    kind: OperatorKind
    shape: tuple[int, ...]
    element_nbytes: int
    is_control: bool
    """A shape that the run itself has: how far a probe is from the same work inside training."""
    value: float
    cost_s: float
    nbytes: int
    """Memory that it needs, at most."""
    small_nbytes: int = 0
    """The part of it in tensors of a MiB or less, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe:
    """One transfer, over the groups of role ``over``, which exist and have the wanted shape."""

    call: CollectiveCall
    over: GroupRole
    is_control: bool = False
    """The largest of its kind that the run itself has."""
    value: float
    cost_s: float
    nbytes: int
    small_nbytes: int = 0


Probe = OperatorProbe | CollectiveProbe


def fingerprint(probes: Iterable[Probe]) -> str:
    """Equal on all ranks that have the same list."""
    text = json.dumps([described(probe) for probe in probes])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def described(probe: Probe) -> list[object]:
    """All that tells two probes apart, as JSON values."""
    if isinstance(probe, OperatorProbe):
        return [probe.kind.value, list(probe.shape), probe.element_nbytes, probe.is_control]
    call = probe.call
    names = [call.collective.value, call.role.value, probe.over.value]
    return [*names, call.num_ranks, call.num_nodes, call.nbytes, probe.is_control]
