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

LAUNCH_VARIABLES = ("FORERUN", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC")
PROPOSE = """
import os
from forerun.hooks.process.launch_identity import proposed_launch_id
print(proposed_launch_id(os.environ))
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


def propose_name(**more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROPOSE],
        env=environ(**more),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "text", ["../../etc", "a b", "x" * 65, "", "-x", ".x", "é", "a\nb", "a/b", "\udcff", "con\x00"]
)
def test_any_text_becomes_the_name_of_one_folder(text: str) -> None:
    name = safe_launch_id(text)
    assert is_launch_id(name) and name != text
    assert name == safe_launch_id(text) != safe_launch_id(text + "x")
    assert safe_launch_id(name) == name


def test_a_restart_by_the_same_agent_has_the_same_name_and_another_launch_has_not() -> None:
    of_agent = [
        propose_name(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT=n) for n in "01"
    ]
    assert of_agent[0] == of_agent[1] and str(os.getpid()) in of_agent[0]
    alone = [propose_name(), propose_name()]
    assert alone[0] != alone[1]
    assert all(map(is_launch_id, of_agent + alone))
    assert propose_name(FORERUN_LAUNCH_ID="nightly-7") == "nightly-7"
    assert is_launch_id(propose_name(FORERUN_LAUNCH_ID="../7"))


def test_alone_the_name_is_there_at_once_and_without_a_group_soon(tmp_path: Path) -> None:
    def identity(world_size: int) -> LaunchIdentity:
        rank = RankInfo(rank=0, world_size=world_size, local_rank=0, local_world_size=1, run_id="r")
        launch_identity = LaunchIdentity(
            Settings(rank=rank, directory=tmp_path), {"FORERUN_LAUNCH_ID": "ours"}
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
    assert list(tmp_path.iterdir()) == []


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
