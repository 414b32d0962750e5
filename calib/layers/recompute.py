"""Recompute of a layout: the activations that its backward phase computes a second time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from ..workload.config import Recompute, RunConfig

WITHIN_MOE = frozenset({"moe_act", "shared_experts"})
"""Modules inside ``moe``."""
CORE_ATTENTION = ("core_attn",)
"""Megatron's default modules of selective recompute, used if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOption:
    """Recompute setting: none, modules, or whole layers."""

    recompute: Recompute = Recompute.NONE
    modules: tuple[str, ...] = ()
    """``RunConfig.recompute_modules``; empty means ``CORE_ATTENTION``."""
    num_layers: int = 0
    """Layers of each chunk that ``FULL`` recomputes; 0 means all."""

    @staticmethod
    def from_config(config: RunConfig) -> RecomputeOption:
        """Return the recompute setting of a layout.

        >>> from ..workload.config import Batch
        >>> from ..workload.model_shape import ModelShape
        >>> from ..workload.parallelism import Parallelism
        >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, kv_channels=16,
        ...     num_attention_heads=4, num_query_groups=4, seq_length=64, vocab_size=128)
        >>> run = RunConfig(model=gpt, parallelism=Parallelism(), recompute=Recompute.SELECTIVE,
        ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
        >>> none = RecomputeOption().applied_to(run)
        >>> RecomputeOption.from_config(run).names, RecomputeOption.from_config(none).names
        (('core_attn',), ())
        """
        return RecomputeOption(
            recompute=config.recompute,
            modules=config.recompute_modules,
            num_layers=config.recompute_num_layers,
        )

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Return the layout with this recompute setting."""
        is_whole = self.recompute is Recompute.FULL
        return replace(
            config,
            recompute=self.recompute,
            recompute_modules=self.modules,
            recompute_num_layers=self.num_layers,
            distributes_saved_activations=config.distributes_saved_activations and is_whole,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Modules whose forward is restarted, in the order in which they were named; empty unless
        recompute is selective."""
        if self.recompute is not Recompute.SELECTIVE:
            return ()
        return self.modules or CORE_ATTENTION

    @property
    def parts(self) -> frozenset[str]:
        """Recomputed modules, which retain no activations: those named, and those inside them."""
        return _parts(self.names)

    def num_covered(self, num_layers: int) -> int:
        """Return how many of a chunk's layers are recomputed as a whole."""
        if self.recompute is not Recompute.FULL:
            return 0
        return min(self.num_layers or num_layers, num_layers)

    @property
    def weight(self) -> float:
        """Sort key: larger than the weight of every setting that this one contains."""
        if self.recompute is Recompute.FULL:
            return self.num_layers or math.inf
        return len(self.parts)

    def is_within(self, other: RecomputeOption) -> bool:
        """Return True if the other setting recomputes everything that this one does.

        >>> mlp, both = (RecomputeOption(recompute=Recompute.SELECTIVE, modules=names)
        ...              for names in (("mlp",), ("core_attn", "mlp")))
        >>> mlp.is_within(both), both.is_within(mlp)
        (True, False)
        """
        if self.recompute is not other.recompute:
            return False
        if self.recompute is Recompute.FULL:
            return not other.num_layers or 0 < self.num_layers <= other.num_layers
        return self.parts <= other.parts


# Thousands of layouts request few distinct sets.
@cache
def _parts(names: tuple[str, ...]) -> frozenset[str]:
    modules = frozenset(names)
    return modules | WITHIN_MOE if "moe" in modules else modules
