"""Memory that probes may take, so that training's next step has what it had."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ...calib.workload import Collective

FREE_FRAC = 0.8
"""Share of the free memory that a probe may take."""
_MOST_CHANNELS, _MOST_PEER_CHANNELS = 64, 32
"""Channels of a communicator (``MAXCHANNELS`` of NCCL), and of a pair of GPUs: two for each of the
18 NVLinks of an H100, at most so many."""
_SHARED = (0, 0)
"""Number of the pool that is nobody's in particular."""
_CHANNEL_NBYTES = (512 << 10) + (4800 << 10) + (4 << 20)
"""Buffers of a channel between two ranks, by default, for the protocols LL, LL128 and Simple (NCCL
2.30, ``computeBuffSizes`` in init.cc): 9.2 MiB."""


class HostMemoryBudget:
    """Memory of a CPU: ranks share it, and each stays within its part of what is free.

    ``DeviceMemoryBudget`` answers the same questions.
    """

    def __init__(self, *, local_world_size: int) -> None:
        self._num_sharing = max(1, local_world_size)

    def has(self, nbytes: int, small_nbytes: int = 0) -> bool:
        """True where a probe of that size may run, so much of it in tensors of a MiB or less."""
        return nbytes <= FREE_FRAC * available_nbytes() / self._num_sharing

    def has_beyond(self, nbytes: int) -> bool:
        """Whether a library may take as much that no allocator owns: always, of one memory."""
        return True

    def is_disturbed(self) -> bool:
        """Whether a probe made the allocator ask for memory: never, it goes back to the system."""
        return False

    def give_back(self) -> None:
        """The C library's free pages go back to the system."""
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class DeviceMemoryBudget:
    """Memory of a device, of which probes take blocks that training's allocator has cached.

    A request that no cached block holds makes the allocator ask the device, and, where that has no
    more, first hand back all free blocks and synchronise: the next training step would ask for them
    again.  So a probe runs where one free block of its stream holds all of it, below the peak that
    training has reached.  Sums would say too much: ``inactive_split_bytes`` and single segments are
    free, and hold no large request.  Nothing is handed back at the end, since what is cached then
    is training's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocation_counts = self._read_allocation_counts()

    def has(self, nbytes: int, small_nbytes: int = 0) -> bool:
        """True where cached blocks hold a probe of that size; False where they are not shown."""
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
        """True where the device has as much left that no allocator owns."""
        return nbytes <= torch.cuda.mem_get_info(self._device)[0]

    def is_disturbed(self) -> bool:
        """True where the allocator has asked the device for memory since the last question."""
        return self._read_allocation_counts() != self._allocation_counts

    def give_back(self) -> None:
        """Nothing: what is cached is training's."""

    def _read_allocation_counts(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        return stats.get("segment.all.allocated", 0), stats.get("num_alloc_retries", 0)

    def _free_blocks(self) -> Iterator[tuple[str, int]]:
        """Pool and size of each free block that serves this stream: not those of graphs' pools."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for segment in _segments():
            is_here = self._device.index in (None, segment["device"])
            is_shared = tuple(segment.get("segment_pool_id", _SHARED)) == _SHARED
            if is_here and is_shared and segment["stream"] == stream:
                for block in segment["blocks"]:
                    if block["state"] == "inactive":
                        yield segment["segment_type"], block["size"]


def _segments() -> list[dict[str, Any]]:
    """The allocator's segments; none where it is another than torch's own, which shows none."""
    with suppress(RuntimeError, AttributeError):
        try:
            return torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:  # of an older torch
            return torch.cuda.memory_snapshot()
    return []


def available_nbytes() -> int:
    """Memory that the system can give without swapping; of Linux, elsewhere the free pages."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def connection_nbytes(collective: Collective, num_ranks: int) -> int:
    """Bytes that NCCL may allocate at the first such call on a communicator.

    It connects for a kind of call when that is first made (``NCCL_RUNTIME_CONNECT``): messages and
    all-to-alls to each peer, other collectives along rings and trees.

    >>> connection_nbytes(Collective.ALL_REDUCE, 8) >> 20
    588
    """
    if collective is Collective.SEND:
        return _MOST_PEER_CHANNELS * _CHANNEL_NBYTES
    if collective is Collective.ALL_TO_ALL:
        return _MOST_PEER_CHANNELS * (num_ranks - 1) * _CHANNEL_NBYTES
    return _MOST_CHANNELS * _CHANNEL_NBYTES
