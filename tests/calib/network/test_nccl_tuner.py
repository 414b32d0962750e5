"""NCCL's cost model: hand-counted latencies, ring bounds, and what public tables print."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.network.groups import Group
from forerun.calib.network.nccl_tuner import (
    Algorithm,
    Architecture,
    LinkClass,
    Protocol,
    Wire,
    tuner_costs,
    tuner_time_s,
)
from forerun.calib.network.systems import network_prior
from forerun.calib.workload.collectives import Collective

LINK = LinkClass(
    wire=Wire.NVLINK,
    generation=Architecture.AMPERE,
    num_channels=24,
    node_bytes_per_s=230e9,
    network_bytes_per_s=25e9,
)
SMALL, GIB = np.array([64.0]), np.array([2.0**30])
US = 1e-6


def _group(collective: Collective, ranks: int, nodes: int) -> Group:
    return Group(collective=collective, num_ranks=ranks, num_nodes=nodes)


def _latency_us(collective: Collective, ranks: int, nodes: int, *option: object) -> float:
    cost = tuner_costs(_group(collective, ranks, nodes), np.array([8.0]), LINK)[option]  # type: ignore[index]
    return float(np.max(cost.latency_s)) / US


@pytest.mark.parametrize(
    ("collective", "ranks", "nodes", "option", "latency_us"),
    [
        (Collective.ALL_REDUCE, 8, 1, (Algorithm.RING, Protocol.LL), 6.6 + 14 * 0.6),
        (Collective.ALL_GATHER, 8, 1, (Algorithm.RING, Protocol.SIMPLE), 8.4 + 7 * 3.4),
        (Collective.ALL_REDUCE, 32, 8, (Algorithm.TREE, Protocol.LL), 6.8 + 2 * (3 * 0.6 + 3 * 5)),
        # Between nodes a local step takes at least the posting of a transfer, 1 us.
        (Collective.ALL_GATHER, 16, 2, (Algorithm.RING, Protocol.LL), 6.6 + 14 * 1.0 + 2.7),
        # NCCL 2.28.9 on two nodes of eight A100, under NCCL_DEBUG_SUBSYS=TUNING.
        (Collective.ALL_REDUCE, 16, 2, (Algorithm.RING, Protocol.LL128), 75.2),
        (Collective.ALL_REDUCE, 16, 2, (Algorithm.TREE, Protocol.LL128), 48.5),
    ],
)
def test_latencies_are_those_counted_by_hand(collective, ranks, nodes, option, latency_us) -> None:
    assert _latency_us(collective, ranks, nodes, *option) == pytest.approx(latency_us)


@pytest.mark.parametrize("nodes", [1, 4])
def test_large_payloads_take_the_bytes_of_the_busiest_link(nodes: int) -> None:
    ranks = 8 * nodes
    bus = LINK.node_bytes_per_s if nodes == 1 else 8 * LINK.network_bytes_per_s
    ring = {Collective.ALL_REDUCE: 2, Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1}
    for collective, passes in ring.items():
        nbytes = 1024 * GIB
        least = passes * (ranks - 1) / ranks * nbytes / bus
        values = tuner_time_s(_group(collective, ranks, nodes), nbytes, LINK)
        assert values == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize(
    ("device", "bus_giga"),
    # nccl-tests on one node of eight, 1 GiB: DGX A100; H100 with the reducing switch.
    [("NVIDIA A100-SXM4-80GB", 230), ("NVIDIA H100 80GB HBM3", 475)],
)
def test_priors_are_near_what_nccl_tests_prints(device: str, bus_giga: float) -> None:
    links = network_prior(device).links
    assert links is not None
    time_s = tuner_time_s(_group(Collective.ALL_REDUCE, 8, 1), GIB, links)
    assert 1.75 * GIB / time_s / 1e9 == pytest.approx(bus_giga, rel=0.08)


def test_flags_in_every_128_bytes_are_used_between_latency_and_bandwidth() -> None:
    """NCCL has LL128 where NVLink joins a node: it is the cheapest way of medium payloads over many
    nodes, and there is none over PCIe."""
    gather = _group(Collective.ALL_GATHER, 256, 32)
    costs = tuner_costs(gather, 64.0 * GIB / 1024, LINK)
    assert min(costs, key=lambda way: float(costs[way].time_s(64.0 * GIB / 1024)[0])) == (
        Algorithm.RING,
        Protocol.LL128,
    )
    over_pcie = tuner_costs(gather, GIB, replace(LINK, wire=Wire.PCIE))
    assert Protocol.LL128 not in {protocol for _, protocol in over_pcie}


def test_the_reducing_switch_serves_large_groups_only() -> None:
    links = network_prior("h100").links
    assert links is not None
    for ranks, is_used in ((4, False), (8, True)):
        costs = tuner_costs(_group(Collective.ALL_REDUCE, ranks, 1), GIB, links)
        assert ((Algorithm.NVLS, Protocol.SIMPLE) in costs) is is_used


def test_one_rank_moves_nothing() -> None:
    assert tuner_time_s(_group(Collective.ALL_REDUCE, 1, 1), SMALL, LINK).tolist() == [0.0]


@given(
    collective=st.sampled_from([c for c in Collective if c is not Collective.OTHER]),
    per_node=st.sampled_from([1, 2, 4, 8]),
    log_nodes=st.integers(0, 8),
    log_nbytes=st.floats(0.0, 34.0),
)
def test_the_cheapest_pair_is_taken_and_nothing_is_free(
    collective: Collective, per_node: int, log_nodes: int, log_nbytes: float
) -> None:
    nodes = 2**log_nodes
    ranks = per_node * nodes
    if ranks < 2:
        return
    nbytes = np.array([2.0**log_nbytes])
    costs = tuner_costs(_group(collective, ranks, nodes), nbytes, LINK).values()
    result = tuner_time_s(_group(collective, ranks, nodes), nbytes, LINK)[0]
    assert result == min(float(cost.time_s(nbytes)[0]) for cost in costs)
    assert result > 3e-6


@given(
    collective=st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER]),
    log_nbytes=st.floats(3.0, 34.0),
)
def test_more_nodes_never_take_less_time(collective: Collective, log_nbytes: float) -> None:
    nbytes = np.array([2.0**log_nbytes])
    times = [tuner_time_s(_group(collective, 8 * n, n), nbytes, LINK)[0] for n in (2, 4, 8, 16, 64)]
    assert np.all(np.diff(times) >= -1e-12)
