"""Network of a node as its system reports it: cards, PCIe slots, and NCCL's settings.

Files of ``/sys`` and the environment are read once and never in the training thread.  Nothing is
sent or opened for writing; only numbers and NCCL's settings are recorded.  The companion asks the
driver for the links between GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...calib.plain_json import JsonObject
from ...calib.records.cluster import Cluster, SeenNode, StatedNodes
from .settings import RankInfo

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
) -> SeenNode:
    """Return the inventory of this node; 0 and empty if unknown.  Never raises."""
    variables = tuple(f"{n}={environ[n][:_MOST_CHARACTERS]}" for n in VARIABLES if environ.get(n))
    gpus = list(_gpus(root))
    cards = _cards(root, environ)
    return SeenNode(
        num_ranks=num_ranks,
        num_local_ranks=num_local_ranks,
        num_gpus=len(gpus),
        gpu_pcie_bytes_per_s=min(
            (g.slot_bytes_per_s for g in gpus if g.slot_bytes_per_s), default=0.0
        ),
        gpu_numa=tuple(gpu.numa for gpu in gpus),
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
