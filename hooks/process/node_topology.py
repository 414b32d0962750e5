"""Network of a node as its system reports it: cards, PCIe slots, links, and NCCL's settings.

Files of ``/sys`` and the environment are read, and the driver is queried, once and never in the
training thread.  Nothing is sent or opened for writing; only numbers and NCCL's settings are
recorded.

Links between GPUs come from NVIDIA's driver library; without one there are none.  It is loaded by
name through ctypes, since training needs no package for it; its calls release the interpreter.
Structures and numbers are those of ``nvml.h`` (CUDA 12).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calib.plain_json import JsonObject
from ...calib.records import Cluster, SeenNode, StatedNodes
from .settings import RankInfo

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
    """NVLink topology as the driver reports it."""

    num_gpus: int = 0
    joint: str = ""
    """``switch``, ``mesh``, ``cube``, ``bridge`` or ``pcie``; empty if it is none of them."""
    fabric: str = ""
    """Cluster and clique; ``none`` if the driver reports no multi-node NVLink domain."""


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


def detect_links(load: Callable[[str], Any] = ctypes.CDLL) -> SeenLinks:
    """Return the links of this node's GPUs; empty if the driver is missing or reports none."""
    try:
        library = load(_LIBRARY)
        if library.nvmlInit_v2() != 0:
            return SeenLinks()
    except (OSError, AttributeError):
        return SeenLinks()
    try:
        return _seen(library)
    except AttributeError:  # an older driver lacks some functions
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
    """Return True if the GPU is partitioned into MIG instances, which no link or bus joins."""
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        code = library.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending))
    except AttributeError:  # a driver older than such GPUs
        return False
    return code == 0 and mode.value == _IS_PARTED


def _joint(library: Any, device: ctypes.c_void_p, num_gpus: int) -> str:
    """Return the kind of interconnect, from the remote ends of the first GPU's links."""
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
    """Return the interconnect of GPUs of which one is linked to ``num_peers`` others.

    >>> _of_peers(0, 8), _of_peers(3, 4), _of_peers(4, 8), _of_peers(1, 8), _of_peers(2, 4)
    ('pcie', 'mesh', 'cube', 'bridge', '')
    """
    if num_peers < 2:
        return "bridge" if num_peers else "pcie"
    if num_peers == num_gpus - 1 and num_gpus == 4:
        return "mesh"
    return "cube" if (num_peers, num_gpus) == (4, 8) else ""


def _fabric(library: Any, device: ctypes.c_void_p) -> str:
    """Return the NVLink domain of a GPU; empty if the driver is too old to report one."""
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | _FABRIC_VERSION << 24)
    try:
        code = library.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    except AttributeError:
        return ""
    cluster = bytes(info.cluster)
    if code != 0 or info.state != _COMPLETED or not any(cluster):
        return "none"
    return f"{cluster.hex()}/{info.clique}"


SYS = Path("/sys")
VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_IB_MERGE_NICS",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_SOCKET_IFNAME",
    "NCCL_CROSS_NIC",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR_READ",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PXN_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_TOPO_FILE",
)
"""NCCL's environment variables that change how it uses the network."""
_MOST_CHARACTERS = 60
"""Limit on a value: all values are part of each message to the rank that records for this one."""
_MOST_PLACES = 256
"""Limit on the number of devices of one kind."""
_ACCELERATORS = ("0x0302", "0x0300", "0x1200")
"""Prefixes of PCI classes: 3D and VGA controllers, processing accelerators."""
_VENDORS = ("0x10de", "0x1002")
"""PCI IDs of NVIDIA and AMD."""
_BITS = 8
_GIGA, _MEGA = 1e9, 1e6
_CODED_FRAC = 128 / 130
"""Payload bits among those on the wire since PCIe 3."""
_CODED_BEFORE_FRAC = 0.8
_CODED_FROM_GIGA = 8.0


class NodeTopology:
    """Cluster information from one rank; read once, by the writer's thread."""

    def __init__(
        self, rank: RankInfo, environ: Mapping[str, str], stated: StatedNodes | None = None
    ) -> None:
        self._rank = rank
        self._stated = stated or StatedNodes()
        self._environ = environ
        self._cluster_json: JsonObject | None = None

    def cluster_json(self) -> JsonObject:
        """Return ``Cluster.to_json`` on the first rank of a node, else an empty object."""
        if self._cluster_json is None:
            self._cluster_json = {}  # do not repeat a fault below
            self._cluster_json = self._look()
        return self._cluster_json

    def _look(self) -> JsonObject:
        rank = self._rank
        if rank.local_rank:
            return {}
        node = detect_node(
            self._environ,
            num_ranks=rank.world_size,
            num_local_ranks=rank.local_world_size,
        )
        return Cluster(seen=(node,), stated=self._stated).to_json()


