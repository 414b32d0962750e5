"""Registry of adapters; one that is added here makes ``--calibrate`` support its loop."""

from __future__ import annotations

from collections.abc import Callable

from ..session import Session
from . import (
    bridge,
    hugging_face,
    lightning,
    megatron_core,
    megatron_training,
    torch_loop,
    torchtitan,
)

ADAPTERS: tuple[Callable[[Session], None], ...] = (
    megatron_training.wait_for,
    megatron_core.wait_for,
    bridge.wait_for,
    hugging_face.wait_for,
    lightning.wait_for,
    torchtitan.wait_for,
    torch_loop.wait_for,
)
"""Functions that wait for the import of a loop, in order of priority; plain torch is last."""
