"""What a layout computes again in the backward phase."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from ..workload import Recompute, RunConfig

WITHIN_MOE = frozenset({"moe_act", "shared_experts"})
"""Modules that lie within ``moe``."""
CORE_ATTENTION = ("core_attn",)
"""What Megatron computes again where modules are asked for and none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Nothing, modules, or whole layers."""

    recompute: Recompute = Recompute.NONE
    modules: tuple[str, ...] = ()
    """As ``RunConfig`` has them; none stands for ``CORE_ATTENTION``."""
    num_layers: int = 0
    """Of each chunk under ``FULL``; 0 means all."""

    @staticmethod
    def own(config: RunConfig) -> Again:
        """What a layout computes again as it is.

        >>> from ..workload import Batch, ModelShape, Parallelism
        >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, kv_channels=16,
        ...     num_attention_heads=4, num_query_groups=4, seq_length=64, vocab_size=128)
        >>> run = RunConfig(model=gpt, parallelism=Parallelism(), recompute=Recompute.SELECTIVE,
        ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
        >>> Again.own(run).names, Again.own(Again().of(run)).names
        (('core_attn',), ())
        """
        return Again(
            recompute=config.recompute,
            modules=config.recompute_modules,
            num_layers=config.recompute_num_layers,
        )

    def of(self, config: RunConfig) -> RunConfig:
        """The layout with this."""
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
        """Modules that are started again, in the order in which they were named; none where whole
        layers are."""
        if self.recompute is not Recompute.SELECTIVE:
            return ()
        return self.modules or CORE_ATTENTION

    @property
    def parts(self) -> frozenset[str]:
        """Modules that run again, so that nothing of theirs waits: those named, and those within
        them."""
        return _parts(self.names)

    @property
    def weight(self) -> float:
        """More than that of all that are within it."""
        if self.recompute is Recompute.FULL:
            return self.num_layers or math.inf
        return len(self.parts)

    def is_within(self, other: Again) -> bool:
        """Whether all that runs again here does so under the other as well.

        >>> mlp, both = (Again(recompute=Recompute.SELECTIVE, modules=names)
        ...              for names in (("mlp",), ("core_attn", "mlp")))
        >>> mlp.is_within(both), both.is_within(mlp)
        (True, False)
        """
        if self.recompute is not other.recompute:
            return False
        if self.recompute is Recompute.FULL:
            return not other.num_layers or 0 < self.num_layers <= other.num_layers
        return self.parts <= other.parts


# Few sets are asked for, by thousands of layouts.
@cache
def _parts(names: tuple[str, ...]) -> frozenset[str]:
    found = frozenset(names)
    return found | WITHIN_MOE if "moe" in found else found
