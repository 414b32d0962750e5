"""FSDP2, HSDP and DDP on four real ranks: all collectives and bytes, as PyTorch counts them.

What FSDP calls, and with how many bytes, only real ranks of it tell.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import plain_groups as script
import pytest
from launched import torchrun

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, PhaseRecord
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import Phase

pytestmark = pytest.mark.slow
HOOKED = 4
LAYER_NBYTES = (script.WIDTH + 1) * script.WIDTH * 4
_NAMES = {
    "_allgather_base_": Collective.ALL_GATHER,
    "_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "allreduce_": Collective.ALL_REDUCE,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("groups")
    return torchrun(directory, script.__file__, directory, num_ranks=4).stdout, directory


def printed_counts(output: str, kind: str) -> str:
    match = re.search(rf"TOLD {kind} (.*)", output)
    assert match is not None
    return match[1]


def calls(run: RunRecords, rank: int) -> list[CollectiveRecord]:
    return [r for r in run.records[rank] if isinstance(r, CollectiveRecord)]


@pytest.mark.parametrize("kind", ["fsdp2", "hsdp"])
def test_shards_travel_as_often_as_pytorch_counts(trained: tuple[str, Path], kind: str) -> None:
    counts = dict(re.findall(r"(\w+)=(\d+)", printed_counts(trained[0], kind)))
    run = read_run(trained[1] / kind)
    for rank in range(4):
        seen = Counter((c.step, c.collective) for c in calls(run, rank))
        steps = {step for step, _ in seen}
        assert len(steps) == HOOKED
        expected = {(s, _NAMES[n]): int(number) for s in steps for n, number in counts.items()}
        assert seen == expected


def test_hybrid_shards_have_two_groups_each_with_its_bytes(trained: tuple[str, Path]) -> None:
    run = read_run(trained[1] / "hsdp")
    for rank, (shard, copies) in enumerate((((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)))):
        assert {(c.collective, c.role, c.ranks, c.nbytes) for c in calls(run, rank)} == {
            (Collective.ALL_GATHER, GroupRole.DP, shard, LAYER_NBYTES),
            (Collective.REDUCE_SCATTER, GroupRole.DP, shard, LAYER_NBYTES),
            (Collective.ALL_REDUCE, GroupRole.DP_INSTANCES, copies, LAYER_NBYTES // 2),
        }


def test_another_equal_mesh_of_the_same_process_has_groups_of_its_own(
    trained: tuple[str, Path],
) -> None:
    """DTensor keeps one of two equal meshes, so that weights name the groups of the first."""
    first, second = (calls(read_run(trained[1] / kind), 0) for kind in ("hsdp", "hsdp-again"))
    assert {(c.role, c.ranks) for c in first} == {(c.role, c.ranks) for c in second}
    assert not {c.group for c in first} & {c.group for c in second}


def test_buckets_of_ddp_are_those_that_it_has_built(trained: tuple[str, Path]) -> None:
    sizes = [
        int(size) for size in printed_counts(trained[0], "ddp").removeprefix("buckets=").split(",")
    ]
    assert len(sizes) > 1
    run = read_run(trained[1] / "ddp")
    for rank in range(4):
        collective_records = calls(run, rank)
        assert {(c.collective, c.role, c.ranks) for c in collective_records} == {
            (Collective.ALL_REDUCE, GroupRole.DP, (0, 1, 2, 3))
        }
        for step in {c.step for c in collective_records}:
            assert [c.nbytes for c in collective_records if c.step == step] == sizes
            assert [c.is_bound for c in collective_records if c.step == step] == [
                *[True] * (len(sizes) - 1),
                False,
            ]


def test_what_ddp_waits_for_is_no_work_of_the_backward_pass(trained: tuple[str, Path]) -> None:
    run = read_run(trained[1] / "ddp")
    passes = [
        r for r in run.records[0] if isinstance(r, PhaseRecord) and r.name == "backward-compute"
    ]
    assert len(passes) == HOOKED and all(0 < p.wait_ns < p.duration_ns for p in passes)
    operators_ns = sum(
        r.duration_ns
        for r in run.records[0]
        if isinstance(r, OperatorRecord) and r.phase is Phase.BACKWARD
    )
    assert operators_ns <= sum(p.duration_ns - p.wait_ns for p in passes)


@pytest.mark.parametrize(("kind", "groups"), [("fsdp2", 1), ("hsdp", 2), ("ddp", 1)])
def test_plain_loops_have_groups_in_the_sample_table(
    trained: tuple[str, Path], kind: str, groups: int
) -> None:
    rows = build_table(read_run(trained[1] / kind)).collectives
    assert len(set(zip(rows["role"], rows["num_ranks"], strict=True))) == groups
    assert not rows["is_bound"].all()
