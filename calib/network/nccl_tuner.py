"""NCCL's own cost model of a collective, by which it picks algorithm and protocol.

The time is the least over pairs of algorithm and protocol of ``latency + nbytes / bandwidth``.
Formulae and figures are those of NCCL 2.30's ``src/graph/tuning.cc`` (latencies of a launch and of
a hop, shares of the bandwidth that a protocol reaches, bends of trees). NCCL prices neither
point-to-point nor all-to-all: those two are one Simple hop and the bytes of the busier of the two
wires.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..records.cluster import GpuInterconnect
from ..workload.collectives import Collective
from ._topology import Topology
from .groups import Group

Vector = NDArray[np.float64]
_US = 1e-6
_GIGA = 1e9
_USUAL = Topology()


class Architecture(Enum):
    """Architecture of the GPU, which bounds the rate of one channel."""

    VOLTA = "volta"
    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"


class Wire(Enum):
    """Link that a hop between ranks uses."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


class Algorithm(Enum):
    """Algorithms: paths through the ranks."""

    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"


class Protocol(Enum):
    """Protocols: flags in every 8 bytes (LL), in every 128 bytes (LL128), or fences (Simple)."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


Option = tuple[Algorithm, Protocol]
GATHERS = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER})
"""Collectives that are each other's reverse, with the same algorithms."""
_BASE_US: Mapping[Option, float] = {
    (Algorithm.TREE, Protocol.LL): 6.8,
    (Algorithm.TREE, Protocol.LL128): 14.0,
    (Algorithm.TREE, Protocol.SIMPLE): 8.4,
    (Algorithm.RING, Protocol.LL): 6.6,
    (Algorithm.RING, Protocol.LL128): 14.0,
    (Algorithm.RING, Protocol.SIMPLE): 8.4,
    (Algorithm.NVLS, Protocol.SIMPLE): 0.0,
}
"""``baseLat`` of NCCL's tuning.cc: microseconds before the first hop."""
_HOP_US: Mapping[tuple[Wire, Algorithm], tuple[float, float, float]] = {
    (Wire.NVLINK, Algorithm.TREE): (0.6, 1.25, 4.0),
    (Wire.NVLINK, Algorithm.RING): (0.6, 1.9, 3.4),
    (Wire.NVLINK, Algorithm.NVLS): (0.0, 0.0, 25.0),
    (Wire.PCIE, Algorithm.TREE): (1.0, 1.9, 4.0),
    (Wire.PCIE, Algorithm.RING): (1.0, 2.5, 5.7),
    (Wire.NETWORK, Algorithm.TREE): (5.0, 8.5, 14.0),
    (Wire.NETWORK, Algorithm.RING): (2.7, 4.0, 14.0),
}
"""Microseconds per hop under LL, LL128 and Simple."""
_POST_US = 1.0
"""Microseconds to post one transfer to the network card; three times that under Simple."""
_LL_BYTES_PER_S: Mapping[Architecture, float] = {
    Architecture.VOLTA: 39.0 * _GIGA,
    Architecture.AMPERE: 87.7 * _GIGA,
    Architecture.HOPPER: 141.0 * _GIGA,
    Architecture.BLACKWELL: 282.0 * _GIGA,
}
"""``llMaxBws`` of NCCL's tuning.cc for one node."""
_LL_NETWORK_BYTES_PER_S = (39.0 * _GIGA, 20.4 * _GIGA)
"""``llMaxBws`` for two nodes, and for more."""
_LL128_CHANNEL: Mapping[Architecture, float] = {
    Architecture.VOLTA: 20.0 * _GIGA,
    Architecture.AMPERE: 20.0 * _GIGA,
    Architecture.HOPPER: 36.7 * _GIGA,
    Architecture.BLACKWELL: 40.0 * _GIGA,
}
"""``perChMaxRingLL128Bws`` of NCCL's tuning.cc, of one channel."""
_TREE_CHANNEL: Mapping[Architecture, tuple[float, float, float]] = {
    Architecture.VOLTA: (26.5 * _GIGA, 18.5 * _GIGA, 10.0 * _GIGA),
    Architecture.AMPERE: (24.0 * _GIGA, 23.6 * _GIGA, 17.8 * _GIGA),
    Architecture.HOPPER: (38.7 * _GIGA, 41.4 * _GIGA, 36.0 * _GIGA),
    Architecture.BLACKWELL: (70.0 * _GIGA, 42.8 * _GIGA, 24.0 * _GIGA),
}
"""Bandwidth of a tree's channel on one node, two nodes, and more."""
_TREE_TENTHS: Mapping[Protocol, str] = {
    Protocol.LL: "10 10 10 10 9 8 7 7 7 7 6 5 4 4 5 6 7 8 9 10 10 10 10",
    Protocol.LL128: "10 10 10 10 10 9 8 8 8 7 6 6 6 6 6 6 8 9 9 9 9 10 10",
    Protocol.SIMPLE: "9 9 9 9 9 9 9 8 7 6 6 5 5 5 5 6 7 8 7 7 8 9 9",
}
"""Tenths of its bandwidth that a tree reaches at 64 B, 128 B, ... 256 MiB."""
_NVLS_FILL_US = 30.0
"""Latency of the switch beyond NCCL's own figure: eight H100 in two public tables, 32 to 512 MiB,
take 50 to 60 us more than their bandwidth explains."""
_NVLS_LEAST_RANKS = 5
"""Ranks from which NVLS is picked inside a node (H200; 6 on B200): measured, ml-engineering."""


