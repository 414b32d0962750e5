"""Canonical operator shapes (see ``OperatorKind``) from the tensors that a module saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..calib.workload.operators import OperatorKind

Shape = tuple[int, ...]
_LINEARS = frozenset(kind for kind in OperatorKind if kind.is_linear)


def canonical_shape(
    kind: OperatorKind, raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]
) -> Shape:
    """Shape of an operator from raw tensor shapes, and the shapes of the operators inside it.

    ``raw`` is (first input, output[, second input or number of table rows]).  Linear layers are
    described by the product that runs: under sequence parallelism one side holds fewer tokens.

    >>> canonical_shape(OperatorKind.LINEAR_QKV, ((4, 2, 64), (8, 2, 96)), {})
    (16, 64, 96)
    """
    first, output = tuple(raw[0]), tuple(raw[1])
    if kind in _LINEARS:
        return (max(_rows(first), _rows(output)), first[-1], output[-1])
    if kind is OperatorKind.EMBEDDING:
        return (prod(first), output[-1], raw[2])
    if kind is OperatorKind.CORE_ATTENTION:
        return _attention(first, tuple(raw[2]))
    if kind is OperatorKind.POSITION:
        tokens, _, width = parts.get(OperatorKind.LINEAR_QKV, (_rows(first), 0, 0))
        return (tokens, width)
    if kind is OperatorKind.ACTIVATION:
        tokens, _, width = parts.get(OperatorKind.LINEAR_FC1, (_rows(first), 0, 0))
        return (tokens, width, parts.get(OperatorKind.LINEAR_FC2, (0, 0, 0))[1])
    return (_rows(first), first[-1])


def _rows(shape: Shape) -> int:
    return prod(shape[:-1])


def _attention(query: Shape, key: Shape) -> Shape:
    if len(query) == 3:  # packed sequences have no batch dimension
        query, key = (query[0], 1, *query[1:]), (key[0], 1, *key[1:])
    seq, micro_batch, heads, channels = query
    return (micro_batch, heads, key[2], seq, channels)
