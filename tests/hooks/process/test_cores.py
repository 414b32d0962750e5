"""Who takes which cores: programs that were really pinned, and masks of larger nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from forerun.hooks.process.cores import spare_cores

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or not {0, 1} <= os.sched_getaffinity(0),
    reason="needs Linux, and cores 0 and 1",
)
RANK = """
import json, logging, os, sys, threading, time
from pathlib import Path
from forerun.calib.records.record_kinds import SCHEMA, Header
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording.writer import RecordWriter

header = Header(schema=SCHEMA, run_id="r", rank=0, world_size=1, created_by="test", device="cpu",
                started_unix_s=1.0)
seen, guard, is_seen = [], Guard(), threading.Event()
def look():
    seen.append(sorted(os.sched_getaffinity(0)))
    is_seen.set()
sys.stdin.readline()  # all ranks are there
writer = RecordWriter(Path("."), lambda: header, guard, on_idle=look)
writer.wake()
assert is_seen.wait(20)
print(json.dumps({"writer": seen[0], "training": sorted(os.sched_getaffinity(os.getpid())),
                  "faults": guard.num_faults}), flush=True)
sys.stdin.readline()  # all ranks have looked
"""
LAUNCHER = """
import json, os, subprocess, sys
given, masks, environ = json.loads(sys.argv[1])
def start(number, mask):
    return subprocess.Popen(
        [sys.executable, "-c", sys.argv[2]], text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(len(masks)),
             **environ},
        preexec_fn=lambda: os.sched_setaffinity(0, mask))
os.sched_setaffinity(0, given)
ranks = [start(number, mask) for number, mask in enumerate(masks)]
answers = []
for rank in ranks:
    rank.stdin.write("go\\n")
    rank.stdin.flush()
    answers.append(json.loads(rank.stdout.readline()))
for rank in ranks:
    rank.communicate("end\\n")
print(json.dumps(answers))
"""


def launched(
    tmp_path: Path, *masks: list[int], given: tuple[int, ...] = (0, 1), **environ: str
) -> list[dict[str, object]]:
    """Return reports of ranks pinned to ``masks`` by a launcher that has the cores ``given``."""
    argument = json.dumps([given, masks, environ])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, argument, RANK],
        cwd=tmp_path, text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_writer_leaves_the_core_that_training_is_pinned_to(tmp_path: Path) -> None:
    """The second rank looks when the first one's writer has moved already."""
    expected = {"writer": [1], "training": [0], "faults": 0}
    assert launched(tmp_path, [0], [0]) == [expected, expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masks", "given", "environ"),
    [
        pytest.param(([0, 1], [0, 1]), (0, 1), {}, id="nobody is pinned"),
        pytest.param(([0], [0, 1]), (0, 1), {}, id="one rank is not pinned"),
        pytest.param(([0], [1]), (0, 1), {}, id="nothing is left"),
        pytest.param(([0], [0]), (0,), {}, id="the launch has no other core"),
        pytest.param(([0], [0]), (0, 1), {"LOCAL_WORLD_SIZE": "3"}, id="a rank is not found"),
        pytest.param(([0], [0]), (0, 1), {"LOCAL_WORLD_SIZE": ""}, id="ranks are not counted"),
        pytest.param(([0], [0]), (0, 1), {"SLURM_CPUS_ON_NODE": "1"}, id="the job has one core"),
    ],
)
def test_all_stays_as_it_is(
    masks: tuple[list[int], ...], given: tuple[int, ...], environ: Mapping[str, str], tmp_path: Path
) -> None:
    reports = launched(tmp_path, *masks, given=given, **environ)
    assert reports == [{"writer": mask, "training": mask, "faults": 0} for mask in masks]


@pytest.mark.slow
def test_a_core_that_another_program_is_pinned_to_is_left_to_it(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "100"], preexec_fn=lambda: os.sched_setaffinity(0, {1}))
    try:
        (report,) = launched(tmp_path, [0])
    finally:
        other.kill()
        other.wait()
    assert report["writer"] == [0]


def node(first: int, last: int) -> set[int]:
    return set(range(first, last + 1))


def test_eight_ranks_of_twelve_cores_leave_those_between() -> None:
    """Two sockets of 56 cores; each rank has 12 of its socket, and a daemon has the last core."""
    ranks = [node(start + 12 * i, start + 12 * i + 11) for start in (0, 56) for i in range(4)]
    given = node(0, 111)
    assert spare_cores(given, ranks, []) == node(48, 55) | node(104, 111)
    assert spare_cores(given, ranks, [{111}, given, node(0, 223)]) == node(48, 55) | node(104, 110)


def test_ranks_that_share_a_socket_leave_the_other_one_unless_it_is_taken() -> None:
    given, socket = node(0, 127), [node(0, 63)] * 4
    assert spare_cores(given, socket, []) == node(64, 127)
    assert spare_cores(given, [*socket, *[node(64, 127)] * 4], []) == set()
    assert spare_cores(given, socket, [node(64, 95), node(96, 127)]) == set()


def test_a_rank_may_be_outside_of_what_its_launcher_has() -> None:
    """Cores kept free of the scheduler (``isolcpus``): the launcher has those for the rest."""
    assert spare_cores({0, 1}, [node(2, 31), node(32, 63)], []) == {0, 1}


LOOP = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
assert os.sched_getaffinity(0) == {0}
dist.destroy_process_group()
"""


def affinities(pid: int) -> Iterator[tuple[str, frozenset[int]]]:
    """Our thread and our process in all that lives below ``pid``, each with its cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith("forerun-w"):
            yield "writer", frozenset(os.sched_getaffinity(int(task.name)))
        for child in map(int, (task / "children").read_text().split()):
            if b"forerun.companion" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield "companion", frozenset(os.sched_getaffinity(child))
            yield from affinities(child)


@pytest.mark.slow
def test_the_companion_goes_with_the_writer(tmp_path: Path) -> None:
    """torchrun on both cores, whose ranks ``taskset`` has pinned to the first."""
    (tmp_path / "train.py").write_text(LOOP)
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--no-python", "taskset", "-c", "0", sys.executable, "train.py", "--calibrate",
         "--calibrate-steps=6"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seen: set[tuple[str, frozenset[int]]] = set()
    while agent.poll() is None:
        try:
            seen.update(affinities(agent.pid))
        except (OSError, ValueError):  # something has ended
            continue
        time.sleep(0.1)
    assert agent.returncode == 0
    # Before it moves a thread of ours has no name.
    assert ("companion", frozenset({1})) in seen and ("writer", frozenset({1})) in seen
    assert ("companion", frozenset({0})) not in seen
