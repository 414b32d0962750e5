"""What the host of a run can be asked for."""

from __future__ import annotations

from .config import RunConfig

_BATCH_ALONE = ("transformers", "Lightning", "PyTorch", "torchtitan")
"""Hosts whose degrees are the user's own code; a command line changes their batch alone."""


def takes_options(running: RunConfig) -> bool:
    """False where the host of a run is not asked for layouts by Megatron's options."""
    return not running.framework.startswith(_BATCH_ALONE)
