"""Cards and joints of nodes: planted ones are found again, and what a user states stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.network._topology import Rate, Topology, fit_topology
from forerun.calib.records.cluster import GpuInterconnect, Origin

CARD, NODE = 22e9, 230e9


def _far(topology: Topology, card: float, *ranks_per_node: int) -> list[Rate]:
    return [
        Rate(ranks_per_node=k, bytes_per_s=card * topology.cards_in_use(k), is_far=True)
        for k in ranks_per_node
    ]


def _near(topology: Topology, node: float, *ranks: int) -> list[Rate]:
    return [
        Rate(
            ranks_per_node=n,
            bytes_per_s=node * topology.node_share(n),
            is_far=False,
            num_steps=2 * (n - 1),
        )
        for n in ranks
    ]


@pytest.mark.parametrize("num_cards", [1, 2, 4, 8])
def test_cards_come_back_from_rings_of_one_to_eight_ranks_a_node(num_cards: int) -> None:
    truth = Topology(num_cards=num_cards)
    rates = _far(truth, 18e9, 1, 2, 4, 8)
    links = fit_topology(rates, Topology(), node_bytes_per_s=NODE, card_bytes_per_s=CARD)
    assert links.topology.num_cards == num_cards
    assert links.card_bytes_per_s == pytest.approx(18e9, rel=0.05)
    is_new = num_cards != 8
    assert links.topology.origin("num_cards") is (Origin.MEASURED if is_new else Origin.PRIOR)


def test_a_pair_at_a_third_of_the_links_is_a_mesh() -> None:
    """Four A100 without a switch: all-reduces of two reach 73 GB/s, of four 208 (Perlmutter)."""
    for rate, joint in ((73e9, GpuInterconnect.MESH), (195e9, GpuInterconnect.SWITCH)):
        pair = [Rate(ranks_per_node=2, bytes_per_s=rate, is_far=False, num_steps=2)]
        links = fit_topology(
            pair,
            Topology(),
            node_bytes_per_s=NODE,
            card_bytes_per_s=CARD,
            joints=(GpuInterconnect.MESH,),
        )
        assert links.topology.joint is joint


def test_joints_that_a_device_has_not_are_not_tried() -> None:
    pair = [Rate(ranks_per_node=2, bytes_per_s=73e9, is_far=False, num_steps=2)]
    links = fit_topology(pair, Topology(), node_bytes_per_s=NODE, card_bytes_per_s=CARD)
    assert links.topology.joint is GpuInterconnect.SWITCH


def test_what_was_stated_is_not_overruled() -> None:
    stated = replace(Topology(num_cards=4), origins={"num_cards": Origin.STATED})
    rates = _far(Topology(num_cards=1), 18e9, 1, 2, 4, 8)
    links = fit_topology(rates, stated, node_bytes_per_s=NODE, card_bytes_per_s=CARD)
    assert links.topology.num_cards == 4
    assert links.topology.origin("num_cards") is Origin.STATED


def test_without_rates_all_is_as_before() -> None:
    links = fit_topology([], Topology(), node_bytes_per_s=NODE, card_bytes_per_s=CARD)
    assert links.topology == Topology()
    assert (links.node_bytes_per_s, links.card_bytes_per_s) == (NODE, CARD)


def test_a_mesh_gives_ranks_of_a_node_more_links() -> None:
    mesh = Topology(joint=GpuInterconnect.MESH)
    links = fit_topology(
        _near(mesh, 220e9, 2, 4),
        Topology(),
        node_bytes_per_s=NODE,
        card_bytes_per_s=CARD,
        joints=(GpuInterconnect.MESH,),
    )
    assert links.topology.joint is GpuInterconnect.MESH
