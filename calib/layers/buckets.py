"""Gradient buckets, as ``_ParamAndGradBuffer`` (megatron.core 0.16.1) cuts them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..workload.config import RunConfig
from ..workload.parallelism import Parallelism
from .blocks import BlockCount, BufferKey, chunk_blocks
from .tensors import START_ALIGNMENT, Strip

# From ``param_and_grad_buffer.py``: 128 elements of two bytes are 256 bytes, the alignment that
# cuBLAS wants for its operands; 2**16 keeps NCCL's bus bandwidth high over many ranks.
_BUCKET_ALIGNMENT = 128
_PADDED_BUCKET_ALIGNMENT = 2**16
# Megatron's defaults (``distributed_data_parallel.py``): 40 M elements, or 1 M for each rank.
_MIN_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients reduced by one collective."""

    numel: int
    is_expert: bool = False
    is_quantized: bool = False
    """True if its parameters are stored in 8 bits."""


def buckets(config: RunConfig, chunk: int) -> tuple[Bucket, ...]:
    """Return the gradient buckets of a chunk, in the order in which the backward phase fills them.

    Without overlap, and on every chunk but the first, there is one bucket; with overlap a bucket
    closes at max(40 M, 1 M x dp x cp) elements.  The distributed optimizer pads starts to 64 and
    ends to lcm(shards, 128), and gives a shared embedding a separate bucket.  Experts have separate
    buckets, and so have parameters stored in 8 bits.
    """
    blocks = chunk_blocks(config, chunk)
    keys = sorted({key for block, _ in blocks for key in block.strips})
    return tuple(
        Bucket(numel=numel, is_expert=key[0], is_quantized=key[1])
        for key in keys
        for numel in _cut(config, chunk, blocks, key)
    )


def num_shards(parallelism: Parallelism, *, is_expert: bool = False) -> int:
    """Return the number of ranks that share a gradient: 1 without the distributed optimizer.

    >>> num_shards(Parallelism(dp=8, cp=2, is_optimizer_distributed=True))
    16
    """
    par = parallelism
    if not par.is_optimizer_distributed:
        return 1
    replicas = par.expert_dp if is_expert else par.dp * par.cp
    return max(1, replicas // par.num_optimizer_instances)


def _cut(config: RunConfig, chunk: int, blocks: Iterable[BlockCount], key: BufferKey) -> list[int]:
    par = config.parallelism
    cutter = _Cutter(limit=_limit(par) if par.overlaps_grad_reduce and chunk == 0 else 0)
    if par.is_optimizer_distributed:
        alignment = _PADDED_BUCKET_ALIGNMENT if par.pads_buckets else _BUCKET_ALIGNMENT
        shards = num_shards(par, is_expert=key[0])
        cutter.start_alignment = START_ALIGNMENT
        cutter.end_alignment = math.lcm(shards, alignment)
    # Gradients arrive in the order of the backward pass, the last layer's first.
    for block, count in reversed(tuple(blocks)):
        buffer_strip = block.strips.get(key)
        if buffer_strip is not None:
            cutter.add(buffer_strip, count)
    return cutter.finish()


def _limit(par: Parallelism) -> int:
    return par.bucket_numel or max(_MIN_BUCKET, _BUCKET_PER_RANK * par.dp * par.cp)


@dataclass(slots=True)
class _Cutter:
    """Lay parameters into a buffer and close buckets; alignment 1 pads nothing."""

    limit: int
    """Elements at which a bucket closes; 0 means no limit."""
    start_alignment: int = 1
    end_alignment: int = 1
    sizes: list[int] = field(default_factory=list)
    _start: int = 0
    _end: int = 0

    @property
    def is_padded(self) -> bool:
        """True under the distributed optimizer."""
        return self.start_alignment > 1

    def add(self, buffer_strip: Strip, count: int) -> None:
        """Append ``count`` copies of a strip, each as a whole if no bucket ends in it."""
        extent = buffer_strip.aligned_end if self.is_padded else buffer_strip.numel
        is_cut_out = self.is_padded and buffer_strip.has_shared_embedding
        if not self.limit and not is_cut_out:
            advance = buffer_strip.aligned_numel if self.is_padded else buffer_strip.numel
            self._end = self._begin() + (count - 1) * advance + extent
            return
        for _ in range(count):
            begin = self._begin()
            if is_cut_out or begin + extent - self._start >= self.limit:
                self._add_each(buffer_strip)
            else:
                self._end = begin + extent

    def finish(self) -> list[int]:
        """Close the last bucket and return the sizes of all."""
        if self._end > self._start:
            self._close(self._end)
        return self.sizes

    def _add_each(self, buffer_strip: Strip) -> None:
        for numel, is_shared in buffer_strip.parts:
            begin = self._begin()
            # Its gradient is also summed over the first and the last stage, hence a bucket alone.
            is_alone = is_shared and self.is_padded
            if is_alone and self._end > self._start:
                begin = self._close(begin)
            self._end = begin + numel
            if is_alone or (self.limit and self._end - self._start >= self.limit):
                self._close(self._end)

    def _begin(self) -> int:
        return _padded(self._end, self.start_alignment)

    def _close(self, end: int) -> int:
        end = _padded(end, self.end_alignment)
        self.sizes.append(end - self._start)
        self._start = self._end = end
        return end


def _padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