_SEND_CHANNELS, _CHANNEL_SENDS = 2, 4
"""Channels per peer behind the network, and operations that may share a channel before NCCL uses
fewer."""
_CARD_CHANNELS = 4
"""Channels of one card: two rings there and back."""
_ONE_CHANNEL_FRAC = 0.6
"""Share of a 400 Gb/s card that one queue reaches: 25 GB/s of the 41 that two move (nccl-tests on
H100)."""
_PAIRED_NODES = frozenset({Architecture.HOPPER, Architecture.BLACKWELL})
"""Architectures whose trees halve the bytes between two nodes; A100 reduce there as fast as they
gather (Polaris, nccl-tests)."""
_PAIR_RING_FRAC = 0.92
"""Share of a card's rate in their ring of two ranks on two nodes: H100 reduce 41.9 and scatter 40.1
GB/s, and 43 to 46 on 4 to 32 nodes (meta-pytorch/autoparallel, table of NCCL 2.27.5)."""
_OTHER_JOINTS: Mapping[Architecture, tuple[GpuInterconnect, ...]] = {
    Architecture.VOLTA: (GpuInterconnect.CUBE,),
    Architecture.AMPERE: (GpuInterconnect.MESH,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Links between the ranks of a machine, inside a node and between nodes."""

    wire: Wire
    generation: Architecture
    num_channels: int
    node_bytes_per_s: float
    """Bus bandwidth of a ring inside a node."""
    network_bytes_per_s: float
    """Bandwidth of one network card, in one direction."""
    nvls_bytes_per_s: float = 0.0
    """Bus bandwidth of an all-reduce in the switch; 0 without such a switch."""
    topology: Topology = _USUAL
    may_be_bridged: bool = True
    """True if two GPUs of a node may have a link that the others lack."""
    without: tuple[Algorithm | Protocol, ...] = ()
    """Algorithms and protocols that NCCL is configured not to use."""

    @property
    def other_joints(self) -> tuple[GpuInterconnect, ...]:
        """Other joints of nodes with this GPU; all since Hopper have a switch."""
        if self.wire is not Wire.NVLINK:
            return ()
        return _OTHER_JOINTS.get(self.generation, ())

    def bus_bytes_per_s(self, group: Group) -> float:
        """Return the bandwidth of the narrowest link of a ring; across nodes, that of all cards in
        use together."""
        if group.num_nodes == 1:
            return self.node_bytes_per_s * self.topology.node_share(group.num_ranks)
        cards = self.card_bytes_per_s(group) * group.ranks_per_node * self.pair_frac(group)
        return min(self.node_bytes_per_s, cards)

    def pair_frac(self, group: Group) -> float:
        """Return the share of a card's rate that a ring reaches: below 1 for two ranks on two
        nodes."""
        is_pair = group.num_ranks == group.num_nodes == 2
        return _PAIR_RING_FRAC if is_pair and self.generation in _PAIRED_NODES else 1.0

    def tree_bytes_per_s(self, group: Group) -> float:
        """Return the bandwidth of a tree: as of a ring, but twice that of the cards between two
        nodes since Hopper.

        Each half of the payload then crosses the network once up one of two trees and once down,
        where a ring sends nearly twice the payload; over more nodes both send as much. Two nodes of
        two and four H100 reduce 1.64 times as fast as four nodes (meta-pytorch/autoparallel, table
        of NCCL 2.27.5).
        """
        bus = self.bus_bytes_per_s(group)
        if group.num_nodes == 2 and self.generation in _PAIRED_NODES:
            return min(self.node_bytes_per_s, 2.0 * bus)
        return bus

    def card_bytes_per_s(self, group: Group) -> float:
        """Return each rank's share of the rate of its node's cards, in a group."""
        return self.network_bytes_per_s * self._cards(group) / group.ranks_per_node

    def send_bytes_per_s(self, group: Group) -> float:
        """Return the bandwidth between two ranks on two nodes of a group.

        NCCL gives each peer two channels, or one if more than four operations would share a channel
        (``ncclTopoGetNchannels``).
        """
        channels = min(self.num_channels, _CARD_CHANNELS * self._cards(group))
        is_wide = _SEND_CHANNELS * group.num_ranks <= _CHANNEL_SENDS * channels
        return self.network_bytes_per_s * (1.0 if is_wide else _ONE_CHANNEL_FRAC)

    def _cards(self, group: Group) -> int:
        return self.topology.cards_in_use(group.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedCost:
    """Latency and bandwidth of an algorithm and protocol, ``(rows,)`` by payload or one for all."""

    latency_s: float | Vector
    bytes_per_s: float | Vector

    def time_s(self, nbytes: Vector) -> Vector:
        """Return seconds, ``(rows,)``."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTime:
    """Function from payloads to the seconds of a group by NCCL's own tuner."""

    group: Group
    links: LinkClass

    def __call__(self, nbytes: Vector) -> Vector:
        """Return seconds by payload in bytes, ``(rows,)``."""
        return tuner_time_s(self.group, nbytes, self.links)


def tuner_time_s(group: Group, nbytes: Vector, link: LinkClass) -> Vector:
    """Return the seconds of the cheapest algorithm and protocol, ``(rows,)``; 0 for a single rank.

    >>> link = LinkClass(wire=Wire.NVLINK, generation=Architecture.AMPERE, num_channels=24,
    ...                  node_bytes_per_s=230e9, network_bytes_per_s=25e9)
    >>> eight = Group(collective=Collective.ALL_REDUCE, num_ranks=8)
    >>> (tuner_time_s(eight, np.array([8.0, 2.0**30]), link) * 1e6).round(1).tolist()
    [15.0, 8225.8]
    """
    if group.num_ranks < 2:
        return np.zeros(len(nbytes))
    costs = tuner_costs(group, nbytes, link).values()
    return np.min([cost.time_s(nbytes) for cost in costs], axis=0)


def tuner_costs(group: Group, nbytes: Vector, link: LinkClass) -> dict[Option, TunedCost]:
    """Return the cost of each pair that NCCL may pick for this collective and group."""
    collective = group.collective
    simple = (Algorithm.RING, Protocol.SIMPLE)
    if collective in (Collective.SEND, Collective.RECV):
        return {simple: _send(group, link)}
    if collective is Collective.ALL_TO_ALL:
        return {simple: _all_to_all(group, link)}
    # NCCL enables LL128 by default where NVLink joins the ranks of a node.
    is_joined = link.wire is Wire.NVLINK
    protocols = [p for p in Protocol if is_joined or p is not Protocol.LL128]
    costs = {(Algorithm.RING, p): _ring(group, link, p) for p in protocols}
    if collective is Collective.ALL_REDUCE:
        costs |= {(Algorithm.TREE, p): _tree(group, link, p, nbytes) for p in protocols}
    if switch := switch_cost(group, link):
        costs[Algorithm.NVLS, Protocol.SIMPLE] = switch
    # NCCL ignores its variables if they leave no option.
    return {o: cost for o, cost in costs.items() if not set(link.without) & set(o)} or costs


def switch_cost(group: Group, link: LinkClass) -> TunedCost | None:
    """Return the cost of an all-reduce in the switch of a node; None if the switch does not reduce
    it."""
    is_reduced = group.collective is Collective.ALL_REDUCE and group.num_nodes == 1
    is_reduced = is_reduced and group.num_ranks >= _NVLS_LEAST_RANKS
    if not is_reduced or Algorithm.NVLS in link.without or not link.nvls_bytes_per_s:
        return None
    return TunedCost(
        latency_s=_US * (_hop_us(Wire.NVLINK, Algorithm.NVLS) + _NVLS_FILL_US),
        bytes_per_s=link.nvls_bytes_per_s * group.num_ranks / _num_steps(group),
    )


def _num_steps(group: Group) -> int:
    if group.collective is Collective.ALL_REDUCE:
        return 2 * (group.num_ranks - 1)
    return group.num_ranks - 1 if group.collective in GATHERS else group.num_ranks


def _ll_bytes_per_s(group: Group, link: LinkClass) -> float:
    if group.num_nodes == 1:
        return _LL_BYTES_PER_S[link.generation]
    return _LL_NETWORK_BYTES_PER_S[min(group.num_nodes, 3) - 2]


def _hop_us(wire: Wire, algorithm: Algorithm, protocol: Protocol = Protocol.SIMPLE) -> float:
    return _HOP_US[wire, algorithm][list(Protocol).index(protocol)]


def _ring(group: Group, link: LinkClass, protocol: Protocol) -> TunedCost:
    bus = link.bus_bytes_per_s(group)
    if protocol is Protocol.LL:
        bus = min(_ll_bytes_per_s(group, link), 0.5 * bus)
    elif protocol is Protocol.LL128:
        bus = min(0.92 * bus, link.num_channels * _LL128_CHANNEL[link.generation])
    local_us = _hop_us(link.wire, Algorithm.RING, protocol)
    # With one rank per node nothing hides the network's latency: the tree's is used.
    way = Algorithm.TREE if group.ranks_per_node == 1 else Algorithm.RING
    far = 0
    if group.num_nodes > 1:
        local_us = max(local_us, _POST_US * (3 if protocol is Protocol.SIMPLE else 1))
        far = (group.num_nodes - 1) * (2 if group.collective is Collective.ALL_REDUCE else 1)
    latency_us = _BASE_US[Algorithm.RING, protocol]
    far_us = far * _hop_us(Wire.NETWORK, way, protocol)
    latency_us += (_num_steps(group) - far) * local_us + far_us
    return TunedCost(
        latency_s=_US * latency_us,
        bytes_per_s=bus * group.num_ranks / _num_steps(group),
    )


def _tree(group: Group, link: LinkClass, protocol: Protocol, nbytes: Vector) -> TunedCost:
    channel = _TREE_CHANNEL[link.generation][min(group.num_nodes, 3) - 1]
    bus = min(0.92 * link.tree_bytes_per_s(group), link.num_channels * channel)
    if protocol is Protocol.LL:
        bus = min(bus / 3.8, _ll_bytes_per_s(group, link))
    elif protocol is Protocol.LL128:
        share = 7 / 9 if group.num_nodes == 1 else 120 / 128
        bus = min(bus * share, link.num_channels * _LL128_CHANNEL[link.generation])
    octave = np.log2(np.maximum(nbytes, 64.0) / 64.0).astype(np.int64)
    bend = 0.1 * np.array(_TREE_TENTHS[protocol].split(), dtype=np.float64)
    inside = octave < len(bend)
    share = np.where(inside, bend[np.where(inside, octave, 0)], 1.0)
    hops_us = (group.ranks_per_node - 1) * _hop_us(link.wire, Algorithm.TREE, protocol)
    hops_us += np.log2(group.num_nodes) * _hop_us(Wire.NETWORK, Algorithm.TREE, protocol)
    return TunedCost(
        latency_s=_US * (_BASE_US[Algorithm.TREE, protocol] + 2 * hops_us),
        bytes_per_s=0.5 * bus * share,
    )


def _send(group: Group, link: LinkClass) -> TunedCost:
    wire = link.wire if group.num_nodes == 1 else Wire.NETWORK
    latency_us = _BASE_US[Algorithm.RING, Protocol.SIMPLE] + _hop_us(wire, Algorithm.RING)
    bandwidth = link.node_bytes_per_s if group.num_nodes == 1 else link.send_bytes_per_s(group)
    return TunedCost(latency_s=_US * latency_us, bytes_per_s=bandwidth)


def _all_to_all(group: Group, link: LinkClass) -> TunedCost:
    """Return the cost of an all-to-all: peers inside the node are served at once, those behind the
    network one post after another."""
    num_far = group.num_ranks - group.ranks_per_node
    local_s = (group.ranks_per_node - 1) / group.num_ranks / link.node_bytes_per_s
    far_s = num_far / group.num_ranks / link.card_bytes_per_s(group)
    latency_s = all_to_all_base_s(group.num_nodes) + 3 * _POST_US * _US * num_far
    return TunedCost(latency_s=latency_s, bytes_per_s=1.0 / max(local_s, far_s))


def all_to_all_base_s(num_nodes: int) -> float:
    """Return the seconds of an all-to-all that do not grow with its peers: a launch, and a hop if
    it leaves the node.

    >>> round(all_to_all_base_s(2) * 1e6, 1)
    22.4
    """
    hop_us = _hop_us(Wire.NETWORK, Algorithm.RING) if num_nodes > 1 else 0.0
    return _US * (_BASE_US[Algorithm.RING, Protocol.SIMPLE] + hop_us)
