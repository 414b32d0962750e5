"""Model of PyTorch's caching allocator, to which CPU tensors are charged.

Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp: two pools, segments that are split
and never moved, the smallest free block that fits, and all free segments returned before the
device reports that it is out of memory.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_timeline import timeline
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20
LEAST, SMALL, SMALL_SEGMENT, LARGE_SEGMENT = 512, MIB, 2 * MIB, 20 * MIB
DEDICATED_NBYTES, DEDICATED_MULTIPLE = 10 * MIB, 2 * MIB
"""Requests from the first size on get a segment of their own, a multiple of the second."""


@dataclass(eq=False, kw_only=True)
class Block:
    """Part of a segment."""

    size: int
    segment: Segment
    is_free: bool = True


@dataclass(eq=False, kw_only=True)
class Segment:
    """Memory of one request to the device."""

    pool: str
    stream: int = 0
    pool_id: tuple[int, int] = (0, 0)
    blocks: list[Block] = field(default_factory=list)


class Allocator(TorchDispatchMode):
    """Charges the storage of each result until it is gone."""

    def __init__(self, *, device_nbytes: int) -> None:
        super().__init__()
        self.free_nbytes = device_nbytes
        self.segments: list[Segment] = []
        self.allocated = self.peak = self.reserved = 0
        self.num_segment_allocs = self.num_retries = 0
        self._blocks: dict[int, tuple[StorageWeakRef, Block]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._charge(one.untyped_storage())
        return result

    def _charge(self, storage: torch.UntypedStorage) -> None:
        self.sweep()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._blocks and storage.nbytes():
            self._blocks[reference.cdata] = (reference, self.allocate(storage.nbytes()))

    def sweep(self) -> None:
        """Free the blocks of storages that no longer exist."""
        for key in [key for key, (reference, _) in self._blocks.items() if reference.expired()]:
            self.free(self._blocks.pop(key)[1])

    def allocate(self, nbytes: int) -> Block:
        """Return a block for a request."""
        size = -(-max(nbytes, LEAST) // LEAST) * LEAST
        pool = "small" if size <= SMALL else "large"
        block = self._best(pool, size) or self._allocate(pool, size)
        remaining = block.size - size
        if remaining >= LEAST if pool == "small" else remaining > SMALL:
            block.size = size
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(size=remaining, segment=block.segment))
        block.is_free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with adjacent free ones."""
        self.allocated -= block.size
        block.is_free = True
        merged: list[Block] = []
        for one in block.segment.blocks:
            if merged and merged[-1].is_free and one.is_free:
                merged[-1].size += one.size
            else:
                merged.append(one)
        block.segment.blocks[:] = merged

    def _best(self, pool: str, size: int) -> Block | None:
        results: list[tuple[int, int, Block]] = []
        for segment in self.segments:
            if (segment.pool, segment.stream, segment.pool_id) == (pool, 0, (0, 0)):
                for block in segment.blocks:
                    if block.is_free and block.size >= size:
                        insort(results, (block.size, id(block), block))
        return results[0][2] if results else None

    def _allocate(self, pool: str, size: int) -> Block:
        wanted = SMALL_SEGMENT if pool == "small" else LARGE_SEGMENT
        if size >= DEDICATED_NBYTES:
            wanted = -(-size // DEDICATED_MULTIPLE) * DEDICATED_MULTIPLE
        if wanted > self.free_nbytes:
            self.num_retries += 1
            self.empty_cache()
        if wanted > self.free_nbytes:
            raise torch.OutOfMemoryError("no memory is left on the device")
        return self.segment(pool, wanted).blocks[0]

    def segment(self, pool: str, size: int, **where: Any) -> Segment:
        """Add a free segment."""
        self.num_segment_allocs += 1
        self.free_nbytes -= size
        self.reserved += size
        segment = Segment(pool=pool, **where)
        segment.blocks.append(Block(size=size, segment=segment))
        self.segments.append(segment)
        return segment

    def empty_cache(self) -> None:
        """Return free segments to the device."""
        for segment in [s for s in self.segments if all(b.is_free for b in s.blocks)]:
            size = sum(block.size for block in segment.blocks)
            self.segments.remove(segment)
            self.free_nbytes += size
            self.reserved -= size

    def snapshot(self, **_: Any) -> list[dict[str, Any]]:
        """Return segments in the form of ``torch.cuda.memory_snapshot``."""
        self.sweep()
        return [
            {
                "device": 0,
                "stream": segment.stream,
                "segment_type": segment.pool,
                "segment_pool_id": segment.pool_id,
                "blocks": [
                    {"size": b.size, "state": "inactive" if b.is_free else "active_allocated"}
                    for b in segment.blocks
                ],
            }
            for segment in self.segments
        ]

    def stats(self, *_: Any) -> dict[str, int]:
        """Return the entries of ``torch.cuda.memory_stats`` that the package reads."""
        return {
            "segment.all.allocated": self.num_segment_allocs,
            "num_alloc_retries": self.num_retries,
        }

    def allocated_now(self, *_: Any) -> int:
        """Stand in for ``torch.cuda.memory_allocated``."""
        self.sweep()
        return self.allocated


@contextmanager
def charged(device_nbytes: int) -> Iterator[Allocator]:
    """Have ``torch.cuda`` answer by the model, and charge this thread's tensors to it."""
    one = Allocator(device_nbytes=device_nbytes)
    with pytest.MonkeyPatch.context() as patch, one:
        for name, answer in {
            "memory_allocated": one.allocated_now,
            "max_memory_allocated": lambda *_: one.peak,
            "memory_reserved": lambda *_: one.reserved,
            "memory_stats": one.stats,
            "memory_snapshot": one.snapshot,
            "mem_get_info": lambda *_: (one.free_nbytes, one.free_nbytes + one.reserved),
            "current_device": lambda: 0,
            "empty_cache": one.empty_cache,
        }.items():
            patch.setattr(torch.cuda, name, answer)
        if timeline() is None:
            patch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
        yield one
