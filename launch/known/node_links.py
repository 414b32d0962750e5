"""Links between the GPUs of a node, as NVIDIA's driver reports them through ``nvidia-ml-py``.

Read by the companion and by verbs, never inside training.  Without the package or a driver, the
links are those that the device's name implies.
"""

from __future__ import annotations

import importlib
import json
from contextlib import suppress
from ctypes import byref
from pathlib import Path
from typing import Any

from ...calib.records.cluster import LINKS, Cluster, SeenNode
from ...calib.records.files import replace_file

_IS_SWITCH, _IS_GPU = 2, 0
"""``nvmlIntNvLinkDeviceType_t``."""


def write_links(folder: Path) -> None:
    """Write the links of this node beside a run's records; nothing if there are none to report."""
    links = detect_links()
    if links != SeenNode():
        with suppress(OSError):  # the ranks have reported that nothing can be written
            replace_file(folder / LINKS, json.dumps(Cluster(seen=(links,)).to_json()) + "\n")


def detect_links() -> SeenNode:
    """Return the links of this node's GPUs; empty if package or driver are missing or report
    none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        driver_error: type[Exception] = nvml.NVMLError
    except (ImportError, AttributeError):  # none, or another package of that name
        return SeenNode()
    try:
        nvml.nvmlInit()
        try:
            return _seen(nvml)
        finally:
            nvml.nvmlShutdown()
    except (driver_error, AttributeError):  # no driver, or a package that is too old
        return SeenNode()


def _seen(nvml: Any) -> SeenNode:
    num_gpus = nvml.nvmlDeviceGetCount()
    if not num_gpus:
        return SeenNode()
    first = nvml.nvmlDeviceGetHandleByIndex(0)
    with suppress(nvml.NVMLError):  # a driver older than such GPUs
        # No link or bus joins the instances of a GPU.
        if nvml.nvmlDeviceGetMigMode(first)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            return SeenNode(num_gpus=num_gpus)
    joint = ""
    with suppress(nvml.NVMLError, AttributeError):  # an older driver or package
        joint = _joint(nvml, first, num_gpus)
    return SeenNode(num_gpus=num_gpus, joint=joint, fabric=_fabric(nvml, first))


def _joint(nvml: Any, device: Any, num_gpus: int) -> str:
    """Return the kind of interconnect, from the remote ends of the first GPU's links."""
    if num_gpus < 2:
        return ""
    peers: set[bytes] = set()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_active = nvml.nvmlDeviceGetNvLinkState(device, link)
        except nvml.NVMLError:
            continue
        if not is_active:
            continue
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link)
        if kind == _IS_SWITCH:
            return "switch"
        if kind == _IS_GPU:
            with suppress(nvml.NVMLError):
                peers.add(nvml.nvmlDeviceGetNvLinkRemotePciInfo(device, link).busId)
    return _of_peers(len(peers), num_gpus)


def _of_peers(num_peers: int, num_gpus: int) -> str:
    """Return the interconnect of GPUs of which one is linked to ``num_peers`` others.

    >>> _of_peers(0, 8), _of_peers(3, 4), _of_peers(4, 8), _of_peers(1, 8), _of_peers(2, 4)
    ('pcie', 'mesh', 'cube', 'bridge', '')
    """
    if num_peers < 2:
        return "bridge" if num_peers else "pcie"
    if num_peers == num_gpus - 1 and num_gpus == 4:
        return "mesh"
    return "cube" if (num_peers, num_gpus) == (4, 8) else ""


def _fabric(nvml: Any, device: Any) -> str:
    """Return the NVLink domain of a GPU; empty if driver or package are too old to report one."""
    try:
        info = nvml.c_nvmlGpuFabricInfo_v2_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(device, byref(info))
    except AttributeError:
        return ""
    except nvml.NVMLError as err:
        is_missing = err.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND
        return "" if is_missing else "none"
    cluster = bytes(info.clusterUuid)
    if info.state != nvml.NVML_GPU_FABRIC_STATE_COMPLETED or not any(cluster):
        return "none"
    return f"{cluster.hex()}/{info.cliqueId}"
