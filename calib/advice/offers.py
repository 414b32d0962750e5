"""Which layouts may be offered: those that are faster, fit, and that the host can be asked for."""

from __future__ import annotations

from dataclasses import replace

from ..memory.peak import Verdict
from ..workload.config import RunConfig

_BATCH_ALONE = ("transformers", "Lightning", "PyTorch", "torchtitan")
"""Hosts whose degrees are the user's own code; a command line changes their batch alone."""


def takes_options(running: RunConfig) -> bool:
    """False where the host of a run is not asked for layouts by Megatron's options."""
    return not running.framework.startswith(_BATCH_ALONE)


def obstacle(config: RunConfig, running: RunConfig, *, verdict: Verdict, time_frac: float) -> str:
    """Why a layout is not offered to a running one; empty where nothing speaks against it.

    ``time_frac`` is its step time over that of the running layout, minus one: the median.
    """
    if verdict is Verdict.DOES_NOT_FIT:
        return "it does not fit in memory"
    if time_frac >= 0:
        return "it is not faster"
    if not takes_options(running) and not _is_same_split(config, running):
        return f"{running.framework.partition(' ')[0]} cannot be asked for it by options"
    return ""


def _is_same_split(one: RunConfig, other: RunConfig) -> bool:
    """Equal but for the batch."""
    return one.parallelism == other.parallelism and replace(other, batch=one.batch) == one
