"""Stages of models whose layers do not split evenly over a pipeline."""

from __future__ import annotations


def uneven_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, all alike but for the last, which also has the head; () where even.

    >>> uneven_layers(61, 8), uneven_layers(64, 8)
    ((8, 8, 8, 8, 8, 8, 8, 5), ())
    """
    if num_layers % pp == 0:
        return ()
    each = -(-num_layers // pp)
    if each * (pp - 1) >= num_layers:
        each -= 1
    return (*[each] * (pp - 1), num_layers - each * (pp - 1))
