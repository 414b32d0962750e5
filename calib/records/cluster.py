"""Nodes of a run, as its ranks read them from the system and as the user states them.

Standard library only: the training process writes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from ..errors import ConfigError
from ..plain_json import JsonObject
from ..workload.argument_values import QuickEnum
from ..workload.config_json import decode, encode_fields
from ..workload.parallelism import Parallelism

NVL72 = 72
"""GPUs that NVLink joins in a GB200 or GB300 rack: eighteen hosts of four (NVIDIA's data sheets of
both)."""
LINKS = "links.json"
"""File beside a run's records: a cluster of the companion's node, with its links alone."""
_DOMAINS: Mapping[str, int] = {"gb300": NVL72, "gb200": NVL72}
"""Usual number of GPUs that NVLink joins across hosts, by a part of the device's name: the size in
which both are sold.  A rack of 36 has to be stated."""
_SEGMENT = 64
"""Ranks per rack in a job of several such racks: blocks of sixteen hosts of four, with the last two
hosts as spares (``--segment 16`` of NVIDIA's recipes, GPUs of its published rows)."""
_NO_DOMAIN = "none"
_SWITCHED_OFF = "0"
_BITS, _GIGA = 8, 1e9


class GpuInterconnect(QuickEnum):
    """Interconnect of the GPUs of a node."""

    SWITCH = "switch"
    MESH = "mesh"
    """Four GPUs, each linked equally to the other three."""
    CUBE = "cube"
    """Eight GPUs in a cube with diagonals: two ranks reach 1/3 of the links, four reach 2/3."""
    BRIDGE = "bridge"
    """Cards linked in pairs; more than two ranks go through PCIe."""
    PCIE = "pcie"


class Origin(QuickEnum):
    """Source of a topology's figure, the most reliable last."""

    PRIOR = "prior"
    MEASURED = "measured"
    SEEN = "seen"
    """Read from the system of a node."""
    STATED = "stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """One node as its own system reports it; 0 or empty if unknown."""

    num_ranks: int = 0
    """Ranks of the whole run."""
    num_local_ranks: int = 0
    num_gpus: int = 0
    gpu_pcie_bytes_per_s: float = 0.0
    """PCIe rate of the slowest GPU, in one direction."""
    gpu_numa: tuple[int, ...] = ()
    """NUMA node of each GPU, in PCI order."""
    joint: str = ""
    """Value of a ``GpuInterconnect``."""
    fabric: str = ""
    """NVLink domain (cluster and clique) as the driver names it; ``none`` if it joins no hosts."""
    num_cards: int = 0
    """Ports that NCCL would use: active, allowed by its variables, and of the highest rate."""
    card_bytes_per_s: float = 0.0
    """Rate of one port, in one direction."""
    card_pcie_bytes_per_s: float = 0.0
    """Rate of the card's slot."""
    card_numa: tuple[int, ...] = ()
    wire: str = ""
    """``infiniband``, ``roce``, ``socket`` if NCCL was configured so, or ``ethernet`` if there are
    only other cards: NCCL uses sockets, or a plugin that supports them."""
    variables: tuple[str, ...] = ()
    """NCCL environment variables that affect the network, as ``NAME=value``."""

    def variable(self, name: str) -> str:
        """Return the value of one of NCCL's variables; empty if it is not set.

        >>> SeenNode(variables=("NCCL_ALGO=Ring",)).variable("NCCL_ALGO")
        'Ring'
        """
        start = f"{name}="
        values = (text[len(start) :] for text in self.variables if text.startswith(start))
        return next(values, "")

    @property
    def text(self) -> str:
        """Known values in words for people; empty if there are none.

        >>> node = SeenNode(num_gpus=8, joint="switch", num_cards=8, card_bytes_per_s=50e9,
        ...                 wire="infiniband", variables=("NCCL_ALGO=Ring",))
        >>> node.text
        '8 cards of 400 Gbit/s (infiniband), 8 GPUs joined by switch, NCCL_ALGO=Ring'
        """
        rate = f" of {self.card_bytes_per_s * _BITS / _GIGA:.3g} Gbit/s" * (
            self.card_bytes_per_s > 0
        )
        joint = f" joined by {self.joint}" * bool(self.joint)
        is_domain = self.fabric not in ("", _NO_DOMAIN)
        parts = (
            f"{_counted(self.num_cards, 'card')}{rate} ({self.wire})" * bool(self.num_cards),
            f"{_counted(self.num_gpus, 'GPU')}{joint}" * bool(self.num_gpus),
            f"NVLink domain {self.fabric}" * is_domain,
            *self.variables,
        )
        return ", ".join(part for part in parts if part)

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(f"{spec.name} {value} of a node is below 0; record it again")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedNodes:
    """Values that a user states for all nodes; None if not stated."""

    joint: str | None = None
    num_gpus: int | None = None
    num_cards: int | None = None
    domain: int | None = None
    node_bytes_per_s: float | None = None
    card_bytes_per_s: float | None = None

    @property
    def values(self) -> dict[str, object]:
        """Stated values, by name."""
        all_values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in all_values.items() if value is not None}


