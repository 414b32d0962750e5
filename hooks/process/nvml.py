"""What NVIDIA's driver says of links between GPUs, by its own library; nothing where there is none.

Loaded by name through ctypes, since training needs no package for it; calls let the interpreter go.
Structures and numbers are those of ``nvml.h`` (CUDA 12).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_MOST_LINKS = 18
"""NVLinks of a GPU: 6, 12 and 18 since Volta, Ampere and Hopper."""
_IS_SWITCH, _IS_GPU = 2, 0
"""``nvmlIntNvLinkDeviceType_t``."""
_COMPLETED = 3
"""``NVML_GPU_FABRIC_STATE_COMPLETED``."""
_FABRIC_VERSION = 2
_MOST_GPUS = 64
_IS_PARTED = 1
"""``NVML_DEVICE_MIG_ENABLE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLinks:
    """NVLink as the driver shows it."""

    num_gpus: int = 0
    joint: str = ""
    """``switch``, ``mesh``, ``cube``, ``bridge`` or ``pcie``; empty where it is none of them."""
    fabric: str = ""
    """Cluster and clique; ``none`` where the driver says that there is no domain of hosts."""


class _FabricInfo(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    ]


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]


def see_links(load: Callable[[str], Any] = ctypes.CDLL) -> SeenLinks:
    """Links of the GPUs of this node; empty where the driver is not there or does not tell."""
    try:
        library = load(_LIBRARY)
        if library.nvmlInit_v2() != 0:
            return SeenLinks()
    except (OSError, AttributeError):
        return SeenLinks()
    try:
        return _seen(library)
    except AttributeError:  # an older driver has not all functions
        return SeenLinks()
    finally:
        library.nvmlShutdown()


def _seen(library: Any) -> SeenLinks:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or not count.value:
        return SeenLinks()
    first = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(first)) != 0:
        return SeenLinks()
    num_gpus = min(count.value, _MOST_GPUS)
    if _is_parted(library, first):
        return SeenLinks(num_gpus=num_gpus)
    return SeenLinks(
        num_gpus=num_gpus, joint=_joint(library, first, num_gpus), fabric=_fabric(library, first)
    )


def _is_parted(library: Any, device: ctypes.c_void_p) -> bool:
    """True where the GPU is parted into instances (MIG), which no link and no bus joins."""
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        code = library.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending))
    except AttributeError:  # a driver older than such GPUs
        return False
    return code == 0 and mode.value == _IS_PARTED


def _joint(library: Any, device: ctypes.c_void_p, num_gpus: int) -> str:
    """By what the links of the first GPU lead to."""
    if num_gpus < 2:
        return ""
    peers: set[bytes] = set()
    for link in range(_MOST_LINKS):
        active, kind = ctypes.c_uint(), ctypes.c_uint()
        if library.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) != 0:
            continue
        if not active.value:
            continue
        if library.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, ctypes.byref(kind)) != 0:
            return ""
        if kind.value == _IS_SWITCH:
            return "switch"
        place = _PciInfo()
        if library.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, ctypes.byref(place)) == 0:
            peers |= {place.bus_id} if kind.value == _IS_GPU else set()
    return _of_peers(len(peers), num_gpus)


def _of_peers(num_peers: int, num_gpus: int) -> str:
    """What joins GPUs of which one is linked to so many others.

    >>> _of_peers(0, 8), _of_peers(3, 4), _of_peers(4, 8), _of_peers(1, 8), _of_peers(2, 4)
    ('pcie', 'mesh', 'cube', 'bridge', '')
    """
    if num_peers < 2:
        return "bridge" if num_peers else "pcie"
    if num_peers == num_gpus - 1 and num_gpus == 4:
        return "mesh"
    return "cube" if (num_peers, num_gpus) == (4, 8) else ""


def _fabric(library: Any, device: ctypes.c_void_p) -> str:
    """Empty where the driver is too old to be asked."""
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | _FABRIC_VERSION << 24)
    try:
        code = library.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    except AttributeError:
        return ""
    cluster = bytes(info.cluster)
    if code != 0 or info.state != _COMPLETED or not any(cluster):
        return "none"
    return f"{cluster.hex()}/{info.clique}"
