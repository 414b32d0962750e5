"""The page on clusters says what a cluster file is: its example is taken, its keys are all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.calib.network.cluster import known_network
from forerun.calib.records.cluster import KEYS, Cluster, GpuInterconnect
from forerun.hooks.process.node_topology import VARIABLES
from forerun.launch.options.flags import read_cluster

pytestmark = pytest.mark.nightly

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")


def test_the_example_is_a_cluster_file(tmp_path: Path) -> None:
    (example,) = re.findall(r"^    \{\n(?:      .*\n)+    \}$", PAGE, flags=re.MULTILINE)
    path = tmp_path / "cluster.json"
    path.write_text(example)
    stated = read_cluster(path)
    assert stated is not None and set(stated.values) == set(KEYS)
    links = known_network("NVIDIA GB200", Cluster(stated=stated)).links
    assert links is not None and links.topology.domain == 72


def test_every_key_and_joint_is_told() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, flags=re.MULTILINE)
    assert {name for name, _ in rows} == set(KEYS)
    assert re.findall(r"`(\w+)`", dict(rows)["joint"]) == [joint.value for joint in GpuInterconnect]


def test_variables_that_are_named_are_kept() -> None:
    named = set(re.findall(r"`(NCCL_\w+)`", PAGE))
    assert named <= set(VARIABLES) and len(named) > 10
