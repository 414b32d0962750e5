"""Facts about nodes: precedence of their sources, and the cost of a damaged line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.records.cluster import (
    KEYS,
    Cluster,
    Origin,
    SeenNode,
    StatedNodes,
    joined_clusters,
    stated_nodes,
)
from forerun.calib.workload.parallelism import Parallelism

GB200, H100 = "NVIDIA GB200", "NVIDIA H100 80GB HBM3"
HOST = SeenNode(num_ranks=16, num_local_ranks=4, num_gpus=4)


def rack(*fabrics: str, **variables: str) -> Cluster:
    """Hosts of four ranks, each in a domain of the name."""
    settings = tuple(f"{name}={value}" for name, value in variables.items())
    return Cluster(seen=tuple(replace(HOST, fabric=f, variables=settings) for f in fabrics))


@pytest.mark.parametrize(
    ("cluster", "device", "domain", "origin"),
    [
        (Cluster(), H100, 0, Origin.PRIOR),
        (Cluster(), GB200, 72, Origin.PRIOR),
        (rack("a/1", "a/1", "a/1", "a/1"), GB200, 72, Origin.SEEN),
        # Two racks of two hosts each, all four are told: eight ranks are joined.
        (rack("a/1", "a/1", "a/2", "a/2"), GB200, 8, Origin.SEEN),
        (rack("a/1", "a/2"), GB200, 72, Origin.SEEN),  # half of the hosts: nobody knows
        (rack("none", "none"), GB200, 0, Origin.SEEN),
        (rack("a/1", NCCL_MNNVL_ENABLE="0"), GB200, 0, Origin.SEEN),
        (rack("a/1", "a/1", "a/1", "a/1"), "Accelerator 9", 16, Origin.SEEN),
        (replace(rack("none"), stated=StatedNodes(domain=36)), GB200, 36, Origin.STATED),
    ],
)
def test_domains_are_stated_seen_or_usual(
    cluster: Cluster, device: str, domain: int, origin: Origin
) -> None:
    assert cluster.domain(device) == (domain, origin)


def test_layouts_count_domains_as_nodes() -> None:
    four = Parallelism(dp=16, ranks_per_node=4)
    assert rack("a/1").with_domain_nodes(four, GB200).ranks_per_node == 72
    assert rack("none").with_domain_nodes(four, GB200) == four
    assert rack("none").with_domain_nodes(four, H100) == four
    open_ = replace(four, ranks_per_node=0)
    assert Cluster().with_domain_nodes(open_, H100) == open_
    assert Cluster().with_domain_nodes(open_, GB200).ranks_per_node == 72
    assert (
        Cluster(stated=StatedNodes(num_gpus=8)).with_domain_nodes(open_, H100).ranks_per_node == 8
    )
    # Jobs over several racks use 64 GPUs of each; what is stated is taken as it is.
    many = replace(four, dp=256)
    stated = Cluster(stated=StatedNodes(domain=72))
    assert Cluster().with_domain_nodes(many, GB200).ranks_per_node == 64
    assert stated.with_domain_nodes(many, GB200).ranks_per_node == 72


def test_joining_twice_is_joining_once_and_another_word_is_heard() -> None:
    seen = rack("a/1")
    once = seen.with_domain_nodes(Parallelism(dp=16, ranks_per_node=4), GB200)
    assert seen.with_domain_nodes(once, GB200) == once
    stated = replace(seen, stated=StatedNodes(domain=4))
    assert stated.with_domain_nodes(once, GB200).ranks_per_node == 4


def test_the_usual_node_speaks_for_all() -> None:
    odd = replace(HOST, num_cards=1)
    assert Cluster(seen=(odd, HOST, replace(HOST, fabric="x/1"))).node == HOST


nodes = st.builds(
    SeenNode,
    num_gpus=st.integers(0, 16),
    card_bytes_per_s=st.floats(0, 1e12),
    gpu_numa=st.tuples(st.integers(0, 3)),
    fabric=st.text(max_size=8),
    variables=st.tuples(st.text(max_size=8)),
)
stated = st.builds(
    StatedNodes,
    joint=st.none() | st.sampled_from(("switch", "mesh", "cube", "pcie")),
    domain=st.none() | st.integers(1, 576),
    card_bytes_per_s=st.none() | st.floats(1, 1e12),
)


@given(st.builds(Cluster, seen=st.lists(nodes, max_size=3).map(tuple), stated=stated))
def test_what_is_written_is_read_back(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "text",
        {"seen": 3, "stated": 4},
        {"seen": [None, 1, {"num_gpus": "eight"}], "stated": {"joint": "torus"}},
        {"seen": [{"num_gpus": -8}], "stated": {"newer": 1}},
    ],
)
def test_what_is_damaged_is_not_told(damaged: object) -> None:
    assert Cluster.from_json(damaged) == Cluster()


def test_a_newer_version_may_tell_more() -> None:
    cluster = Cluster.from_json({"seen": [{"num_gpus": 8, "num_lasers": 2}]})
    assert cluster.node == SeenNode(num_gpus=8)


def test_parts_of_ranks_are_put_together() -> None:
    parts = [Cluster(), rack("a/1"), replace(rack("a/1"), stated=StatedNodes(num_cards=2))]
    whole = joined_clusters(parts)
    assert len(whole.seen) == 2 and whole.stated.num_cards == 2


@pytest.mark.parametrize("wrong", [{"nics": 4}, {"domain": 0}, {"num_gpus": 2.5}, {"joint": []}])
def test_a_wrong_value_is_named_with_the_rule(wrong: dict[str, object]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=name) as err:
        stated_nodes(wrong)
    assert name not in KEYS or repr(value) in str(err.value)