_COUNTS = ("num_gpus", "num_cards", "domain")
_RATES = ("node_bytes_per_s", "card_bytes_per_s")
KEYS = ("joint", *_COUNTS, *_RATES)
"""Keys of a cluster file."""


def stated_nodes(values: Mapping[str, object]) -> StatedNodes:
    """Return the checked values of a cluster file.

    ``joint`` is how the GPUs of a node are joined, ``num_gpus`` and ``num_cards`` are per node,
    ``domain`` is the number of ranks that NVLink joins.  ``node_bytes_per_s`` is the bus bandwidth
    inside a node, ``card_bytes_per_s`` that of one card, both as nccl-tests measures them.
    Raise ``ConfigError`` for an unknown key or an invalid value.

    >>> stated_nodes({"num_gpus": 4, "domain": 36}).values
    {'num_gpus': 4, 'domain': 36}
    """
    unknown = sorted(values.keys() - set(KEYS))
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} of the cluster is not known; choose from {', '.join(KEYS)}"
        )
    checks = {"joint": _joint, **dict.fromkeys(_COUNTS, _count), **dict.fromkeys(_RATES, _rate)}
    return StatedNodes(**{name: checks[name](name, value) for name, value in values.items()})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Detected nodes, one for each that reports, and the values stated for all."""

    seen: tuple[SeenNode, ...] = ()
    stated: StatedNodes = field(default_factory=StatedNodes)

    @property
    def node(self) -> SeenNode:
        """The most common node; among equals the first."""
        plain = [replace(node, fabric="") for node in self.seen]
        return Counter(plain).most_common(1)[0][0] if plain else SeenNode()

    def domain(self, device: str) -> tuple[int, Origin]:
        """Return the ranks of a run that NVLink joins across hosts, 0 if none, and the origin.

        A stated value takes precedence over the driver's, and that over the size in which GPUs of
        this name are sold.

        >>> Cluster().domain("NVIDIA GB200"), Cluster().domain("NVIDIA H100 80GB HBM3")
        ((72, <Origin.PRIOR: 'prior'>), (0, <Origin.PRIOR: 'prior'>))
        """
        if self.stated.domain is not None:
            return self.stated.domain, Origin.STATED
        usual = next((size for name, size in _DOMAINS.items() if name in device.lower()), 0)
        node = self.node
        if usual and node.variable("NCCL_MNNVL_ENABLE") == _SWITCHED_OFF:
            return 0, Origin.SEEN
        fabric_nodes = [seen for seen in self.seen if seen.fabric]
        if fabric_nodes and all(seen.fabric == _NO_DOMAIN for seen in fabric_nodes):
            return 0, Origin.SEEN
        cliques = Counter(seen.fabric for seen in fabric_nodes if seen.fabric != _NO_DOMAIN)
        is_whole = node.num_local_ranks * len(fabric_nodes) >= node.num_ranks > 0
        if cliques and is_whole and (len(cliques) > 1 or not usual):
            return max(cliques.values()) * node.num_local_ranks, Origin.SEEN
        return usual, Origin.SEEN if cliques else Origin.PRIOR

    def with_domain_nodes(self, parallelism: Parallelism, device: str) -> Parallelism:
        """Return the layout with the hosts of one NVLink domain counted as one node.

        >>> rack = Cluster().with_domain_nodes(Parallelism(dp=64, ranks_per_node=4), "NVIDIA GB200")
        >>> far = Cluster().with_domain_nodes(Parallelism(dp=256, ranks_per_node=4), "NVIDIA GB200")
        >>> rack.ranks_per_node, far.ranks_per_node
        (72, 64)
        """
        known = self.node.num_local_ranks, self.stated.num_gpus, parallelism.ranks_per_node
        local = next(filter(None, known), 0)
        domain, origin = self.domain(device)
        if not domain:
            # The layout need not be the running one: the detected nodes say nothing about others.
            ranks_per_node = parallelism.ranks_per_node or self.stated.num_gpus or 0
            return replace(parallelism, ranks_per_node=ranks_per_node)
        num_ranks = parallelism.num_ranks
        is_cut = origin is not Origin.STATED and domain == NVL72
        if is_cut and num_ranks > domain and num_ranks % _SEGMENT == 0:
            domain = _SEGMENT
        return replace(parallelism, ranks_per_node=max(domain, local))

    def with_links(self, links: SeenNode) -> Cluster:
        """Return the cluster with the links between GPUs of ``links`` where nodes have none.

        >>> Cluster(seen=(SeenNode(),)).with_links(SeenNode(joint="mesh")).node.joint
        'mesh'
        """
        names = ("num_gpus", "joint", "fabric")
        seen = (
            replace(node, **{name: getattr(node, name) or getattr(links, name) for name in names})
            for node in self.seen
        )
        return replace(self, seen=tuple(seen))

    def to_json(self) -> JsonObject:
        """Return a JSON value that ``from_json`` reads back."""
        return {
            "seen": [encode_fields(node) for node in self.seen],
            "stated": {**self.stated.values},  # type: ignore[dict-item]
        }

    @staticmethod
    def from_json(value: object) -> Cluster:
        """Decode a value of ``to_json``; damaged parts and those of newer versions are unknown."""
        if not isinstance(value, Mapping):
            return Cluster()
        seen: list[SeenNode] = []
        listed, stated_json = value.get("seen"), value.get("stated")
        for node in listed if isinstance(listed, list) else []:
            with suppress(ConfigError):
                seen.append(decode(SeenNode, node))
        stated = StatedNodes()
        with suppress(ConfigError):
            stated = stated_nodes(stated_json if isinstance(stated_json, Mapping) else {})
        return Cluster(seen=tuple(seen), stated=stated)


def joined_clusters(parts: Iterable[Cluster]) -> Cluster:
    """Merge the clusters of all ranks: every node, and the first non-empty stated values."""
    clusters = list(parts)
    stated = next((part.stated for part in clusters if part.stated.values), StatedNodes())
    return Cluster(seen=tuple(node for part in clusters for node in part.seen), stated=stated)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}"


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{name} {value!r} of the cluster is not a whole number above 0; give one"
        )
    return value


def _rate(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 < float(value) < float("inf"):  # type: ignore[arg-type]
        raise ConfigError(
            f"{name} {value!r} of the cluster is not a rate above 0; give one in bytes/s"
        )
    return float(value)  # type: ignore[arg-type]


def _joint(name: str, value: object) -> str:
    known = [joint.value for joint in GpuInterconnect]
    if value not in known:
        raise ConfigError(
            f"{name} {value!r} of the cluster is not known; choose from {', '.join(known)}"
        )
    return str(value)
