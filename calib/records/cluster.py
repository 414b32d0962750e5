"""What is known of the nodes of a run: as its ranks saw them, and as a user states them.

Standard library only, since training writes it down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from ..errors import ConfigError
from ..plain_json import JsonObject
from ..workload import Parallelism, QuickEnum, decode, encode_fields

NVL72 = 72
"""GPUs of a rack of GB200 or GB300 that NVLink joins: eighteen hosts of four (NVIDIA's data sheets
of both)."""
_DOMAINS: Mapping[str, int] = {"gb300": NVL72, "gb200": NVL72}
"""GPUs that NVLink joins beyond one host, by what a device's name has in it: what both are sold in.
A rack of 36 is stated."""
_SEGMENT = 64
"""Ranks that a job of several such racks has in each: blocks of sixteen hosts of four, which leave
the last two as spares (``--segment 16`` of NVIDIA's recipes, GPUs of its published rows)."""
_NO_DOMAIN = "none"
_SWITCHED_OFF = "0"
_BITS, _GIGA = 8, 1e9


class Joint(QuickEnum):
    """What joins the GPUs of a node."""

    SWITCH = "switch"
    MESH = "mesh"
    """Four GPUs, each linked to the three others alike."""
    CUBE = "cube"
    """Eight GPUs in a cube with diagonals: two ranks reach a third of the links, four two."""
    BRIDGE = "bridge"
    """Cards of which two at a time are linked: more ranks go through PCIe."""
    PCIE = "pcie"


class Origin(QuickEnum):
    """Where a figure of a topology comes from, the surest last."""

    PRIOR = "prior"
    MEASURED = "measured"
    SEEN = "seen"
    """Read from the system of a node."""
    STATED = "stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenNode:
    """One node as its own system shows it; 0 or empty where that is not told."""

    num_ranks: int = 0
    """Of the whole run."""
    num_local_ranks: int = 0
    num_gpus: int = 0
    gpu_pcie_bytes_per_s: float = 0.0
    """In one direction, of the slowest GPU."""
    gpu_numa: tuple[int, ...] = ()
    """NUMA node of each GPU, in PCI order."""
    joint: str = ""
    """A ``Joint``."""
    fabric: str = ""
    """NVLink domain by cluster and clique, as the driver names it; ``none``: it joins no hosts."""
    num_cards: int = 0
    """Ports that NCCL would use: active, allowed by its variables, and of the highest rate."""
    card_bytes_per_s: float = 0.0
    """Rate of one, in one direction."""
    card_pcie_bytes_per_s: float = 0.0
    """Of its slot."""
    card_numa: tuple[int, ...] = ()
    wire: str = ""
    """``infiniband``, ``roce``, ``socket`` where NCCL was told so, and ``ethernet`` where there are
    other cards alone: sockets, or a plugin that knows better."""
    variables: tuple[str, ...] = ()
    """What of NCCL's environment bears on the network, as ``NAME=value``."""

    def variable(self, name: str) -> str:
        """The value of one of NCCL's variables; empty where it is not set.

        >>> SeenNode(variables=("NCCL_ALGO=Ring",)).variable("NCCL_ALGO")
        'Ring'
        """
        start = f"{name}="
        values = (text[len(start) :] for text in self.variables if text.startswith(start))
        return next(values, "")

    @property
    def text(self) -> str:
        """What is told, in words for people; empty where nothing is.

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
    """What a user says of all nodes; None where nothing is said."""

    joint: str | None = None
    num_gpus: int | None = None
    num_cards: int | None = None
    domain: int | None = None
    node_bytes_per_s: float | None = None
    card_bytes_per_s: float | None = None

    @property
    def values(self) -> dict[str, object]:
        """All that is said, by name."""
        all_values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return {name: value for name, value in all_values.items() if value is not None}


_COUNTS = ("num_gpus", "num_cards", "domain")
_RATES = ("node_bytes_per_s", "card_bytes_per_s")
KEYS = ("joint", *_COUNTS, *_RATES)
"""Of a cluster file."""


def stated_nodes(values: Mapping[str, object]) -> StatedNodes:
    """What a cluster file says.

    ``joint`` is how GPUs of a node are joined, ``num_gpus`` and ``num_cards`` are counted by node,
    ``domain`` is the number of ranks that NVLink joins.  ``node_bytes_per_s`` is the bus bandwidth
    inside a node, ``card_bytes_per_s`` that of one card, both as nccl-tests reaches them.
    ``ConfigError`` for a value that cannot be.

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
    """Nodes that were seen, one for each that tells, and what is stated of all."""

    seen: tuple[SeenNode, ...] = ()
    stated: StatedNodes = field(default_factory=StatedNodes)

    @property
    def node(self) -> SeenNode:
        """The node that most are like; of equals the first."""
        plain = [replace(node, fabric="") for node in self.seen]
        return Counter(plain).most_common(1)[0][0] if plain else SeenNode()

    def domain(self, device: str) -> tuple[int, Origin]:
        """Ranks of a run that NVLink joins over several hosts; 0 where it joins none.

        What is stated goes before what the driver shows, and that before what GPUs of this name are
        sold in.

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

    def joined(self, parallelism: Parallelism, device: str) -> Parallelism:
        """The layout with hosts that one NVLink domain joins counted as one node.

        >>> rack = Cluster().joined(Parallelism(dp=64, ranks_per_node=4), "NVIDIA GB200")
        >>> far = Cluster().joined(Parallelism(dp=256, ranks_per_node=4), "NVIDIA GB200")
        >>> rack.ranks_per_node, far.ranks_per_node
        (72, 64)
        """
        known = self.node.num_local_ranks, self.stated.num_gpus, parallelism.ranks_per_node
        local = next(filter(None, known), 0)
        domain, origin = self.domain(device)
        if not domain:
            # A run may describe a layout that it does not have itself: what it saw is not of that.
            ranks_per_node = parallelism.ranks_per_node or self.stated.num_gpus or 0
            return replace(parallelism, ranks_per_node=ranks_per_node)
        num_ranks = parallelism.num_ranks
        is_cut = origin is not Origin.STATED and domain == NVL72
        if is_cut and num_ranks > domain and num_ranks % _SEGMENT == 0:
            domain = _SEGMENT
        return replace(parallelism, ranks_per_node=max(domain, local))

    def to_json(self) -> JsonObject:
        """A JSON value that ``from_json`` reads back."""
        return {
            "seen": [encode_fields(node) for node in self.seen],
            "stated": {**self.stated.values},  # type: ignore[dict-item]
        }

    @staticmethod
    def from_json(value: object) -> Cluster:
        """What ``to_json`` wrote; what is damaged or of a newer version counts as not told."""
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
    """Of all ranks that tell: every node, and what the first says that states anything."""
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
    known = [joint.value for joint in Joint]
    if value not in known:
        raise ConfigError(
            f"{name} {value!r} of the cluster is not known; choose from {', '.join(known)}"
        )
    return str(value)
