"""Energy of this node's accelerators from NVML's own counters; absent where there is no NVML.

Read by the companion, never in training.  NVML is loaded by name, without torch; a driver that
does not count energy, or devices that cannot be told apart from those of other jobs, read as None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

JOULES_PER_MJ = 1e-3
"""NVML counts millijoules."""

ReadEnergy = Callable[[], "float | None"]


def open_meter(num_local_ranks: int, environ: Mapping[str, str]) -> ReadEnergy:
    """A function that returns joules since the driver was loaded, summed over this job's devices.

    It returns None from the first error on.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return lambda: None
    try:
        nvml.nvmlInit()
        handles = _handles(nvml, num_local_ranks, environ)
    except nvml.NVMLError:  # no driver, no permission, no such device
        handles = []

    def read() -> float | None:
        try:
            counts = [nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles]
        except nvml.NVMLError:  # before Volta they do not count; a lost one raises too
            handles.clear()
            return None
        return sum(counts) * JOULES_PER_MJ if counts else None

    return read


def _handles(nvml: Any, num_local_ranks: int, environ: Mapping[str, str]) -> list[Any]:
    """Devices of the local ranks; none where it is not known which of them they are."""
    words = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    words = [word.strip() for word in words if word.strip()]
    if not words:
        words = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        if len(words) != num_local_ranks:
            return []
    chosen = words[:num_local_ranks]
    if len(chosen) != num_local_ranks or any(word.startswith("MIG") for word in chosen):
        return []
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(word))
        if word.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(word)
        for word in chosen
    ]
