"""Memory that a probe of one shape holds at once, from the tensors that its bench makes.

What a probe is: one shape or one transfer that is measured beside a run.

Standard library only, since every rank reads it; what is worth a probe is chosen in ``probes``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..workload import Collective, CollectiveCall, GroupRole, OperatorKind

COLD_NBYTES = 64 << 20
"""Weights in rotation: more than the last cache of a processor holds."""
# Small weights would take thousands of copies.
MOST_COPIES = 8
OPTIMIZER_TENSORS = 32
"""Those that an optimizer is probed with."""
_FP32_NBYTES = 4
_OPTIMIZER_COPIES = 5
"""Gradients, weights, two moments, and what one update makes."""
SMALL_NBYTES = 1 << 20
"""Up to this size PyTorch's allocator serves requests from a pool of their own (``kSmallSize``)."""
_INPUT_COPIES: dict[OperatorKind, int] = {
    # Chains of eager calls keep what each of them made, RMSNorm's and the loss's in fp32.
    OperatorKind.NORM: 14,
    OperatorKind.RESIDUAL: 6,
    OperatorKind.ACTIVATION: 2,
    OperatorKind.LOSS: 3,
    OperatorKind.ROUTER: 1,
    OperatorKind.GROUPED_LINEAR: 1,
}
"""Copies of the input that a kind makes between its input and its output, and keeps or frees."""
_SCORE_COPIES = 12
"""Copies of the square of scores, where it is made: scores, mask, softmax, dropout, gradients."""
_OUTPUT_COPIES: dict[OperatorKind, int] = {
    # A fused kernel's backward pass has an fp32 sum and the gradients of each head.
    OperatorKind.CORE_ATTENTION: 4,
    OperatorKind.POSITION: 4,
}
"""The same of the output."""
_PARTS = 8
"""Queries, keys and values lie apart; of grouped ones, keys are so small a part."""


_SLACK_NBYTES = 2 << 20
"""Share of the small pool: numbers of tokens, sums, masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that a probe holds at once, at most, without a library's own workspace."""

    nbytes: int
    small_nbytes: int
    """The part of it in tensors of a MiB or less."""


def need_of(
    kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int, *, is_fused: bool
) -> Need:
    """The memory that a probe needs.

    Inputs and outputs are there with their gradients, weights in all their copies, one gradient and
    an fp32 sum of it; all values are made in fp32.  ``is_fused``: attention makes no square of
    scores.

    >>> need_of(OperatorKind.OPTIMIZER, (1000,), 4, is_fused=True).nbytes
    20480
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
    return Need(
        nbytes=nbytes, small_nbytes=nbytes if is_all else min(nbytes, small + _SLACK_NBYTES)
    )


def _tensors(
    kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int
) -> Iterator[tuple[int, int]]:
    """Elements of each input, weight and output, and how many such there are at once."""
    inputs, weights, outputs = _elements(kind, shape)
    copies = max(1, min(MOST_COPIES, COLD_NBYTES // max(1, sum(weights) * element_nbytes)))
    sums = _FP32_NBYTES // element_nbytes
    yield from ((one, 2 + _INPUT_COPIES.get(kind, 0)) for one in inputs)
    yield from ((one, copies + 2 + sums) for one in weights)
    yield from ((one, 2 + _OUTPUT_COPIES.get(kind, 0)) for one in outputs)


_Sizes = tuple[int, ...]


def _elements(kind: OperatorKind, shape: tuple[int, ...]) -> tuple[_Sizes, _Sizes, _Sizes]:
    """Elements of the inputs, of one copy of the weights, and of the outputs."""
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
    text = json.dumps([probe_json(probe) for probe in probes])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def probe_json(probe: Probe) -> list[object]:
    """All that tells two probes apart, as JSON values."""
    if isinstance(probe, OperatorProbe):
        return [probe.kind.value, list(probe.shape), probe.element_nbytes, probe.is_control]
    call = probe.call
    names = [call.collective.value, call.role.value, probe.over.value]
    return [*names, call.num_ranks, call.num_nodes, call.nbytes, probe.is_control]
