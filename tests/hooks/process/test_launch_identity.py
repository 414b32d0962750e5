"""One name for all ranks of a launch, and the same one after a restart by the same agent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

from forerun.hooks.process.launch_identity import LaunchIdentity, is_launch_id, safe_launch_id
from forerun.hooks.process.settings import RankInfo, Settings

LAUNCH_VARIABLES = (
    *("FORERUN", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "SLURM", "PMIX"),
)
NAME = """
import os
from forerun.hooks.process.launch_identity import launch_name
print(launch_name(os.environ))
"""
AGENT = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""
RANK = """
import sys, torch
import torch.distributed as dist
from forerun.hooks.session.attaching import attach

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
with attach(model, directory=sys.argv[1], steps=4) as run:
    for _ in range(12):
        model(torch.ones(2)).sum().backward()
        dist.all_reduce(model.weight.grad)
        run.step()
print("NAME", run._session._live.launch_id())
dist.barrier()
dist.destroy_process_group()
"""


def environ(**more: str) -> dict[str, str]:
    inherited = {
        name: text for name, text in os.environ.items() if not name.startswith(LAUNCH_VARIABLES)
    }
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


def names(*words: str, **more: str) -> list[str]:
    """Return the names that one Python process gives, or its children give after one another."""
    done = subprocess.run(
        [sys.executable, "-c", *words],
        env=environ(**more),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "text", ["../../etc", "a b", "x" * 65, "", "-x", ".x", "é", "a\nb", "a/b", "\udcff", "con\x00"]
)
def test_any_text_becomes_the_name_of_one_folder(text: str) -> None:
    name = safe_launch_id(text)
    assert is_launch_id(name) and name != text
    assert name == safe_launch_id(text) != safe_launch_id(text + "x")
    assert safe_launch_id(name) == name


@pytest.mark.parametrize("run_id", ["none", "nightly-7"])
def test_a_restart_by_the_same_agent_has_the_same_name_and_another_launch_has_not(
    run_id: str,
) -> None:
    """Two agents with one run id, each of which starts its ranks twice."""
    first, second = (names(AGENT, NAME, TORCHELASTIC_RUN_ID=run_id) for _ in range(2))
    assert first[0] == first[1] != second[0] == second[1]
    assert all(map(is_launch_id, first + second))
    assert first[0].startswith(run_id) is (run_id != "none")


def test_ranks_of_slurm_and_single_processes_are_told_apart_by_their_start() -> None:
    jobs = [name for _ in range(2) for name in names(NAME, SLURM_JOB_ID="4711")]
    alone = [name for _ in range(2) for name in names(NAME)]
    assert jobs[0] != jobs[1] and all(name.startswith("4711-") for name in jobs)
    assert alone[0] != alone[1] and all(map(is_launch_id, alone))
    assert names(NAME, FORERUN_LAUNCH_ID="nightly-7") == ["nightly-7"]
    assert is_launch_id(names(NAME, FORERUN_LAUNCH_ID="../7")[0])


def test_alone_the_name_is_there_at_once_and_without_a_group_soon(tmp_path: Path) -> None:
    def identity(world_size: int, rank: int = 0, name: str = "ours") -> LaunchIdentity:
        launch_identity = LaunchIdentity(
            Settings(
                rank=RankInfo(
                    rank=rank,
                    world_size=world_size,
                    local_rank=0,
                    local_world_size=1,
                    run_id="nightly-29500-1-w2",
                ),
                directory=tmp_path,
            ),
            {"FORERUN_LAUNCH_ID": name},
        )
        launch_identity.begin(is_needed=True)
        return launch_identity

    alone = identity(1)
    alone.poll()
    assert alone.name == "ours"
    many = identity(2)
    many.poll()
    assert many.name == ""
    many.settle(patience_s=0.0)
    assert many.name == "ours"
    # Without a store all ranks go by one name, that of the run: its id and count of restarts.
    unnamed = [identity(2, rank, name="") for rank in range(2)]
    for one in unnamed:
        one.settle(patience_s=0.0)
    assert [one.name for one in unnamed] == ["nightly-29500-1-w2"] * 2
    assert list(tmp_path.iterdir()) == []


class Store:
    """A store of one key that does not answer before ``answers``."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.answers, self.num_writes = False, 0

    def connect(self) -> Store:
        if not self.answers:
            raise OSError("no route to host")
        return self

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()
        self.num_writes += 1

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]


def test_rank_0_gives_the_name_once_and_the_others_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store()
    monkeypatch.setattr("forerun.hooks.process.launch_identity.find_link", lambda key: store)
    monkeypatch.setattr("forerun.hooks.process.launch_identity._TICK_S", 0.0)
    ranks = [
        LaunchIdentity(
            Settings(
                rank=RankInfo(
                    rank=rank, world_size=3, local_rank=rank, local_world_size=3, run_id="r"
                ),
                directory=tmp_path,
            ),
            {"TORCHELASTIC_RUN_ID": "nightly"},
        )
        for rank in range(3)
    ]
    for identity in ranks:
        identity._pause_s = 0.0
        identity.begin(is_needed=identity is ranks[2])

    def poll() -> list[str]:
        for identity in reversed(ranks):
            identity.poll()
        return [identity.name for identity in ranks]

    assert poll() == ["", "", ""]
    store.answers = True
    name = poll()[0]
    assert name.startswith("nightly-")
    # The second rank does not need the name and does not ask.
    assert poll() == [name, "", name] and store.num_writes == 1


@pytest.mark.slow
def test_ranks_that_were_given_other_names_agree_on_that_of_rank_0(tmp_path: Path) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env=environ(
                RANK=str(rank),
                WORLD_SIZE="3",
                LOCAL_RANK=str(local),
                LOCAL_WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                FORERUN_LAUNCH_ID=name,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Two nodes; the second has two ranks, of which the first leaves word to its wrapper.
        for rank, local, count, name in [(0, 0, 1, "a"), (1, 0, 2, "b"), (2, 1, 2, "b")]
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    assert [re.findall(r"NAME (\S*)", text) for text in outputs] == [["a"], ["a"], [""]]
    (pointer,) = tmp_path.glob("runs/b/launch.json")
    assert json.loads(pointer.read_text()) == {"schema": 1, "launch_id": "a"}
