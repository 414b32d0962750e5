"""Contents of a layer: dense, experts, latent attention, context parallelism, prediction.

In: a ``RunConfig``. Out: operators and collectives of each block and stage, gradient buckets.
Imports ``workload``.
"""

from typing import TYPE_CHECKING

from ...faces import lazy_getattr

if TYPE_CHECKING:
    from .blocks import (
        EXPERT_KINDS,
        LAYER_KINDS,
        Block,
        BlockKind,
        BlockVariant,
        block,
        block_key,
        block_part,
        chunk_variants,
        layer_kind,
        layer_kinds,
        opaque_of,
        recomputed_layers,
    )
    from .buckets import num_shards
    from .launches import launched_frac, recomputed_launch_frac, replayed_frac
    from .layer_modules import added_saved_nbytes, norm_module
    from .model_size import model_flop_per_token, model_name
    from .recompute import CORE_ATTENTION, WITHIN_MOE, RecomputeOption
    from .sharding import shard_key
    from .stage_work import (
        collective_uses,
        gradient_uses,
        host_pass,
        p2p_call,
        stage_operators,
        step_collectives,
        step_operators,
    )
    from .tensors import block_numel

__getattr__ = lazy_getattr(__name__)
