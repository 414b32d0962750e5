"""Whether a probe fits beside training, and giving back what it took."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

FREE_FRAC = 0.8
"""Share of the free memory that a probe may take."""


class Room:
    """Memory of one rank.

    On a device a probe stays within the peak that training itself has reached, so that the
    allocator's statistics keep their meaning and its cached blocks serve; on CPU, where ranks share
    it, within each rank's part of what is free.
    """

    def __init__(self, device: torch.device, *, local_world_size: int) -> None:
        self._device = device
        self._num_sharing = max(1, local_world_size)
        self._reserved = torch.cuda.memory_reserved(device) if self._is_device else 0

    @property
    def _is_device(self) -> bool:
        return self._device.type == "cuda"

    def has(self, nbytes: int) -> bool:
        """True where a probe of that size may run."""
        if not self._is_device:
            return nbytes <= FREE_FRAC * available_nbytes() / self._num_sharing
        used = torch.cuda.memory_allocated(self._device)
        cached = torch.cuda.memory_reserved(self._device) - used
        free = torch.cuda.mem_get_info(self._device)[0] + cached
        is_below_peak = used + nbytes <= torch.cuda.max_memory_allocated(self._device)
        return is_below_peak and nbytes <= FREE_FRAC * free

    def give_back(self) -> None:
        """Blocks that the allocator has taken since this object was made go back to the system."""
        if not self._is_device:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
        elif torch.cuda.memory_reserved(self._device) > self._reserved:
            torch.cuda.empty_cache()


def available_nbytes() -> int:
    """Memory that the system can give without swapping; of Linux, elsewhere the free pages."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
