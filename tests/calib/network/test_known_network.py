"""Facts about nodes reach the price of a transfer: by name, detected, stated, measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.calib.network.cluster import (
    detected_network,
    known_network,
    link_figures,
    network_line,
    nodes_network,
)
from forerun.calib.network.collective_times import expected_time, fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.network.nccl_tuner import Algorithm, LinkClass, Wire
from forerun.calib.network.systems import NetworkPrior, network_prior
from forerun.calib.records.cluster import Cluster, Origin, SeenNode, StatedNodes
from forerun.calib.workload.collectives import Collective

H100, GB200, GB300 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200", "NVIDIA GB300"
NODE = SeenNode(num_local_ranks=8, num_gpus=8, num_cards=8, card_bytes_per_s=50e9, wire="roce")
LARGE = np.array([2.0**30])


def links_of(prior: NetworkPrior) -> LinkClass:
    assert prior.links is not None
    return prior.links


def time_s(prior: NetworkPrior, num_ranks: int, num_nodes: int, kind: Collective) -> float:
    group = Group(collective=kind, num_ranks=num_ranks, num_nodes=num_nodes)
    model = fit_transfers({}, prior)
    return float(np.exp(model.estimate(group, LARGE).log_time[0]))


def all_reduce_s(prior: NetworkPrior, num_ranks: int, num_nodes: int) -> float:
    return time_s(prior, num_ranks, num_nodes, Collective.ALL_REDUCE)


def test_nothing_known_is_what_is_usual() -> None:
    for device in (H100, "NVIDIA A100-SXM4-80GB", "cpu", "Accelerator 9"):
        assert known_network(device, Cluster()) == network_prior(device)


def test_a_rack_is_one_node_whichever_way_it_is_counted() -> None:
    """Eight ranks on two hosts of a rack: by host, and with the rack as the node."""
    by_host = nodes_network(GB200, Cluster())
    by_rack = known_network(GB200, Cluster())
    assert all_reduce_s(by_host, 8, 2) == pytest.approx(all_reduce_s(by_rack, 8, 1))
    # Without the domain the same eight go through four cards of each host.
    alone = known_network(GB200, Cluster(stated=StatedNodes(domain=4)))
    gather_s = [time_s(one, 8, n, Collective.ALL_GATHER) for one, n in ((alone, 2), (by_rack, 1))]
    assert gather_s[0] > 3 * gather_s[1]


def test_between_racks_every_gpu_has_its_card() -> None:
    links = links_of(known_network(GB200, Cluster()))
    group = Group(collective=Collective.ALL_GATHER, num_ranks=128, num_nodes=2)
    assert links.card_bytes_per_s(group) == pytest.approx(45e9)
    # Two fast cards of DGX B300 and GB300 are one of twice the rate of those before.
    faster = links_of(known_network(GB300, Cluster()))
    assert faster.card_bytes_per_s(group) == 2 * links.card_bytes_per_s(group)


def test_a_rack_that_the_driver_denies_is_hosts() -> None:
    host = SeenNode(num_local_ranks=4, num_gpus=4, fabric="none")
    topology = links_of(known_network(GB200, Cluster(seen=(host,)))).topology
    assert (topology.domain, topology.num_gpus, topology.num_cards) == (4, 4, 4)
    assert topology.origin("domain") is Origin.SEEN


@pytest.mark.parametrize(("num_cards", "used"), [(8, 8), (10, 8), (16, 16), (2, 2), (1, 1)])
def test_cards_that_are_left_over_serve_something_else(num_cards: int, used: int) -> None:
    node = replace(NODE, num_cards=num_cards)
    topology = links_of(detected_network(node, network_prior(H100))).topology
    assert topology.num_cards == used
    assert topology.origin("num_cards") is Origin.SEEN


def test_a_quarter_of_the_cards_is_four_times_the_time() -> None:
    few = known_network(H100, Cluster(seen=(replace(NODE, num_cards=2),)))
    many = known_network(H100, Cluster(seen=(NODE,)))
    gathered = [time_s(prior, 16, 2, Collective.ALL_GATHER) for prior in (few, many)]
    assert gathered[0] / gathered[1] == pytest.approx(4.0, rel=0.1)


def test_a_slot_bounds_its_card() -> None:
    node = replace(NODE, card_pcie_bytes_per_s=31.5e9)
    link_class = links_of(detected_network(node, network_prior(H100)))
    assert link_class.network_bytes_per_s == pytest.approx(0.9 * 31.5e9)


def test_sockets_are_slow_and_open() -> None:
    node = replace(NODE, num_cards=1, card_bytes_per_s=12.5e9, wire="socket")
    link_class = links_of(detected_network(node, network_prior(H100)))
    assert link_class.network_bytes_per_s < 5e9
    assert link_class.topology.origin("card_bytes_per_s") is Origin.PRIOR
    slow = links_of(detected_network(replace(node, card_bytes_per_s=1.25e9), network_prior(H100)))
    assert slow.network_bytes_per_s == pytest.approx(0.9 * 1.25e9)


def test_what_is_stated_goes_before_what_is_seen() -> None:
    cluster = Cluster(seen=(NODE,), stated=StatedNodes(num_cards=4, card_bytes_per_s=20e9))
    link_class = links_of(known_network(H100, cluster))
    assert (link_class.topology.num_cards, link_class.network_bytes_per_s) == (4, 20e9)
    assert link_class.topology.origin("num_cards") is Origin.STATED
    assert link_class.topology.origin("num_gpus") is Origin.SEEN


def prior_with(**variables: str) -> NetworkPrior:
    node = replace(NODE, variables=tuple(f"{n}={v}" for n, v in variables.items()))
    return detected_network(node, network_prior(H100))


def test_nccls_variables_take_ways_away() -> None:
    usual, ring = prior_with(), prior_with(NCCL_ALGO="Ring")
    assert links_of(prior_with(NCCL_NVLS_ENABLE="0")).nvls_bytes_per_s == 0.0
    assert all_reduce_s(prior_with(NCCL_NVLS_ENABLE="0"), 8, 1) > all_reduce_s(usual, 8, 1)
    assert all_reduce_s(prior_with(NCCL_ALGO="^NVLS"), 8, 1) > all_reduce_s(usual, 8, 1)
    assert Algorithm.TREE in links_of(ring).without
    # Small payloads over many nodes need a tree: 2 (n - 1) hops without it.
    group = Group(collective=Collective.ALL_REDUCE, num_ranks=512, num_nodes=64)
    short = np.array([1024.0])
    with_tree, without = (expected_time(group, prior) for prior in (usual, ring))
    assert with_tree is not None and without is not None
    assert without(short)[0] > 3 * with_tree(short)[0]


@pytest.mark.parametrize("text", ["", "magic", "allreduce:ring;allgather:ring", "^", ","])
def test_a_list_that_says_nothing_leaves_all(text: str) -> None:
    assert links_of(prior_with(NCCL_ALGO=text)).without == ()


def test_with_one_way_left_everything_still_has_a_price() -> None:
    for algorithm in ("Tree", "NVLS", "^Ring"):
        prior = prior_with(NCCL_ALGO=algorithm, NCCL_PROTO="LL")
        for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL):
            for num_ranks, num_nodes in ((2, 1), (8, 1), (2, 2), (64, 8)):
                assert time_s(prior, num_ranks, num_nodes, kind) > 0.0
        samples = Samples(nbytes=LARGE, time_s=np.array([0.02]), weight=np.ones(1))
        seen = Group(collective=Collective.ALL_REDUCE, num_ranks=16, num_nodes=2)
        model = fit_transfers({seen: samples}, prior)
        wider = replace(seen, num_ranks=64, num_nodes=4)
        assert np.isfinite(model.estimate(wider, LARGE).log_time).all()


def test_gpus_without_nvlink_are_priced_by_their_slots() -> None:
    """Two public figures: rings of A40 over PCIe 4 reach 20 GB/s."""
    node = replace(NODE, joint="pcie", gpu_pcie_bytes_per_s=31.5e9)
    for prior in (
        detected_network(node, network_prior("NVIDIA A100 80GB PCIe")),
        prior_with(NCCL_P2P_DISABLE="1"),
    ):
        assert links_of(prior).wire is Wire.PCIE and not links_of(prior).nvls_bytes_per_s
    links = links_of(detected_network(node, network_prior("NVIDIA A100 80GB PCIe")))
    assert links.node_bytes_per_s == pytest.approx(20e9, rel=0.02)


def test_fewer_channels_carry_less() -> None:
    usual, half = links_of(prior_with()), links_of(prior_with(NCCL_MAX_NCHANNELS="8"))
    assert half.num_channels == 8
    assert half.node_bytes_per_s == pytest.approx(0.5 * usual.node_bytes_per_s)
    assert links_of(prior_with(NCCL_MAX_NCHANNELS="64")) == usual


def ring(num_ranks: int, num_nodes: int, bus_bytes_per_s: float) -> tuple[Group, Samples]:
    group = Group(collective=Collective.ALL_GATHER, num_ranks=num_ranks, num_nodes=num_nodes)
    nbytes = 2.0 ** np.arange(24, 31)
    times = 50e-6 + (num_ranks - 1) / num_ranks * nbytes / bus_bytes_per_s
    return group, Samples(nbytes=nbytes, time_s=times, weight=np.ones(len(nbytes)))


def test_one_slow_ring_does_not_take_cards_away_that_were_seen() -> None:
    """All ranks of two nodes together reach half of what one of each would let expect."""
    measured = dict([ring(2, 2, 45e9), ring(16, 2, 180e9)])
    by_name, by_topology = (
        links_of(fit_transfers(measured, prior).fitted_prior).topology.num_cards
        for prior in (network_prior(H100), known_network(H100, Cluster(seen=(NODE,))))
    )
    assert (by_name, by_topology) == (4, 8)


def test_much_that_was_measured_goes_before_what_was_seen() -> None:
    """Ten cards were shown, of which two carry: four rings of other ranks a node all say so."""
    measured = dict([ring(2 * k, 2, 45e9 * min(k, 8) / 4 if k > 3 else 45e9) for k in (1, 2, 4, 8)])
    network_prior = fit_transfers(measured, known_network(H100, Cluster(seen=(NODE,)))).fitted_prior
    assert links_of(network_prior).topology.num_cards < 8
    assert links_of(network_prior).topology.origin("num_cards") is Origin.MEASURED


def test_the_line_says_where_each_figure_comes_from() -> None:
    seen = known_network(H100, Cluster(seen=(NODE,)))
    assert network_line(seen) == (
        "network: 8 cards of 45 GB/s for 8 GPUs (seen), NVLink domain 8 (prior)"
    )
    stated = known_network(GB200, Cluster(stated=StatedNodes(domain=36)))
    assert network_line(stated) == (
        "network: 36 cards of 45 GB/s for 36 GPUs (prior), NVLink domain 36 (stated)"
    )
    assert network_line(network_prior("cpu")) == "" and link_figures(network_prior("cpu")) == {}
    assert link_figures(seen)["num_cards"].origin == "seen"
