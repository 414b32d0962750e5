"""Notes of a launch, against command lines of launchers and files on a disk."""

from __future__ import annotations

import json
import stat
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

from forerun.calib.arguments.taken_options import LAYOUT_OPTIONS, TRANSFORMER_ENGINE
from forerun.calib.records.run_values import NAME, Launch
from forerun.hooks.process.launch_note import (
    LaunchNote,
    absent_features,
    launch_of,
    launcher_words,
)
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


CORE = {"megatron.core": ModuleType("megatron.core"), TRANSFORMER_ENGINE: ModuleType("te")}


def with_parsed(name: str, variable: str, value: object) -> dict[str, object]:
    module = ModuleType(name)
    vars(module)[variable] = value
    return {**CORE, name: module}


def test_what_was_parsed_tells_what_a_program_lacks() -> None:
    """Megatron-LM's namespace, or ``args`` of a script with a parser of its own."""
    names = dict.fromkeys(LAYOUT_OPTIONS.values())
    del names["recompute_modules"]
    megatron = with_parsed("megatron.training.global_vars", "_GLOBAL_ARGS", Namespace(**names))
    script = with_parsed("__main__", "args", Namespace(lr=1.0, micro_batch_size=2))
    absent = LAYOUT_OPTIONS.keys() - {"--micro-batch-size"}
    assert absent_features(megatron) == ("--recompute-modules",)
    assert {*absent_features(script)} == absent
    assert absent_features({**script, **megatron}) == ("--recompute-modules",)
    unset = with_parsed("megatron.training.global_vars", "_GLOBAL_ARGS", None)
    assert {*absent_features({**script, **unset})} == absent


@pytest.mark.parametrize("args", [None, ["x"], Namespace(lr=1.0), object()])
def test_a_program_whose_arguments_are_not_known_is_not_judged(args: object) -> None:
    script = with_parsed("__main__", "args", args)
    assert absent_features(script) == ()
    del script[TRANSFORMER_ENGINE]
    assert absent_features(script) == (TRANSFORMER_ENGINE,)
    assert absent_features({}) == () == absent_features({"transformers.trainer": object()})
    bridge = with_parsed("__main__", "args", Namespace(micro_batch_size=1))
    assert absent_features({**bridge, "megatron.bridge": object()}) == ()
