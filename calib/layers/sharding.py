"""Traffic of sharded weights and gradients: each block is one FSDP unit.

Zhao et al. 2023 ("PyTorch FSDP", section 3): a unit's weights are gathered before its forward pass
and before its backward pass, its gradients are reduce-scattered after the latter, and under hybrid
sharding each gradient shard is then summed over the replicas.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..workload.collectives import Collective, CollectiveUse, GroupRole, Placement
from ..workload.config import Fp8Recipe, RunConfig
from ..workload.ranks import group_call
from .layer_modules import between_ranks, transfer
from .tensors import ParameterTensor


def gathered_nbytes(config: RunConfig, *, is_quantized: bool) -> int:
    """Return bytes per element of a gathered weight; under MXFP8 and NVFP4, Megatron gathers in 16
    bits."""
    is_whole = config.fp8 in (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4)
    return 1 if is_quantized and not is_whole else config.precision.nbytes


def shard_key(config: RunConfig) -> tuple[Hashable, ...] | None:
    """Return the settings that a block's sharding traffic depends on; None if it has none."""
    par = config.parallelism
    if not (par.shards_weights or par.shards_grads):
        return None
    return (
        *(par.sharding, par.regathers_weights, par.keeps_grads_whole, par.prefetches_backward),
        *(par.overlaps_grad_reduce, par.overlaps_param_gather),
        *(par.dp, par.num_optimizer_instances, par.is_pipeline_before_data, par.pp),
        *(config.reduces_grads_in_bf16, has_host_units(config)),
    )


def has_host_units(config: RunConfig) -> bool:
    """Return True if host time per FSDP2 unit is exposed: on the CPU; an accelerator hides it."""
    is_wrapped = config.parallelism.shards_weights and config.sharded_update_calls > 0
    return is_wrapped and config.device == "cpu"


def shard_uses(
    config: RunConfig, tensors: Iterable[ParameterTensor], *, is_root: bool = False
) -> tuple[CollectiveUse, ...]:
    """Return the weight gathers and gradient reductions of a block, once per micro-batch.

    Experts are gathered among their replicas, all else over data- and context-parallel ranks.
    ``is_root``: embedding and head, which no unit wraps; their gathered weights stay for the
    backward pass (both generations of FSDP, and Megatron's).
    """
    if shard_key(config) is None:
        return ()
    uses: list[CollectiveUse] = []
    all_tensors = tuple(tensors)
    for role, is_expert in ((GroupRole.DP, False), (GroupRole.EXPERT_DP, True)):
        group_tensors = [tensor for tensor in all_tensors if tensor.is_expert is is_expert]
        if group_tensors:
            uses += _of_group(config, role, group_tensors, is_root)
    return between_ranks(uses)


def _of_group(
    config: RunConfig, role: GroupRole, tensors: list[ParameterTensor], is_root: bool
) -> Iterable[CollectiveUse]:
    par = config.parallelism
    if par.shards_weights:
        nbytes = sum(
            tensor.numel
            * gathered_nbytes(config, is_quantized=config.keeps_fp8_params and tensor.is_quantized)
            for tensor in tensors
        )
        gather = group_call(config, Collective.ALL_GATHER, role, nbytes)
        is_ahead = par.overlaps_param_gather
        yield transfer(gather, Placement.FORWARD, is_overlapped=is_ahead)
        if par.regathers_weights and not is_root:
            is_ahead = is_ahead and par.prefetches_backward
            yield transfer(gather, Placement.BACKWARD, is_overlapped=is_ahead)
    if par.shards_grads:
        nbytes = sum(tensor.numel for tensor in tensors) * config.grad_nbytes
        scatter = group_call(config, Collective.REDUCE_SCATTER, role, nbytes)
        is_overlapped = par.overlaps_grad_reduce
        yield transfer(scatter, Placement.BACKWARD, is_overlapped=is_overlapped)
        shard = nbytes // scatter.num_ranks
        across = group_call(config, Collective.ALL_REDUCE, GroupRole.DP_INSTANCES, shard)
        yield transfer(across, Placement.BACKWARD, is_overlapped=is_overlapped)
