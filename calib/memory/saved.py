"""Tensors that wait for the backward phase: on the device, in pages, or in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..workload.config import Recompute, RunConfig

OFFLOADED_MODULES = frozenset(
    {
        *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        *("expert_fc1", "moe_act", "fused_group_mlp"),
    }
)
"""What ``offload_modules`` may name; the inputs of whole recomputed layers are left out."""
_FUSED = {"fused_group_mlp": {"expert_fc1", "moe_act"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One tensor that is kept."""

    name: str
    nbytes: float
    part: str = "attention"
    """``attention`` or ``mlp``: the backward pass frees the second before it reaches the first."""
    modules: tuple[str, ...] = ()
    """Names in ``recompute_modules`` under which it is dropped."""
    offload: str = ""
    """Name in ``offload_modules`` under which the host's memory holds it."""


def offloaded_nbytes(config: RunConfig, tensors: Iterable[Saved], again: frozenset[str]) -> float:
    """Bytes of these tensors of a layer that the host's memory holds between the passes.

    The input of each module of ``offload_modules`` (fine-grained activation offloading of
    Megatron-LM main, 2026); what is computed again is not copied, nor is anything where whole
    layers are.  Tensors below Megatron's least size and the last layer, which stay, count as well.
    """
    if config.recompute is Recompute.FULL or config.device == "cpu" or not config.offload_modules:
        return 0.0
    names = set(config.offload_modules)
    names = names.union(*(_FUSED.get(name, ()) for name in names))
    return sum(
        saved.nbytes
        for saved in tensors
        if saved.offload in names and not again.intersection(saved.modules)
    )


def stashed_nbytes(config: RunConfig, tensors: Iterable[Saved], again: frozenset[str]) -> float:
    """Bytes of these tensors of a layer of experts that are copied to pages; 0 without them."""
    experts = config.model.experts
    if experts is None or not experts.stash_factor or config.recompute is Recompute.FULL:
        return 0.0
    return sum(
        saved.nbytes
        for saved in tensors
        if saved.name.startswith("expert") and not again.intersection(saved.modules)
    )
