"""Canonical operator shapes (see ``OperatorKind``) from the tensors of a module's call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from ..workload.operators import OperatorKind

Shape = tuple[int, ...]
_LINEARS = frozenset(kind for kind in OperatorKind if kind.is_linear)


def canonical_shape(
    kind: OperatorKind, raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]
) -> Shape:
    """Return an operator's shape from raw tensor shapes and the shapes of its inner operators.

    ``raw`` is (first input, output[, more]): the key's and the value's shape, the rows of a table,
    or a number that no tensor shows.  Linear layers are described by the product that runs: under
    sequence parallelism one side has fewer tokens.

    >>> canonical_shape(OperatorKind.LINEAR_QKV, ((4, 2, 64), (8, 2, 96)), {})
    (16, 64, 96)
    """
    if raw[0] is None:  # the shape is from a configuration
        return tuple(raw[1])
    first, output = tuple(raw[0]), tuple(raw[1])
    if kind in _LINEARS:
        return (max(_rows(first), _rows(output)), first[-1], output[-1])
    if kind in _OTHERS:
        return _OTHERS[kind](raw, parts)
    return (_rows(first), first[-1])


def _rows(shape: Shape) -> int:
    return prod(shape[:-1])


def _embedding(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    return (prod(raw[0]), raw[1][-1], raw[2])


def _attention(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    """Return the attention's shape; if values are not as wide as keys, channels are their mean."""
    query, key = tuple(raw[0]), tuple(raw[2])
    value = tuple(raw[3]) if len(raw) > 3 else key
    if len(query) == 3:  # packed sequences have no batch dimension
        query, key = (query[0], 1, *query[1:]), (key[0], 1, *key[1:])
    seq, micro_batch, heads, channels = query
    return (micro_batch, heads, key[2], seq, (channels + value[-1]) // 2)


def _position(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    """Return tokens and width; with latent attention, some channels of each head and of a shared
    key."""
    attention = parts.get(OperatorKind.CORE_ATTENTION)
    if len(raw) > 2 and attention is not None:
        micro_batch, heads, _, seq, _ = attention
        return (micro_batch * seq, (heads + 1) * raw[2])
    tokens, _, width = parts.get(OperatorKind.LINEAR_QKV, (_rows(tuple(raw[0])), 0, 0))
    if not width and attention is not None:  # queries, keys and values are three products
        _, heads, groups, _, channels = attention
        width = (heads + 2 * groups) * channels
    return (tokens, width)


def _activation(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    # If there are two grouped products, the second is the one still in ``parts``.
    grouped = parts.get(OperatorKind.GROUPED_LINEAR)
    if grouped is not None:
        _, rows, width, _ = grouped
        return (rows, width * (raw[2] if len(raw) > 2 else 1), width)
    tokens, _, width = parts.get(OperatorKind.LINEAR_FC1, (_rows(tuple(raw[0])), 0, 0))
    out = parts.get(OperatorKind.LINEAR_FC2, (0, 0, 0))[1]
    if OperatorKind.LINEAR in parts and not width:  # values and gates are two products
        width = 2 * parts[OperatorKind.LINEAR][2]
    return (tokens, width, out)


def _grouped(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    first = tuple(raw[0])
    return (raw[2], _rows(first), first[-1], raw[1][-1])


def _router(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    first = tuple(raw[0])
    return (_rows(first), first[-1], raw[1][-1])


def _permute(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    return (_rows(tuple(raw[0])), raw[0][-1], 1)


def _joined(raw: Sequence[Any], parts: Mapping[OperatorKind, Shape]) -> Shape:
    """Return the shape of hidden states concatenated with an embedding of the same width."""
    first = tuple(raw[0])
    return (_rows(first), 2 * first[-1])


_OTHERS: Mapping[OperatorKind, Callable[[Sequence[Any], Mapping[OperatorKind, Shape]], Shape]] = {
    OperatorKind.EMBEDDING: _embedding,
    OperatorKind.CORE_ATTENTION: _attention,
    OperatorKind.POSITION: _position,
    OperatorKind.ACTIVATION: _activation,
    OperatorKind.GROUPED_LINEAR: _grouped,
    OperatorKind.ROUTER: _router,
    OperatorKind.PERMUTE: _permute,
    OperatorKind.ELEMENTWISE: _joined,
}
