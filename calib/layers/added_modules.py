"""The one place to add a module to every transformer layer: what it runs, and what it keeps.

docs/extending/operator_kind.md adds one with an operator of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from ..workload.config import RunConfig
from .layer_modules import LayerModule

ADDED_MODULES: tuple[Callable[[RunConfig], LayerModule], ...] = ()
"""Each from a layout; one that a model has not, runs no operators and keeps nothing."""


def added_modules(config: RunConfig) -> tuple[LayerModule, ...]:
    """Those of a layer, in the order in which they run."""
    return tuple(make(config) for make in ADDED_MODULES)


def added_kept_nbytes(config: RunConfig) -> float:
    """What they keep of one micro-batch until its backward pass."""
    return float(sum(module.kept_nbytes for module in added_modules(config)))
