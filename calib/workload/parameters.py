"""Parameter tensors of one rank, in Megatron's order, and the buckets that gradients travel in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .blocks import chunk_blocks
from .config import Precision, RunConfig
from .tensors import ParameterTensor

__all__ = [
    "Bucket",
    "ParameterTensor",
    "buckets",
    "check_stage",
    "grad_nbytes",
    "parameter_tensors",
    "parameters",
    "sequence_parallel_numel",
    "updated_parameters",
]

_START_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_PADDED_BUCKET_ALIGNMENT = 2**16
_MIN_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced in one collective."""

    numel: int
    is_expert: bool = False


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


@lru_cache(maxsize=4096)
def parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` holds."""
    return sum(t.numel for t in _stage_tensors(config, stage))


def updated_parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` updates: a share when the optimizer is distributed."""
    par = config.parallelism
    tensors = _stage_tensors(config, stage)
    experts = sum(t.numel for t in tensors if t.is_expert)
    rest = sum(t.numel for t in tensors) - experts
    if not par.is_optimizer_distributed:
        return rest + experts
    copies = par.num_optimizer_instances
    dense_shards = max(1, par.dp * par.cp // copies)
    return -(-rest // dense_shards) - (-experts // max(1, par.expert_dp // copies))


def buckets(config: RunConfig, chunk: int) -> tuple[Bucket, ...]:
    """Each gradient bucket, in the order in which the backward phase fills them.

    Without overlap, and on every chunk but the first, there is one bucket; with it a bucket closes
    at max(40 M, 1 M x dp) elements.  The distributed optimizer pads starts to 64 and ends to
    lcm(dp, 128), and gives a shared embedding a bucket of its own (``_ParamAndGradBuffer``).
    Experts fill buckets of their own.
    """
    tensors = parameter_tensors(config, chunk)
    par = config.parallelism
    sizes = _fill(config, chunk, [t for t in tensors if not t.is_expert], par.dp * par.cp)
    experts = _fill(config, chunk, [t for t in tensors if t.is_expert], par.expert_dp)
    return (
        *(Bucket(numel=numel) for numel in sizes),
        *(Bucket(numel=numel, is_expert=True) for numel in experts),
    )


def grad_nbytes(config: RunConfig) -> int:
    """Bytes of a gradient element in the reduction: fp32, but fp16 runs reduce in fp16."""
    return 2 if config.precision is Precision.FP16 or config.reduces_grads_in_bf16 else 4


def sequence_parallel_numel(config: RunConfig, stage: int) -> int:
    """Elements whose gradients are all-reduced over tp because of sequence parallelism."""
    return sum(t.numel for t in _stage_tensors(config, stage) if t.is_sequence_parallel)


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


def _stage_tensors(config: RunConfig, stage: int) -> list[ParameterTensor]:
    check_stage(config, stage)
    return [t for chunk in config.chunks_of(stage) for t in parameter_tensors(config, chunk)]


def _fill(
    config: RunConfig, chunk: int, tensors: Sequence[ParameterTensor], num_ranks: int
) -> list[int]:
    par = config.parallelism
    is_padded = par.is_optimizer_distributed
    limit = par.bucket_numel or max(_MIN_BUCKET, _BUCKET_PER_RANK * num_ranks)
    if not par.overlaps_grad_reduce or chunk > 0:
        limit = 0
    aligned = math.lcm(num_ranks, _BUCKET_ALIGNMENT)
    if par.pads_buckets:
        aligned = math.lcm(aligned, _PADDED_BUCKET_ALIGNMENT)
    divisor = aligned if is_padded else 1
    sizes: list[int] = []
    start = end = 0
    for tensor in reversed(tensors):
        begin = _pad(end, _START_ALIGNMENT) if is_padded else end
        is_alone = is_padded and tensor.is_shared_embedding
        if is_alone and end > start:
            begin = _pad(begin, divisor)
            sizes.append(begin - start)
            start = begin
        end = begin + tensor.numel
        if is_alone or (limit and end - start >= limit):
            end = _pad(end, divisor)
            sizes.append(end - start)
            start = end
    if end > start:
        sizes.append(_pad(end, divisor) - start)
    return sizes


def _pad(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
