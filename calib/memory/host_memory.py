"""Memory of a host that holds optimizer states and activations of its devices."""

from __future__ import annotations

from dataclasses import replace

from ..workload.config import Precision, RunConfig
from .peak import stage_memories

_GRAD_NBYTES = 4
"""Beside each parameter that the host updates (Megatron's ``hybrid_optimizer.py`` pins them)."""


def host_nbytes(config: RunConfig) -> int:
    """Bytes that the ranks of the fullest stage keep on one node; 0 where nothing is offloaded.

    These are what their devices have less of than without offloading, and gradients of parameters
    that hosts update.
    """
    if not (config.optimizer_offload_frac or config.offload_modules):
        return 0
    whole = stage_memories(replace(config, optimizer_offload_frac=0.0, offload_modules=()))
    width = config.optimizer_state_nbytes or (8 if config.precision is Precision.FP32 else 12)
    ranks, par = [], config.parallelism
    for plain, own in zip(whole, stage_memories(config), strict=True):
        states = plain.optimizer_nbytes - own.optimizer_nbytes
        away = max(plain.activations_nbytes - own.activations_nbytes, 0)
        ranks.append(states * (width + _GRAD_NBYTES) // width + away)
    return max(ranks) * min(par.ranks_per_node or par.num_ranks, par.num_ranks)
