"""Links of a cluster: the prior of its GPUs, then its detected nodes, then the user's statement.

The only entry point to the links that transfers are priced on; measurements are fitted around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..records.cluster import Cluster, GpuInterconnect, Origin, SeenNode, StatedNodes
from ..workload.operators import Operator, Phase
from ._topology import CARD_RATE, NODE_RATE, Topology
from .nccl_tuner import Algorithm, Architecture, LinkClass, Protocol, Wire
from .systems import REACHED_FRAC, NetworkPrior, network_prior

_GIGA = 1e9
LINK_SIGMA_LOG = 0.3
"""Deviation of a host's rate from the data sheet's: hosts with one socket for eight devices,
unpinned pages; 45 to 56 GB/s for a stated 64."""
SLOT_BYTES_PER_S: Mapping[int, float] = {
    generation: 16 * transfers_per_s * 128 / 130 / 8
    for generation, transfers_per_s in ((3, 8e9), (4, 16e9), (5, 32e9))
}
"""Bytes/s of sixteen lanes of PCIe 3, 4 and 5 in one direction, by generation: 8, 16 and 32 GT/s,
with 128 data bits of 130 (PCI-SIG's base specifications)."""
_WHOLE_PACKET_FRAC = 0.86
"""Share of a slot's rate that remains after the headers of 256-byte packets and their
acknowledgements."""
_COPY_S = 10e-6
"""Fixed seconds of one copy before its first byte."""
_C2C = (297 * _GIGA, 375 * _GIGA)
"""Bytes/s to the host and back over NVLink-C2C of a GH200, of 450 (Schieffer et al. 2024,
arXiv:2407.07850)."""
_SHARED_C2C = (243 * _GIGA, 243 * _GIGA)
"""Bytes/s of each of the two devices of a GB200, which share a Grace with 486 GB/s of memory
bandwidth (STREAM, the same source)."""
_GEN3, _GEN4, _GEN5 = (
    (_WHOLE_PACKET_FRAC * rate, _WHOLE_PACKET_FRAC * rate) for rate in SLOT_BYTES_PER_S.values()
)
_RATES: tuple[tuple[str, tuple[float, float]], ...] = (
    *(("gb300", _SHARED_C2C), ("gb200", _SHARED_C2C), ("gh200", _C2C), ("gh-96", _C2C)),
    *((name, _GEN5) for name in ("b200", "b300", "h100", "h200", "h800", "h20")),
    *((name, _GEN3) for name in ("v100", "t4", "titan")),
)
"""Host rates by device name, longer names first; sixteen lanes of the PCIe of their year."""


def host_rates(device: str) -> tuple[float, float]:
    """Return the bytes/s of large copies to the host's memory, and out of it.

    Unknown devices get the fourth generation of PCIe.

    >>> [rate / 1e9 for rate in host_rates("NVIDIA GH200 96GB")]
    [297.0, 375.0]
    """
    low = device.lower()
    return next((rates for name, rates in _RATES if name in low), _GEN4)


def host_copy_s(operator: Operator, device: str) -> float:
    """Return the seconds of one copy: to the host's memory in the forward, out of it in the
    backward.

    >>> from ..workload.operators import OperatorKind
    >>> copy = Operator(kind=OperatorKind.HOST_COPY, phase=Phase.FORWARD, shape=(10**9,),
    ...     element_nbytes=1)
    >>> [round(1e3 * host_copy_s(copy, name), 1) for name in ("NVIDIA H100", "NVIDIA GH200")]
    [18.5, 3.4]
    """
    return _COPY_S + operator.shape[0] / host_rates(device)[operator.phase is Phase.BACKWARD]


_SOCKET_BYTES_PER_S = 3 * _GIGA
"""Upper bound of NCCL's rate through one card over TCP: Perlmutter's nodes, falling back to sockets
on cards of 25 GB/s, got 1.3 to 3.9 GB/s from one (tables of estimate-train-time)."""
_PCIE_FRAC = 0.63
"""Bus bandwidth of a ring over PCIe over the rate of the slots: 20 GB/s on sixteen lanes of
generation 4, as on A40 and L40."""
_SLOT_GENERATIONS: Mapping[Architecture, int] = {
    Architecture.VOLTA: 3,
    Architecture.AMPERE: 4,
    Architecture.HOPPER: 5,
    Architecture.BLACKWELL: 5,
}
"""PCIe generation of the GPUs of an architecture."""
_PCIE_CHANNELS = 4
"""Channels over PCIe, as for other GPUs without NVLink (``systems``)."""
_WAYS: Mapping[str, Algorithm] = {
    "ring": Algorithm.RING,
    "tree": Algorithm.TREE,
    "nvls": Algorithm.NVLS,
}
_PROTOCOLS: Mapping[str, Protocol] = {
    "ll": Protocol.LL,
    "ll128": Protocol.LL128,
    "simple": Protocol.SIMPLE,
}


def known_network(device: str, cluster: Cluster) -> NetworkPrior:
    """Return the links of a run's nodes; hosts joined by one NVLink domain are one node, as in its
    layouts.

    >>> rack = known_network("NVIDIA GB200", Cluster()).links.topology
    >>> rack.num_gpus, rack.num_cards, rack.origin("domain").value
    (72, 72, 'prior')
    """
    return with_domains_as_nodes(nodes_network(device, cluster))


def nodes_network(device: str, cluster: Cluster) -> NetworkPrior:
    """Return the links of a run's nodes, with nodes counted by host."""
    prior = detected_network(cluster.node, network_prior(device))
    if prior.links is not None and not cluster.stated.domain:
        topology = prior.links.topology
        domain, origin = cluster.domain(device)
        if origin is Origin.SEEN:
            domain_size = max(domain, cluster.node.num_local_ranks or topology.num_gpus)
            topology = topology.with_figures(origin, domain=domain_size)
        prior = replace(prior, links=replace(prior.links, topology=topology))
    return stated_network(cluster.stated, prior)


def with_domains_as_nodes(prior: NetworkPrior) -> NetworkPrior:
    """Return the prior with hosts joined by one NVLink domain as one node."""
    if prior.links is None:
        return prior
    topology = prior.links.topology.as_domains()
    return replace(prior, links=replace(prior.links, topology=topology))


def stated_network(stated: StatedNodes, prior: NetworkPrior) -> NetworkPrior:
    """Return the prior with stated figures of nodes; no measurement overrules its counts and joint.

    Stated rates are the starting values of measured ones.

    >>> stated = StatedNodes(num_gpus=4, num_cards=2)
    >>> links = stated_network(stated, network_prior("a100")).links
    >>> links.topology.cards_in_use(4), links.topology.origin("num_cards").value
    (2, 'stated')
    """
    stated_values = stated.values
    if prior.links is None or not stated_values:
        return prior
    links = prior.links
    if "joint" in stated_values:
        links = _joined_by(links, GpuInterconnect(stated_values["joint"]), Origin.STATED)
    counts = {
        name: stated_values[name]
        for name in ("num_gpus", "num_cards", "domain")
        if name in stated_values
    }
    links = replace(links, topology=links.topology.with_figures(Origin.STATED, **counts))
    for name in (NODE_RATE, CARD_RATE):
        if name in stated_values:
            links = _with_rate(links, name, float(str(stated_values[name])), Origin.STATED)
    return replace(prior, links=links, bus_bytes_per_s=links.node_bytes_per_s)


def detected_network(node: SeenNode, prior: NetworkPrior) -> NetworkPrior:
    """Return the prior with the detected figures of a node: its cards, slots and NCCL variables.

    >>> node = SeenNode(num_gpus=8, num_cards=2, card_bytes_per_s=25e9, wire="infiniband")
    >>> links = detected_network(node, network_prior("h100")).links
    >>> links.topology.num_cards, links.network_bytes_per_s / 1e9
    (2, 22.5)
    """
    if prior.links is None:
        return prior
    links = _with_cards(prior.links, node)
    if node.joint or node.variable("NCCL_P2P_DISABLE") == "1":
        joint = GpuInterconnect(node.joint) if node.joint in _JOINTS else links.topology.joint
        if node.variable("NCCL_P2P_DISABLE") == "1":
            joint = GpuInterconnect.PCIE
        links = _joined_by(links, joint, Origin.SEEN, slot_bytes_per_s=node.gpu_pcie_bytes_per_s)
    links = _with_ways(links, node)
    return replace(prior, links=links, bus_bytes_per_s=links.node_bytes_per_s)


_JOINTS = frozenset(joint.value for joint in GpuInterconnect)


def _with_cards(links: LinkClass, node: SeenNode) -> LinkClass:
    """Return the links with detected cards; each GPU uses the nearest ones, and any surplus serves
    other purposes."""
    if node.num_gpus:
        links = replace(
            links, topology=links.topology.with_figures(Origin.SEEN, num_gpus=node.num_gpus)
        )
    if not node.num_cards:
        return links
    num_gpus, num_cards = links.topology.num_gpus, node.num_cards
    if num_cards > num_gpus:
        num_cards -= num_cards % num_gpus
    links = replace(links, topology=links.topology.with_figures(Origin.SEEN, num_cards=num_cards))
    rates = [rate for rate in (node.card_bytes_per_s, node.card_pcie_bytes_per_s) if rate]
    if node.wire in ("socket", "ethernet"):
        # The rate that sockets, or a plugin, reach on a card is as uncertain as a prior.
        usual = _SOCKET_BYTES_PER_S if node.wire == "socket" else links.network_bytes_per_s
        reached = min([usual, *(REACHED_FRAC * rate for rate in rates)])
        return replace(links, network_bytes_per_s=reached)
    if not node.card_bytes_per_s:
        return links
    return _with_rate(links, CARD_RATE, REACHED_FRAC * min(rates), Origin.SEEN)


def _joined_by(
    links: LinkClass, joint: GpuInterconnect, origin: Origin, *, slot_bytes_per_s: float = 0.0
) -> LinkClass:
    """Return the links of a node's GPUs under a joint; without NVLink, by their slots."""
    links = replace(links, topology=links.topology.with_figures(origin, joint=joint))
    if joint is not GpuInterconnect.PCIE or links.wire is Wire.PCIE:
        return replace(links, may_be_bridged=False) if joint is GpuInterconnect.SWITCH else links
    slot = slot_bytes_per_s or SLOT_BYTES_PER_S[_SLOT_GENERATIONS[links.generation]]
    return replace(
        links,
        wire=Wire.PCIE,
        num_channels=_PCIE_CHANNELS,
        node_bytes_per_s=_PCIE_FRAC * slot,
        nvls_bytes_per_s=0.0,
    )


def _with_ways(links: LinkClass, node: SeenNode) -> LinkClass:
    """Return the links with the algorithms, protocols and channels that NCCL's variables allow."""
    if node.variable("NCCL_NVLS_ENABLE") == "0":
        links = replace(links, nvls_bytes_per_s=0.0)
    without = (
        *_excluded_ways(node.variable("NCCL_ALGO"), _WAYS),
        *_excluded_ways(node.variable("NCCL_PROTO"), _PROTOCOLS),
    )
    most = _whole(node.variable("NCCL_MAX_NCHANNELS") or node.variable("NCCL_MAX_CTAS"))
    if 0 < most < links.num_channels:
        # NCCL's own model: each channel has an equal share of the links.
        share = most / links.num_channels
        links = replace(links, num_channels=most, node_bytes_per_s=share * links.node_bytes_per_s)
    return replace(links, without=without)


def _excluded_ways(
    text: str, known: Mapping[str, Algorithm | Protocol]
) -> list[Algorithm | Protocol]:
    """Return the members that a list such as ``ring,tree`` or ``^nvls`` excludes; lists by
    collective are ignored."""
    words = [word.strip().lower() for word in text.removeprefix("^").split(",") if word.strip()]
    named = {known[word] for word in words if word in known}
    if not named or ":" in text:
        return []
    return [way for way in known.values() if (way in named) is text.startswith("^")]


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0


def _with_rate(links: LinkClass, name: str, bytes_per_s: float, origin: Origin) -> LinkClass:
    topology = replace(links.topology, origins={**links.topology.origins, name: origin})
    spec = "node_bytes_per_s" if name == NODE_RATE else "network_bytes_per_s"
    return replace(links, topology=topology, **{spec: bytes_per_s})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigure:
    """One figure of a cluster's links, and its origin."""

    value: str | int | float
    origin: str


def link_figures(prior: NetworkPrior) -> dict[str, LinkFigure]:
    """Return the figures that transfers are priced on, by name; empty if NCCL does not carry
    them."""
    if prior.links is None:
        return {}
    links, topology = prior.links, prior.links.topology
    values: dict[str, str | int | float] = {
        "joint": topology.joint.value,
        "num_gpus": topology.num_gpus,
        "num_cards": topology.num_cards,
        "domain": topology.domain,
        NODE_RATE: links.node_bytes_per_s,
        CARD_RATE: links.network_bytes_per_s,
    }
    return {
        name: LinkFigure(value=value, origin=topology.origin(name).value)
        for name, value in values.items()
    }


def network_line(prior: NetworkPrior) -> str:
    """Return these figures in one line; empty if there are none.

    >>> network_line(network_prior("NVIDIA H100 80GB HBM3"))
    'network: 8 cards of 45 GB/s for 8 GPUs (prior), NVLink domain 8 (prior)'
    """
    if prior.links is None:
        return ""
    links, topology = prior.links, prior.links.topology
    origins = [topology.origin(name).value for name in ("num_cards", CARD_RATE)]
    cards = (
        f"{topology.num_cards} card{'s' * (topology.num_cards > 1)} of "
        f"{links.network_bytes_per_s / _GIGA:.3g} GB/s for {_gpus(topology)} "
        f"({' / '.join(dict.fromkeys(origins))})"
    )
    if links.wire is Wire.PCIE:
        inside = f"PCIe between GPUs ({topology.origin('joint').value})"
    else:
        inside = f"NVLink domain {topology.domain} ({topology.origin('domain').value})"
    return f"network: {cards}, {inside}"


def _gpus(topology: Topology) -> str:
    return f"{topology.num_gpus} GPU{'s' * (topology.num_gpus > 1)}"
