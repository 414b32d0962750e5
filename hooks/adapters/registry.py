"""The adapters: add one here, and ``--calibrate`` knows its loop."""

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
"""What waits for the import of a loop; a loop of torch alone is the last that is asked."""
