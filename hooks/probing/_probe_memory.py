"""Memory budgets of probes, chosen so that training's next step is not disturbed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...calib.workload.collectives import Collective

FREE_FRAC = 0.8
"""Share of free memory that a probe may use."""
_MOST_CHANNELS, _MOST_PEER_CHANNELS = 64, 32
"""Most channels of a communicator (``MAXCHANNELS`` of NCCL), and of a pair of GPUs: two for each of
the 18 NVLinks of an H100, capped at this number."""
_SHARED = (0, 0)
"""ID of the allocator's default pool, which belongs to no CUDA graph."""
_CHANNEL_NBYTES = (512 << 10) + (4800 << 10) + (4 << 20)
"""Default buffers of a channel between two ranks, for the protocols LL, LL128 and Simple (NCCL
2.30, ``computeBuffSizes`` in init.cc): 9.2 MiB."""


class HostMemoryBudget:
    """Memory budget on a CPU, divided equally among the ranks of the node.

    ``DeviceMemoryBudget`` has the same interface.
    """

    def __init__(self, *, local_world_size: int) -> None:
        self._num_sharing = max(1, local_world_size)

    def has(self, nbytes: int, small_nbytes: int = 0) -> bool:
        """Return True if a probe of ``nbytes`` may run, ``small_nbytes`` of them in tensors up to 1
        MiB."""
        return nbytes <= FREE_FRAC * available_nbytes() / self._num_sharing

    def has_beyond(self, nbytes: int) -> bool:
        """Return True if a library may allocate ``nbytes`` outside the allocator: always, on a
        CPU."""
        return True

    def is_disturbed(self) -> bool:
        """Return True if a probe made the allocator grow: never, the memory returns to the
        system."""
        return False

    def give_back(self) -> None:
        """Return the C library's free pages to the system."""
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class DeviceMemoryBudget:
    """Memory budget on a device: probes reuse blocks that training's allocator has cached.

    A request that fits no cached block makes the allocator ask the device and, if that has no more,
    first release all free blocks and synchronise: the next training step would have to allocate
    them anew.  So a probe runs only if one free block of its stream fits all of it, below the peak
    that training has reached.  Totals would be too optimistic: ``inactive_split_bytes`` and single
    segments are free, but fit no large request.  Nothing is released at the end, since the cached
    blocks are training's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocation_counts = self._read_allocation_counts()

    def has(self, nbytes: int, small_nbytes: int = 0) -> bool:
        """Return True if cached blocks fit a probe of that size; False if they cannot be listed."""
        self._allocation_counts = self._read_allocation_counts()
        used = torch.cuda.memory_allocated(self._device)
        if used + nbytes > torch.cuda.max_memory_allocated(self._device):
            return False
        free = {"large": [0], "small": [0]}
        for pool, size in self._free_blocks():
            free.setdefault(pool, []).append(size)
        has_large = nbytes == small_nbytes or nbytes <= max(free["large"])
        return has_large and small_nbytes <= sum(free["small"])

    def has_beyond(self, nbytes: int) -> bool:
        """Return True if the device has ``nbytes`` free outside the allocator."""
        return nbytes <= torch.cuda.mem_get_info(self._device)[0]

    def is_disturbed(self) -> bool:
        """Return True if the allocator has asked the device for memory since the last ``has``."""
        return self._read_allocation_counts() != self._allocation_counts

    def give_back(self) -> None:
        """Do nothing: the cached blocks are training's."""

    def _read_allocation_counts(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        return stats.get("segment.all.allocated", 0), stats.get("num_alloc_retries", 0)

    def _free_blocks(self) -> Iterator[tuple[str, int]]:
        """Yield pool and size of each free block for this stream, except blocks of CUDA graphs'
        pools."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for segment in _segments():
            is_here = self._device.index in (None, segment["device"])
            is_shared = tuple(segment.get("segment_pool_id", _SHARED)) == _SHARED
            if is_here and is_shared and segment["stream"] == stream:
                for block in segment["blocks"]:
                    if block["state"] == "inactive":
                        yield segment["segment_type"], block["size"]


def _segments() -> list[dict[str, Any]]:
    """Return the allocator's segments; empty for other allocators than torch's, which list none."""
    with suppress(RuntimeError, AttributeError):
        try:
            return torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:  # an older torch
            return torch.cuda.memory_snapshot()
    return []


def available_nbytes() -> int:
    """Return the memory available without swapping on Linux, elsewhere the free pages."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def connection_nbytes(collective: Collective, num_ranks: int) -> int:
    """Return an upper bound on the bytes that NCCL allocates at a communicator's first such call.

    NCCL connects for a kind of call when it is first made (``NCCL_RUNTIME_CONNECT``): messages and
    all-to-alls to each peer, other collectives along rings and trees.

    >>> connection_nbytes(Collective.ALL_REDUCE, 8) >> 20
    588
    """
    if collective is Collective.SEND:
        return _MOST_PEER_CHANNELS * _CHANNEL_NBYTES
    if collective is Collective.ALL_TO_ALL:
        return _MOST_PEER_CHANNELS * (num_ranks - 1) * _CHANNEL_NBYTES
    return _MOST_CHANNELS * _CHANNEL_NBYTES
