"""Registry of adapters; one that is added here makes ``--calibrate`` support its loop."""

from __future__ import annotations

from collections.abc import Callable

from ...leaves import leaf
from ..session.session import Session

_NAMES = (
    "megatron_training",
    "megatron_core",
    "bridge",
    "hugging_face",
    "lightning",
    "torchtitan",
    "torch_loop",
)
"""Modules in order of priority; plain torch is last."""
_FOUND = (leaf(f".{name}:wait_for", __package__ or "") for name in _NAMES)
ADAPTERS: tuple[Callable[[Session], None], ...] = tuple(one for one in _FOUND if one is not None)
"""Functions that wait for the import of a loop, in order of priority."""
