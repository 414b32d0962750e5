"""Tensors of one rank."""

from __future__ import annotations

from forerun.calib.layers.blocks import chunk_blocks
from forerun.calib.layers.tensors import ParameterTensor
from forerun.calib.workload.config import RunConfig


def parameter_tensors(config: RunConfig, chunk: int) -> list[ParameterTensor]:
    """Return the tensors of a chunk, in the order of ``named_parameters()``."""
    return [
        tensor
        for block, count in chunk_blocks(config, chunk)
        for _ in range(count)
        for tensor in block.tensors
    ]


def parameters(config: RunConfig, stage: int) -> int:
    """Return the number of elements on one rank of a stage."""
    chunks = config.chunks_of(stage)
    return sum(tensor.numel for chunk in chunks for tensor in parameter_tensors(config, chunk))
