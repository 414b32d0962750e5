"""Which layers have experts: Megatron's ``--moe-layer-freq`` as a number, list or expression."""

from __future__ import annotations

import ast
from typing import Any

from ..errors import ConfigError

# Ten times what MOST allows: an expression such as [1]*10**9 must not fill the memory.
_MAX_LAYERS = 100_000


def expert_layers(freq: object, num_layers: int) -> tuple[bool, ...]:
    """True for each layer with experts, first to last; empty where all have them.

    A number N gives experts to the layers 0, N, 2N, ...  An expression such as ``([0]*3+[1]*58)``
    may hold whole numbers, lists, ``+`` and ``*``; nothing else of it is evaluated.  Raises
    ``ConfigError`` for any other expression.

    >>> expert_layers("[0]*1+[1]*2", 3)
    (False, True, True)
    """
    value = _evaluated(freq) if isinstance(freq, str) else freq
    if isinstance(value, list | tuple):
        pattern = tuple(bool(int(v)) for v in value)
    elif isinstance(value, int) and value >= 1:
        pattern = tuple(layer % value == 0 for layer in range(num_layers))
    else:
        raise ConfigError(f"--moe-layer-freq {freq!r} is no number and no list; give [0]*3+[1]*58")
    return () if all(pattern) and len(pattern) == num_layers else pattern


def _evaluated(text: str) -> Any:
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as err:
        raise ConfigError(
            f"--moe-layer-freq {text!r} is not made of numbers, lists, + and *; "
            f"write it as [0]*3+[1]*58"
        ) from err


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if _size(left) * _size(right) > _MAX_LAYERS:
            raise ValueError("too many layers")
        return left * right
    raise ValueError(ast.dump(node))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else abs(value)
