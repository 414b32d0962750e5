"""Topology of nodes and the links between them: priors, stated figures, measurements.

A ring across nodes leaves a node through every card in use, and NCCL opens a ring for each: its
bandwidth grows with the ranks on a node until all cards are used. Inside a node a switch gives each
rank all its links to any peer; without one, links are divided among peers, so that few ranks use
only part of them (four A100 in a full mesh, eight V100 in a cube with its diagonals).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from ..records.cluster import GpuInterconnect, Origin

LOCAL_COPY_CHUNKS = 0.4
"""Chunks that a ring inside a node spends in addition to its steps, on a rank's local copies: bus
bandwidths of 2, 3, ... 8 A100 and H100 in public tables of all-gather, reduce-scatter and
all-reduce are those of ``(steps + 0.4) / steps``."""
CONGESTION_LOG = 0.05
"""Log loss of an all-to-all per doubling of nodes, 1 to 10 % on Slingshot and InfiniBand from 2 to
10 and 128 nodes: its bytes cross the core of the network, those of a ring do not."""
_MESH_PEERS = 3
_CUBE_OCTAVES = 3
_PCIE_OVER_BRIDGE_FRAC = 0.1
"""Bus bandwidth of PCIe over that of a bridge: 16 lanes of the fourth generation give 24 GB/s, a
bridge of A100 230; both doubled with Hopper."""
_CARDS = (1, 2, 4, 8, 16)
"""Numbers of cards per node that are tried."""
_OTHER_COST = 2.0
"""Negative log probability of another number of cards than the prior's, and of a node without a
switch for GPUs sold with and without one: 1 in 7 relative to the prior's. Twice that for a number
other than the detected one, of which some may serve storage."""
_USUAL_GPUS = 8
_RATE_SIGMA_LOG = 0.2
"""Deviation of bus bandwidths of collectives on the same links (a fifth, Slingshot and InfiniBand),
and of a node's rate from the device's prior."""
_CARD_SIGMA_LOG = 0.7
"""Deviation of the rate of a node's cards from the device's prior: networks differ by factors of
two and four, while the generation of NVLink follows from the GPU."""
_SEEN_CARD_SIGMA_LOG = 0.35
"""Deviation for cards of known rate: rings in public tables reach 0.72 (Slingshot), 0.92 (HDR) and
0.97 (NDR) of it, and below a fifth if the card does not read the GPU's memory."""
NODE_RATE, CARD_RATE = "node_bytes_per_s", "card_bytes_per_s"
"""Names of rates among a topology's origins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of a machine; each figure has an origin."""

    joint: GpuInterconnect = GpuInterconnect.SWITCH
    num_gpus: int = 8
    """GPUs of a node, including those without ranks of a group."""
    num_cards: int = 8
    """Network cards of a node."""
    domain: int = 8
    """Ranks joined by NVLink: 72 in a rack of GB200, with hosts of four in it."""
    origins: Mapping[str, Origin] = field(default_factory=dict)
    """Origins by the name of a field above or of a rate; the prior if it is missing."""

    def origin(self, name: str) -> Origin:
        """Return the origin of a figure."""
        return self.origins.get(name, Origin.PRIOR)

    def is_stated(self, name: str) -> bool:
        """Return True if a user stated the figure, which no measurement overrules."""
        return self.origin(name) is Origin.STATED

    def with_figures(self, origin: Origin, **changed: object) -> Topology:
        """Return the topology with figures of another origin; unspecified ones scale with the GPUs.

        >>> found = Topology().with_figures(Origin.STATED, num_gpus=4)
        >>> found.num_cards, found.domain, found.origin("num_cards").value
        (4, 4, 'prior')
        """
        origins = {**self.origins, **dict.fromkeys(changed, origin)}
        topology = replace(self, **changed, origins=origins)  # type: ignore[arg-type]
        if topology.num_gpus == self.num_gpus:
            return topology
        if topology.origin("num_cards") is Origin.PRIOR:
            cards = max(1, self.num_cards * topology.num_gpus // self.num_gpus)
            topology = replace(topology, num_cards=cards)
        is_host = topology.origin("domain") is Origin.PRIOR and self.domain <= self.num_gpus
        return replace(topology, domain=topology.num_gpus) if is_host else topology

    def as_domains(self) -> Topology:
        """Return the topology with all hosts of a domain as one node.

        >>> rack = Topology(num_gpus=4, num_cards=4, domain=72).as_domains()
        >>> rack.num_gpus, rack.num_cards, rack.cards_in_use(64)
        (72, 72, 64)
        """
        if self.domain <= self.num_gpus:
            return self
        num_cards = max(1, self.num_cards * self.domain // self.num_gpus)
        return replace(self, num_gpus=self.domain, num_cards=num_cards)

    def num_islands(self, num_ranks: int, num_nodes: int) -> int:
        """Return the parts of a group that only the network joins: its nodes, or domains of several
        nodes.

        >>> rack = Topology(num_gpus=4, domain=72)
        >>> [rack.num_islands(4 * n, n) for n in (1, 16, 32)], Topology().num_islands(32, 4)
        ([1, 1, 2], 4)
        """
        if self.domain <= self.num_gpus:
            return num_nodes
        nodes = max(1, self.domain // self.num_gpus)
        return min(num_ranks, -(-num_nodes // nodes))

    def node_share(self, num_ranks: int) -> float:
        """Return the share of a rank's links that it uses among ``num_ranks`` ranks of a node.

        >>> [round(Topology(joint=GpuInterconnect.MESH).node_share(n), 3) for n in (2, 3, 4)]
        [0.333, 0.667, 1.0]
        >>> [round(Topology(joint=GpuInterconnect.CUBE).node_share(n), 3) for n in (2, 4, 8)]
        [0.333, 0.667, 1.0]
        >>> [Topology(joint=GpuInterconnect.BRIDGE).node_share(n) for n in (2, 4)]
        [1.0, 0.1]
        """
        if self.joint is GpuInterconnect.BRIDGE and num_ranks > 2:
            return _PCIE_OVER_BRIDGE_FRAC
        if self.joint is GpuInterconnect.MESH:
            return min(1.0, (num_ranks - 1) / _MESH_PEERS)
        if self.joint is GpuInterconnect.CUBE:
            return min(1.0, float(np.log2(max(num_ranks, 2))) / _CUBE_OCTAVES)
        return 1.0

    def cards_in_use(self, ranks_per_node: float) -> int:
        """Return the network cards that so many ranks on a node use: those next to their own GPUs,
        on all hosts that one domain joins.

        >>> [Topology(num_cards=4).cards_in_use(n) for n in (1, 2, 4, 8)]
        [1, 1, 2, 4]
        """
        num_hosts = max(1.0, ranks_per_node / self.num_gpus) if self.domain > self.num_gpus else 1.0
        cards = self.num_cards * num_hosts
        reached = -(-ranks_per_node * cards // max(self.num_gpus * num_hosts, ranks_per_node))
        return int(min(max(reached, 1), cards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Bytes/s of a collective, measured at its largest payload."""

    ranks_per_node: float
    bytes_per_s: float
    is_far: bool
    """True out of a node, through its cards; False over the links of one rank."""
    num_steps: int = 1
    """Chunks that each rank sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLinks:
    """A topology with the rates of a rank's links and of one card."""

    topology: Topology
    node_bytes_per_s: float
    card_bytes_per_s: float


def fit_topology(
    rates: Iterable[Rate],
    prior: Topology,
    *,
    node_bytes_per_s: float,
    card_bytes_per_s: float,
    joints: Sequence[GpuInterconnect] = (),
) -> FittedLinks:
    """Fit the most probable topology: cards and joints are tried, rates are shrunk to the prior's.

    ``joints`` are those that a node of this device may have besides the prior's. Stated figures are
    fixed. Two cards of 20 GB/s are inferred from rings of 1, 2 and 8 ranks per node:

    >>> rates = [Rate(ranks_per_node=k, bytes_per_s=b, is_far=True)
    ...          for k, b in ((1, 20e9), (2, 20e9), (8, 40e9))]
    >>> found = fit_topology(rates, Topology(), node_bytes_per_s=230e9, card_bytes_per_s=22e9)
    >>> found.topology.num_cards, found.topology.origin("num_cards").value
    (2, 'measured')
    """
    measured_rates = list(rates)
    far, near = ([r for r in measured_rates if r.is_far is way] for way in (True, False))
    is_joint_open = near and prior.origin("joint") not in (Origin.SEEN, Origin.STATED)
    tried_joints = [prior.joint, *(joints if is_joint_open else ())]
    is_open = bool(far) and not prior.is_stated("num_cards")
    is_seen = prior.origin("num_cards") is Origin.SEEN
    card_sigma = (
        _CARD_SIGMA_LOG if prior.origin(CARD_RATE) is Origin.PRIOR else _SEEN_CARD_SIGMA_LOG
    )
    many = max(1, prior.num_gpus // _USUAL_GPUS)
    cards = [prior.num_cards]
    cards += [many * c for c in _CARDS if is_open and many * c != prior.num_cards]
    fits = []
    for joint, num_cards in product(tried_joints, cards):
        tried = _tried(prior, joint, num_cards)
        node_rate, node_cost = _fit_rate(near, tried, node_bytes_per_s, _RATE_SIGMA_LOG)
        card_rate, card_cost = _fit_rate(far, tried, card_bytes_per_s, card_sigma)
        cost = node_cost + card_cost
        cost += _OTHER_COST * (joint is not prior.joint)
        cost += _OTHER_COST * (1 + is_seen) * (num_cards != prior.num_cards)
        links = FittedLinks(
            topology=_with_rates(tried, near, far),
            node_bytes_per_s=node_rate,
            card_bytes_per_s=card_rate,
        )
        fits.append((cost, links))
    return min(fits, key=lambda fit: fit[0])[1]


def _tried(prior: Topology, joint: GpuInterconnect, num_cards: int) -> Topology:
    """Return a topology, with figures that differ from the prior marked as measured."""
    changed = {"joint": joint is not prior.joint, "num_cards": num_cards != prior.num_cards}
    measured = {name: Origin.MEASURED for name, is_new in changed.items() if is_new}
    return replace(prior, joint=joint, num_cards=num_cards, origins={**prior.origins, **measured})


def _with_rates(tried: Topology, near: Sequence[Rate], far: Sequence[Rate]) -> Topology:
    """Return the topology with measured rates marked as such."""
    rate_origins = {
        name: Origin.MEASURED for name, rates in ((NODE_RATE, near), (CARD_RATE, far)) if rates
    }
    return replace(tried, origins={**tried.origins, **rate_origins})


def _fit_rate(
    rates: Sequence[Rate], topology: Topology, prior_bytes_per_s: float, sigma_log: float
) -> tuple[float, float]:
    """Return the rate of one card, or of all links of a rank, shrunk to the prior, and its negative
    log probability.

    The highest rate at each number of ranks is used: others are bound by more than links.
    """
    if not rates:
        return prior_bytes_per_s, 0.0
    log_prior = np.log(prior_bytes_per_s)
    best: dict[float, float] = {}
    for rate in rates:
        log = float(np.log(rate.bytes_per_s / _links_in_use(rate, topology)))
        best[rate.ranks_per_node] = max(log, best.get(rate.ranks_per_node, log))
    logs = np.array(list(best.values()))
    mean = np.sum(logs) / _RATE_SIGMA_LOG**2 + log_prior / sigma_log**2
    mean /= len(logs) / _RATE_SIGMA_LOG**2 + 1.0 / sigma_log**2
    error = np.sqrt(1.0 + ((logs - mean) / _RATE_SIGMA_LOG) ** 2) - 1.0
    cost = float(np.sum(error) + 0.5 * ((mean - log_prior) / sigma_log) ** 2)
    return float(np.exp(mean)), cost


def _links_in_use(rate: Rate, topology: Topology) -> float:
    """Return the cards of a node, or the share of a rank's links less the cost of its own chunk."""
    if rate.is_far:
        return topology.cards_in_use(rate.ranks_per_node)
    share = topology.node_share(round(rate.ranks_per_node))
    return share / (1.0 + LOCAL_COPY_CHUNKS * share / rate.num_steps)
