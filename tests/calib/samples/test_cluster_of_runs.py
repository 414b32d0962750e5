"""Ranks' reports about their nodes reach the table, and the layouts that are counted by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.cluster import LINKS, Cluster, SeenNode, StatedNodes
from forerun.calib.records.record_kinds import Header, from_dict, parse_header, to_dict
from forerun.calib.samples.store import RunReader, read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import Batch, Parallelism, RunConfig
from tests.calib.samples.conftest import header

HOST = SeenNode(num_ranks=8, num_local_ranks=4, num_gpus=4, num_cards=4)


def table(config: RunConfig, device: str, cluster: Cluster) -> SampleTable:
    layout = Parallelism(dp=8, ranks_per_node=4)
    batch = Batch(micro_batch_size=1, global_batch_size=8)
    ran = replace(config, device=device, parallelism=layout, batch=batch)
    return build_table(
        RunRecords(
            run_id="run-a",
            headers={0: header(0, world_size=8, cluster=cluster.to_json())},
            configs={
                0: replace(ran, parallelism=cluster.with_domain_nodes(ran.parallelism, device))
            },
            records={0: ()},
        )
    )


def test_a_header_of_another_version_is_read() -> None:
    current = header(0, cluster=Cluster(seen=(HOST,)).to_json())
    value = to_dict(current)
    assert from_dict(value) == current
    older = {name: content for name, content in value.items() if name != "cluster"}
    record = from_dict(older)
    assert isinstance(record, Header) and record.cluster == {}
    newer = parse_header(
        '{"type": "header", "schema": 1, "run_id": "r", "rank": 0, "world_size": 1, "device": "",'
        ' "created_by": "", "started_unix_s": 1.0, "cluster": {"lasers": 3}, "more": []}'
    )
    assert Cluster.from_json(newer.cluster) == Cluster()


def test_the_table_holds_what_was_seen(config: RunConfig) -> None:
    cluster = Cluster(seen=(HOST,), stated=StatedNodes(num_cards=2))
    result = table(config, "NVIDIA H100 80GB HBM3", cluster)
    assert result.cluster() == cluster
    assert result.config().parallelism.ranks_per_node == 4


@pytest.mark.parametrize(
    ("fabric", "domain", "per_node"), [("", None, 72), ("none", None, 4), ("none", 36, 36)]
)
def test_a_layout_counts_domains_as_nodes(
    config: RunConfig, fabric: str, domain: int | None, per_node: int
) -> None:
    cluster = Cluster(seen=(replace(HOST, fabric=fabric),), stated=StatedNodes(domain=domain))
    result = table(config, "NVIDIA GB200", cluster)
    assert result.config().parallelism.ranks_per_node == per_node


def test_what_is_said_later_goes_before(config: RunConfig) -> None:
    first = table(config, "NVIDIA GB200", Cluster(seen=(HOST,)))
    later = first.with_stated(StatedNodes(domain=4, num_cards=1))
    assert later.cluster().stated == StatedNodes(domain=4, num_cards=1)
    assert later.cluster().seen == (HOST,)
    assert later.config().parallelism.ranks_per_node == 4
    restated = later.with_stated(StatedNodes())
    assert restated.config() == first.config() and restated.cluster() == first.cluster()


@pytest.mark.parametrize(
    ("text", "joint", "fabrics"),
    [
        ('{"seen": [{"num_gpus": 4, "joint": "mesh", "fabric": "a/1"}]}', "mesh", ["", "a/1"]),
        ('{"seen": [{"fabric": "none"}]}', "", ["", "none"]),
        ('{"seen": [{"lasers": 3}], "more": []}', "", ["", ""]),
        ("7", "", ["", ""]),
        ("[", "", ["", ""]),
    ],
)
def test_links_that_the_companion_read_reach_the_table(
    text: str, joint: str, fabrics: list[str], tmp_path: Path
) -> None:
    """Two hosts of two ranks; the companion is beside the last rank."""
    folder = tmp_path / "records" / "run-a"
    folder.mkdir(parents=True)
    node = replace(HOST, num_ranks=4, num_local_ranks=2)
    for rank in range(4):
        seen = Cluster(seen=(node,)).to_json() if rank % 2 == 0 else {}
        line = json.dumps(to_dict(header(rank, world_size=4, cluster=seen)))
        (folder / f"rank-{rank:05d}.jsonl").write_text(line + "\n")
    reader = RunReader(tmp_path, "run-a")
    assert reader.read().run.cluster.node.joint == ""
    (folder / LINKS).write_text(text)
    for run in (read_run(tmp_path), reader.read().run):
        assert run.cluster.node == replace(node, joint=joint)
        assert [seen.fabric for seen in run.cluster.seen] == fabrics
