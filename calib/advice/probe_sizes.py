"""Probes, and their peak memory from the tensors that their benchmark allocates.

A probe is one operator shape or one transfer that is measured during a run.

Standard library only, since every rank imports it; probes are chosen in ``probes``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..workload.collectives import Collective, CollectiveCall, GroupRole
from ..workload.operators import OperatorKind

COLD_NBYTES = 64 << 20
"""Bytes of weights in rotation; more than the last-level cache of a processor."""
# Small weights would need thousands of copies to fill that.
MOST_COPIES = 8
OPTIMIZER_TENSORS = 32
"""Number of tensors that an optimizer is probed with."""
_FP32_NBYTES = 4
_OPTIMIZER_COPIES = 5
"""Copies: gradients, weights, two moments, and temporaries of an update."""
SMALL_NBYTES = 1 << 20
"""Largest request that PyTorch's allocator serves from its small pool (``kSmallSize``)."""
_INPUT_COPIES: dict[OperatorKind, int] = {
    # Chains of eager calls retain the result of each, in fp32 for RMSNorm and the loss.
    OperatorKind.NORM: 14,
    OperatorKind.RESIDUAL: 6,
    OperatorKind.ACTIVATION: 2,
    OperatorKind.LOSS: 3,
    OperatorKind.ROUTER: 1,
    OperatorKind.GROUPED_LINEAR: 1,
}
"""Copies of the input that an operator allocates between input and output, freed or not."""
_SCORE_COPIES = 12
"""Copies of the score matrix in unfused attention: scores, mask, softmax, dropout, gradients."""
_OUTPUT_COPIES: dict[OperatorKind, int] = {
    # The backward pass of a fused kernel has an fp32 sum and the gradients of each head.
    OperatorKind.CORE_ATTENTION: 4,
    OperatorKind.POSITION: 4,
}
"""Copies of the output that an operator allocates."""
_PARTS = 8
"""Number of outputs: queries, keys and values are separate, and grouped keys are this small."""


_SLACK_NBYTES = 2 << 20
"""Allowance in the small pool for token counts, sums and masks."""


def need_of(
    kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int, *, is_fused: bool
) -> tuple[int, int]:
    """Return an upper bound on the bytes of a probe, without workspaces of libraries, and on the
    part of them in tensors of 1 MiB or less.

    Inputs and outputs count with their gradients; weights with all their copies, one gradient and
    its fp32 sum; all values are generated in fp32.  ``is_fused``: attention allocates no score
    matrix.

    >>> need_of(OperatorKind.OPTIMIZER, (1000,), 4, is_fused=True)
    (20480, 20480)
    """
    if kind is OperatorKind.OPTIMIZER:
        tensors = [(-(-shape[0] // OPTIMIZER_TENSORS), _OPTIMIZER_COPIES * OPTIMIZER_TENSORS)]
    else:
        tensors = [*_tensors(kind, shape, element_nbytes)]
        if kind is OperatorKind.CORE_ATTENTION and not is_fused:
            tensors.append((shape[0] * shape[1] * shape[3] ** 2, _SCORE_COPIES))
    sizes = [(element_nbytes * elements, copies) for elements, copies in tensors]
    largest = max(size for size, _ in sizes)
    nbytes = sum(size * copies for size, copies in sizes)
    if kind is not OperatorKind.OPTIMIZER:
        nbytes += 2 * largest * _FP32_NBYTES // element_nbytes
    small = sum(size * copies for size, copies in sizes if size <= SMALL_NBYTES)
    is_all = largest <= SMALL_NBYTES
    return nbytes, nbytes if is_all else min(nbytes, small + _SLACK_NBYTES)


def _tensors(
    kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the elements of each input, weight and output, and its number of copies."""
    inputs, weights, outputs = _elements(kind, shape)
    copies = max(1, min(MOST_COPIES, COLD_NBYTES // max(1, sum(weights) * element_nbytes)))
    sums = _FP32_NBYTES // element_nbytes
    yield from ((one, 2 + _INPUT_COPIES.get(kind, 0)) for one in inputs)
    yield from ((one, copies + 2 + sums) for one in weights)
    yield from ((one, 2 + _OUTPUT_COPIES.get(kind, 0)) for one in outputs)


_Sizes = tuple[int, ...]


def _elements(kind: OperatorKind, shape: tuple[int, ...]) -> tuple[_Sizes, _Sizes, _Sizes]:
    """Return the elements of the inputs, of one copy of the weights, and of the outputs."""
    if kind is OperatorKind.CORE_ATTENTION:
        number, heads, groups, sequence, channels = shape
        each = number * sequence * channels
        return (each * heads, each * groups, each * groups), (), (each * heads,)
    if kind is OperatorKind.GROUPED_LINEAR:
        experts, tokens, size_in, size_out = shape
        return (tokens * size_in,), (experts * size_in * size_out,), (tokens * size_out,)
    if kind is OperatorKind.EMBEDDING:
        tokens, hidden, vocabulary = shape
        return (), (vocabulary * hidden, tokens * hidden), (tokens * hidden, tokens * hidden)
    tokens, size_in, size_out = (*shape, shape[-1])[:3]
    if kind.is_linear or kind is OperatorKind.ROUTER:
        return (tokens * size_in,), (size_in * size_out,), (tokens * size_out,)
    if kind is OperatorKind.ACTIVATION:
        return (tokens * size_in,), (size_in,), (tokens * size_out,)
    rows = (tokens * size_in,)
    if kind is OperatorKind.RESIDUAL:
        return rows * 2, (size_in, size_in), rows
    if kind is OperatorKind.POSITION:
        return rows, (), (rows[0] // _PARTS,) * _PARTS
    return rows, (size_in, size_in) if kind is OperatorKind.NORM else (), rows


# First calls load kernels and choose algorithms; the median of five tolerates two slow ones.
WARMUPS, REPEATS = 2, 5
TRANSFER_RUNS = 2 * REPEATS
"""Runs of one transfer in total: each repeat is in a separate step, after one warm-up, so that
other work of the host (a fit takes seconds of a core) disturbs few of them."""

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
class _PricedProbe:
    """Worth, cost and memory of a probe of either kind."""

    value: float
    cost_s: float
    nbytes: int
    """Upper bound on its memory."""
    small_nbytes: int = 0
    """Upper bound on the part of ``nbytes`` in tensors of 1 MiB or less."""
    is_control: bool = False
    """True if the run has this work too, to compare the probe with the same in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProbe(_PricedProbe):
    """One shape, to be run forward and backward (the optimizer: as a step)."""

    kind: OperatorKind
    shape: tuple[int, ...]
    element_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProbe(_PricedProbe):
    """One transfer, over existing groups of role ``over`` that have the right ranks and nodes."""

    call: CollectiveCall
    over: GroupRole


Probe = OperatorProbe | CollectiveProbe


def fingerprint(probes: Iterable[Probe]) -> str:
    """Return a hash that is equal on all ranks with the same list."""
    text = json.dumps([probe_json(probe) for probe in probes])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def probe_json(probe: Probe) -> list[object]:
    """Return the identity of a probe as JSON values."""
    if isinstance(probe, OperatorProbe):
        return [probe.kind.value, list(probe.shape), probe.element_nbytes, probe.is_control]
    call = probe.call
    names = [call.collective.value, call.role.value, probe.over.value]
    return [*names, call.num_ranks, call.num_nodes, call.nbytes, probe.is_control]