def detect_node(
    environ: Mapping[str, str],
    *,
    num_ranks: int,
    num_local_ranks: int,
    root: Path = SYS,
    links: Callable[[], SeenLinks] = detect_links,
) -> SeenNode:
    """Return the inventory of this node; 0 and empty if unknown.  Never raises."""
    variables = tuple(f"{n}={environ[n][:_MOST_CHARACTERS]}" for n in VARIABLES if environ.get(n))
    gpus = list(_gpus(root))
    seen, cards = links(), _cards(root, environ)
    return SeenNode(
        num_ranks=num_ranks,
        num_local_ranks=num_local_ranks,
        num_gpus=len(gpus) or seen.num_gpus,
        gpu_pcie_bytes_per_s=min(
            (g.slot_bytes_per_s for g in gpus if g.slot_bytes_per_s), default=0.0
        ),
        gpu_numa=tuple(gpu.numa for gpu in gpus),
        joint=seen.joint,
        fabric=seen.fabric,
        num_cards=len(cards),
        card_bytes_per_s=cards[0].bytes_per_s if cards else 0.0,
        card_pcie_bytes_per_s=min(
            (c.slot_bytes_per_s for c in cards if c.slot_bytes_per_s), default=0.0
        ),
        card_numa=tuple(card.numa for card in cards),
        wire=cards[0].wire if cards else "",
        variables=variables,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """A PCI device with its link and NUMA node."""

    name: str = ""
    bytes_per_s: float = 0.0
    wire: str = ""
    slot_bytes_per_s: float = 0.0
    numa: int = 0


def _gpus(root: Path) -> Iterator[_Device]:
    for place in _places(root / "bus/pci/devices"):
        if _text(place / "vendor") in _VENDORS and _text(place / "class").startswith(_ACCELERATORS):
            # An idle GPU lowers its link speed: read the maximum, not the current one.
            yield _Device(slot_bytes_per_s=_slot(place, "max"), numa=_numa(place))


def _cards(root: Path, environ: Mapping[str, str]) -> list[_Device]:
    """Return the ports that NCCL would use: InfiniBand and RoCE, without any the socket interfaces.

    Only those of the highest rate are returned, since each GPU chooses its best path.
    """
    is_socket = environ.get("NCCL_IB_DISABLE") == "1" or environ.get("NCCL_NET") == "Socket"
    cards = [] if is_socket else list(_ports(root, environ.get("NCCL_IB_HCA", "")))
    wire = "socket" if is_socket else "ethernet"
    cards = cards or list(_interfaces(root, environ.get("NCCL_SOCKET_IFNAME", ""), wire))
    best = max((card.bytes_per_s for card in cards), default=0.0)
    return [card for card in cards if card.bytes_per_s == best]


def _ports(root: Path, allowed: str) -> Iterator[_Device]:
    for card in _places(root / "class/infiniband"):
        for port in _places(card / "ports"):
            is_active = "ACTIVE" in _text(port / "state")
            if not is_active or not _is_allowed(card.name, allowed, port=port.name):
                continue
            layer = _text(port / "link_layer").lower()
            yield _Device(
                name=card.name,
                bytes_per_s=_number(_text(port / "rate")) * _GIGA / _BITS,
                wire="roce" if layer == "ethernet" else "infiniband",
                slot_bytes_per_s=_slot(card / "device", "current"),
                numa=_numa(card / "device"),
            )


def _interfaces(root: Path, allowed: str, wire: str) -> Iterator[_Device]:
    """Yield interfaces of physical devices, unlike bridges and tunnels; an unknown speed is 0."""
    for place in _places(root / "class/net"):
        has_device = (place / "device").exists()
        if not has_device or _text(place / "operstate") != "up":
            continue
        if not _is_allowed(place.name, allowed):
            continue
        speed = _number(_text(place / "speed"))
        if not speed and wire == "ethernet":
            continue  # a card of unknown rate may be anything
        yield _Device(
            name=place.name,
            bytes_per_s=speed * _MEGA / _BITS,
            wire=wire,
            slot_bytes_per_s=_slot(place / "device", "current"),
            numa=_numa(place / "device"),
        )


def _is_allowed(name: str, allowed: str, *, port: str = "") -> bool:
    """Return True if NCCL's list selects a device: name prefixes, ``=`` exact names, ``^`` all
    others.

    >>> [_is_allowed("mlx5_10", text) for text in ("mlx5", "=mlx5_1", "^mlx5_10", "mlx5_10:2", "")]
    [True, False, False, True, True]
    >>> _is_allowed("mlx5_10", "mlx5_10:2", port="1")
    False
    """
    is_other, text = allowed.startswith("^"), allowed.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        return True
    return any(_is_named(name, port, word, is_exact) for word in words) is not is_other


def _is_named(name: str, port: str, word: str, is_exact: bool) -> bool:
    wanted, _, number = word.partition(":")
    is_port = not number or not port or number == port
    return is_port and (name == wanted if is_exact else name.startswith(wanted))


def _slot(place: Path, which: str) -> float:
    """Return the bytes/s of a device's PCIe link in one direction; 0 if unknown."""
    giga = _number(_text(place / f"{which}_link_speed"))
    lanes = _number(_text(place / f"{which}_link_width"))
    coded = _CODED_FRAC if giga >= _CODED_FROM_GIGA else _CODED_BEFORE_FRAC
    return coded * giga * lanes * _GIGA / _BITS


def _numa(place: Path) -> int:
    return int(_number(_text(place / "numa_node")))


def _number(text: str) -> float:
    """Return the number that a text begins with; 0 if there is none, or for ``-1`` (unknown).

    >>> _number("400 Gb/sec (4X NDR)"), _number("32.0 GT/s PCIe"), _number("Unknown"), _number("-1")
    (400.0, 32.0, 0.0, 0.0)
    """
    match = re.match(r"\d{1,9}(?:\.\d{1,9})?", text)
    return float(match[0]) if match else 0.0


def _text(path: Path) -> str:
    """Return the text of a ``/sys`` file; empty if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="ascii") as file:
        return file.read(_MOST_PLACES).strip()
    return ""


def _places(folder: Path) -> Iterable[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir(), key=_in_order)[:_MOST_PLACES]
    return ()


def _in_order(path: Path) -> tuple[str, int, str]:
    """Return a natural sort key: ``mlx5_10`` after ``mlx5_9``."""
    head = path.name.rstrip("0123456789")
    digits = path.name[len(head) :]
    return head, int(digits[:9] or 0), path.name
