"""Notes of a launch, against command lines of launchers and files on a disk."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from forerun.calib.records.run_values import NAME, Launch
from forerun.hooks.process.launch_note import LaunchNote, launch_of, launcher_words
from forerun.hooks.process.settings import RankInfo, Settings

TORCHRUN = ("/v/bin/python", "/v/bin/torchrun", "--nnodes=2", "--nproc-per-node", "8")


def settings(directory: Path, *argv: str, rank: int = 0, size: int = 16) -> Settings:
    info = RankInfo(rank=rank, world_size=size, local_rank=0, local_world_size=8, run_id="r")
    return Settings(rank=info, directory=directory, host_argv=argv)


@pytest.mark.parametrize(
    ("parent", "program", "launcher", "named"),
    [
        ((*TORCHRUN, "a/t.py", "--lr", "1"), "a/t.py", TORCHRUN, ("a/t.py",)),
        (
            ("python", "-m", "torch.distributed.run", "--standalone", "-m", "pkg.train", "--lr"),
            "/w/pkg/train.py",
            ("python", "-m", "torch.distributed.run", "--standalone"),
            ("-m", "pkg.train"),
        ),
        (("bash",), "t.py", (), ("t.py",)),
        (
            ("python", "/bin/forerun", "run", "--grace", "9", "--", "python", "t.py"),
            "t.py",
            ("python",),
            ("t.py",),
        ),
        (
            (
                "python",
                "/b/accelerate",
                "launch",
                "--num_processes",
                "2",
                "--hub_token",
                "x",
                "t.py",
            ),
            "t.py",
            ("python", "/b/accelerate", "launch", "--num_processes", "2", "--hub_token", "***"),
            ("t.py",),
        ),
    ],
)
def test_the_words_before_a_program_are_the_launcher_s(
    parent: tuple[str, ...], program: str, launcher: tuple[str, ...], named: tuple[str, ...]
) -> None:
    assert launcher_words(parent, program) == (launcher, named)


def test_what_is_noted_is_masked_and_says_nodes_and_host(tmp_path: Path) -> None:
    request = settings(tmp_path, "t.py", "--lr", "1", "--hub-token", "abc")
    environ = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "HF_TOKEN": "abc"}
    launch = launch_of(request, environ, (*TORCHRUN, "t.py"), {"megatron.bridge": object()})
    assert launch == Launch(
        argv=("t.py", "--lr", "1", "--hub-token", "***"),
        launcher=TORCHRUN,
        folder=str(Path.cwd()),
        host="megatron.bridge",
        num_nodes=2,
        ranks_per_node=8,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )


def test_rank_0_writes_it_once_beside_its_records_for_its_owner_alone(tmp_path: Path) -> None:
    note = LaunchNote(settings(tmp_path, "t.py", "--lr", "1"), {})
    note.poll()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "records" / "r").mkdir(parents=True)
    note.poll()
    path = tmp_path / "records" / "r" / NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Launch.from_json(json.loads(path.read_text())).argv == ("t.py", "--lr", "1")
    path.unlink()
    note.poll()
    assert not path.exists()


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "records" / "r").mkdir(parents=True)
    LaunchNote(settings(tmp_path, "t.py", rank=1), {}).poll()
    assert list((tmp_path / "records" / "r").iterdir()) == []
