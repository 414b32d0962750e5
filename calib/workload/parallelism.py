"""Degrees of parallelism, order of ranks and passes, and overlap."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from .argument_fields import number, switch
from .argument_values import QuickEnum
from .model_shape import at_least_one, at_most, not_negative


class ContextComm(QuickEnum):
    """Exchange of attention under context parallelism, by Megatron's name."""

    P2P = "p2p"
    ALL_TO_ALL = "a2a"
    ALL_GATHER = "all_gather"
    HIERARCHICAL = "a2a+p2p"
    """All-to-all among neighbours (``context_inner``), and a ring over their groups."""


class Engine(QuickEnum):
    """Library whose pipeline and optimizer run the layout."""

    MEGATRON = "megatron"
    TORCH = "torch"
    """PyTorch as in torchtitan: FSDP2, its own loss, and checkpoints that pick operators."""


class Sharding(QuickEnum):
    """State sharded over the ranks of a data-parallel group.

    The values are the stages of ZeRO (Rajbhandari et al. 2020, section 5), each including those
    before it.
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    """Optimizer states: ZeRO-1, Megatron's distributed optimizer."""
    GRADS = "grads"
    """Also gradients, so that they are reduced for every micro-batch: ZeRO-2."""
    WEIGHTS = "weights"
    """Also weights, gathered layer by layer: ZeRO-3, FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Degrees of parallelism and overlap; ``num_ranks = tp * cp * dp * pp``.

    Experts split the same ranks as ``etp * ep * expert_dp * pp``.
    """

    tp: int = number("tensor_model_parallel_size", default=1, is_stated=True)
    """Tensor-parallel degree."""
    pp: int = number("pipeline_model_parallel_size", default=1, is_stated=True)
    """Pipeline stages."""
    vp: int = 1
    """Chunks of layers on each stage (virtual stages)."""
    dp: int = 1
    """Replicas."""
    cp: int = number("context_parallel_size", default=1)
    """Context-parallel degree."""
    ep: int = number("expert_model_parallel_size", default=1)
    """Expert-parallel degree."""
    etp: int = number("expert_tensor_parallel_size", default=0)
    """Tensor-parallel degree of the experts; 0 means ``tp``."""
    chunk_layers: tuple[int, ...] = ()
    """Layers of each of the pp x vp chunks in model order; empty means even.

    Chunk c runs on stage c % pp.  The first also holds the embedding, the last the head.
    """
    microbatch_group_size: int = number(
        "microbatch_group_size_per_vp_stage",
        default=0,
        option="microbatch_group_size_per_virtual_pipeline_stage",
    )
    """Micro-batches that a stage runs through one chunk before the next; 0 means pp."""
    engine: Engine = Engine.MEGATRON
    """Library of pipeline and optimizer."""
    context_comm: ContextComm = ContextComm.P2P
    """Exchange of attention among context-parallel ranks."""
    context_inner: int = 1
    """Neighbours in cp that exchange heads all-to-all under ``HIERARCHICAL``."""
    is_pipeline_before_data: bool = switch("use_tp_pp_dp_mapping")
    """Rank order is tp-cp-ep-pp-dp in place of tp-cp-ep-dp-pp."""
    num_optimizer_instances: int = number("num_distributed_optimizer_instances", default=1)
    """Copies of the distributed optimizer's state over dp; under hybrid sharding (HSDP), copies of
    all sharded state."""
    is_sequence_parallel: bool = switch("sequence_parallel")
    """Activations between the products are split over tp along the sequence."""
    is_optimizer_distributed: bool = switch("use_distributed_optimizer")
    """Replicas shard the optimizer's states, and further state as ``sharding`` says."""
    sharding: Sharding = Sharding.OPTIMIZER
    """State that a distributed optimizer shards; ignored without one, see ``sharded``."""
    regathers_weights: bool = True
    """Sharded weights are freed after a layer's forward pass (FSDP's reshard after forward)."""
    prefetches_backward: bool = True
    """The gather of the next layer's sharded weights overlaps this one's backward pass (FSDP's
    ``BACKWARD_PRE``); under ``BACKWARD_POST`` it comes after it and is exposed."""
    keeps_grads_whole: bool = False
    """Weights are sharded, but gradients are reduced once per step (FSDP under ``no_sync``)."""
    overlaps_grad_reduce: bool = switch("overlap_grad_reduce")
    """Gradient reductions overlap the backward passes."""
    overlaps_param_gather: bool = switch("overlap_param_gather")
    """Weight gathers overlap the forward passes."""
    gathers_beside_update: bool = switch("overlap_param_gather_with_optimizer_step")
    """The weight gather of the first chunk overlaps the update of the others."""
    overlaps_p2p: bool = switch(
        "overlap_p2p_comm", default=True, option="no_overlap_p2p_communication"
    )
    """Sends of interleaved chunks overlap the passes; without vp Megatron never overlaps them."""
    overlaps_p2p_ends: bool = switch(
        "overlap_p2p_comm_warmup_flush", option="overlap_p2p_communication_warmup_flush"
    )
    """Sends in warm-up and cool-down overlap too."""
    overlaps_tp: bool = switch("tp_comm_overlap")
    """Gathers and scatters of tp run inside their products."""
    bucket_numel: int = number("ddp_bucket_size", default=0)
    """Elements at which a gradient bucket closes; 0 means Megatron's rule."""
    pads_buckets: bool = switch("ddp_pad_buckets_for_high_nccl_busbw")
    """Buckets end on 2**16 elements."""
    ranks_per_node: int = 0
    """Ranks that share a node; 0 means unknown, and every group counts as one node."""

    def __post_init__(self) -> None:
        degrees = ("tp", "pp", "vp", "dp", "cp", "ep")
        for name in (*degrees, "num_optimizer_instances", "context_inner"):
            at_least_one(name, getattr(self, name))
        for name in ("etp", "microbatch_group_size", "bucket_numel", "ranks_per_node"):
            not_negative(name, getattr(self, name))
        at_most("num_ranks", self.num_ranks)
        if self.chunk_layers and len(self.chunk_layers) != self.pp * self.vp:
            raise ConfigError(
                f"chunk_layers has {len(self.chunk_layers)} entries, not pp {self.pp} x vp "
                f"{self.vp}; give one for each chunk"
            )
        if self.num_ranks % (self.expert_tp * self.ep * self.pp):
            each, rest = divmod(self.num_ranks // self.pp, self.expert_tp)
            remedy = f"etp from the divisors of {self.num_ranks // self.pp} and ep 1"
            raise ConfigError(
                f"{self.num_ranks} ranks do not split over expert tp {self.expert_tp} x ep "
                f"{self.ep} x pp {self.pp}; choose "
                f"{remedy if rest else f'ep from the divisors of {each}'}"
            )

    @property
    def exchanged_cp(self) -> int:
        """Ranks of cp that exchange heads: each has a share of the heads, for the joint sequence of
        these ranks."""
        match self.context_comm:
            case ContextComm.ALL_TO_ALL:
                return self.cp
            case ContextComm.HIERARCHICAL:
                return min(self.context_inner, self.cp)
        return 1

    @property
    def num_ranks(self) -> int:
        """Ranks that the layout occupies."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def sharded(self) -> Sharding:
        """State that is sharded over dp.

        >>> Parallelism(dp=8, sharding=Sharding.WEIGHTS).sharded.value
        'none'
        """
        return self.sharding if self.is_optimizer_distributed else Sharding.NONE

    @property
    def shards_weights(self) -> bool:
        """True if no rank retains a whole layer between its passes."""
        return self.sharded is Sharding.WEIGHTS

    @property
    def shards_grads(self) -> bool:
        """True if each micro-batch's gradients are reduced, and only their shards accumulate."""
        is_deep = self.sharded in (Sharding.GRADS, Sharding.WEIGHTS)
        return is_deep and not self.keeps_grads_whole

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree of the experts."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.num_ranks // (self.expert_tp * self.ep * self.pp)

    @property
    def num_chunks(self) -> int:
        """Chunks of the model: pp x vp."""
        return self.pp * self.vp
