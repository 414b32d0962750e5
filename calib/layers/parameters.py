"""Parameter tensors of one rank, in Megatron's order, and their number by how they are treated."""

from __future__ import annotations

from ..errors import ConfigError
from ..workload.config import Precision, RunConfig
from .blocks import chunk_blocks
from .buckets import num_shards
from .tensors import BlockNumel, ParameterTensor


def parameter_tensors(config: RunConfig, chunk: int) -> tuple[ParameterTensor, ...]:
    """The tensors of one rank of a chunk in the order of ``named_parameters()``.

    Checked against ``megatron.core`` 0.16.1's ``GPTModel`` with the local layer specification.
    """
    check_chunk(config, chunk)
    return tuple(
        tensor
        for block, count in chunk_blocks(config, chunk)
        for _ in range(count)
        for tensor in block.tensors
    )


def parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` holds."""
    return sum(numel.whole * count for numel, count in _stage_numel(config, stage))


def updated_parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` updates: a share when the optimizer is distributed."""
    par, held = config.parallelism, _stage_numel(config, stage)
    dense = sum(numel.dense * count for numel, count in held)
    experts = sum(numel.expert * count for numel, count in held)
    return -(-dense // num_shards(par)) - (-experts // num_shards(par, is_expert=True))


def grad_nbytes(config: RunConfig) -> int:
    """Bytes of a gradient element in the reduction: fp32, but fp16 runs reduce in fp16."""
    return 2 if config.precision is Precision.FP16 or config.reduces_grads_in_bf16 else 4


def tp_reduced_numel(config: RunConfig, stage: int) -> int:
    """Elements that every tp rank holds with a part of their gradient, which is summed over tp.

    Under sequence parallelism norms and biases after row-parallel linears; always the norms of
    queries and keys (``_allreduce_non_tensor_model_parallel_grads``).
    """
    is_split = config.parallelism.is_sequence_parallel
    return sum(
        (numel.head_parallel + is_split * numel.sequence_parallel) * count
        for numel, count in _stage_numel(config, stage)
    )


def check_stage(config: RunConfig, stage: int) -> None:
    """Raise ``ConfigError`` where the layout has no such stage."""
    if not 0 <= stage < config.parallelism.pp:
        raise ConfigError(
            f"stage {stage} is not in pp {config.parallelism.pp}; "
            f"choose from 0 to {config.parallelism.pp - 1}"
        )


def check_chunk(config: RunConfig, chunk: int) -> None:
    """Raise ``ConfigError`` where the layout has no such chunk."""
    if not 0 <= chunk < config.parallelism.num_chunks:
        raise ConfigError(
            f"chunk {chunk} is not in pp {config.parallelism.pp} x vp {config.parallelism.vp}; "
            f"choose from 0 to {config.parallelism.num_chunks - 1}"
        )


def _stage_numel(config: RunConfig, stage: int) -> list[tuple[BlockNumel, int]]:
    check_stage(config, stage)
    return [
        (block.numel, count)
        for chunk in config.chunks_of(stage)
        for block, count in chunk_blocks(config, chunk)
    ]
