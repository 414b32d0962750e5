"""The flag is taken wherever a program starts, and what else imports torch is left as it is.

Slurm's, Open MPI's and MPICH's variables are those that their documentation lists; the processes
are real.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forerun import _forerun_autoload as entry
from forerun.hooks.process import settings
from forerun.hooks.process.ranks import RankInfo, rank_in_training
from forerun.launch.cli import main

torch = pytest.importorskip("torch")

FLAGS = ("--calibrate", "--calibrate-steps=8")
LOOP = Path(__file__).parents[1] / "support" / "launched_loop.py"
LAUNCHES = {
    "plain": {},
    "srun": {
        "SLURM_PROCID": "{0}",
        "SLURM_LOCALID": "{0}",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{0}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{0}",
        "OMPI_COMM_WORLD_SIZE": "2",
    },
    "hydra": {"PMI_RANK": "{0}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{0}"},
}
SEE = """
import json, sys
import torch
from forerun.hooks.session.session import running
print(json.dumps([sys.argv[1:], running() is not None]), flush=True)
"""
TRAIN = """
import sys, torch
assert not sys.argv[1:], sys.argv
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""
SPAWN = """
import multiprocessing, torch
def run():
    import train
if __name__ == "__main__":
    for kind in ("spawn", "fork"):
        child = multiprocessing.get_context(kind).Process(target=run)
        child.start()
        child.join()
        assert child.exitcode == 0, kind
"""


def start(
    folder: Path, *words: str | Path, rank: int = 0, launch: str = "plain", **more: str
) -> subprocess.CompletedProcess[str]:
    starts = ("FORERUN", "TORCH", "SLURM", "OMPI", "PMI", "MASTER", "WANDB")
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(starts) and name not in (*entry.RANKS, "WORLD_SIZE")
    }
    variables = {name: value.format(rank) for name, value in LAUNCHES[launch].items()}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={**inherited, "OMP_NUM_THREADS": "1", **variables, **more},
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def printed_notes(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = (done.stderr + done.stdout).splitlines()
    return [line for line in lines if line.startswith("[forerun]")]


def test_both_tables_of_variables_are_the_same() -> None:
    assert entry.LOCAL_RANKS == settings.LOCAL_RANKS


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_parser_never_sees_the_flag_and_one_line_says_that_nothing_trained(
    tmp_path: Path, launch: str
) -> None:
    train = script(tmp_path, SEE)
    for rank in range(1 if launch == "plain" else 2):
        done = start(tmp_path, train, "--lr", "1", *FLAGS, rank=rank, launch=launch)
        assert json.loads(done.stdout) == [["--lr", "1"], True]
        assert len(printed_notes(done)) == (rank == 0)
        assert rank or "nothing trained in this process" in printed_notes(done)[0]
        assert rank or "torchrun --nproc-per-node N" in printed_notes(done)[0]
    named = start(tmp_path, train, launch=launch, FORERUN_CALIBRATE="1")
    assert (json.loads(named.stdout), printed_notes(named)) == ([[], True], [])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
def test_single_processes_of_a_launcher_are_one_run(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN)
    second = start(tmp_path, train, *FLAGS, rank=1, launch="srun")
    assert (printed_notes(second), second.stdout) == ([], "trained\n")
    assert not (tmp_path / "forerun-out").exists()
    first = start(tmp_path, train, *FLAGS, launch="srun")
    assert printed_notes(first)[0].startswith("[forerun] the launcher states 2 ranks")
    assert "taken from the arguments" in printed_notes(first)[1]
    assert len([*tmp_path.glob("forerun-out/records/*/rank-00000.jsonl")]) == 1
    header = next(tmp_path.glob("forerun-out/records/*/rank-00000.jsonl")).read_text()
    assert json.loads(header.splitlines()[0])["world_size"] == 1


@pytest.mark.slow
def test_the_explicit_form_calibrates_a_single_process(tmp_path: Path) -> None:
    train = script(tmp_path, TRAIN)
    done = start(tmp_path, "-m", "forerun.launch", train, *FLAGS)
    assert printed_notes(done)[0].startswith("[forerun] taken from the arguments: --calibrate ")
    assert len([*tmp_path.glob("forerun-out/records/*/rank-00000.jsonl")]) == 1


@pytest.mark.slow
def test_children_of_a_plain_process_are_not_observed(tmp_path: Path) -> None:
    script(tmp_path, TRAIN)
    done = start(tmp_path, script(tmp_path, SPAWN, "main.py"), *FLAGS)
    assert done.stdout == "trained\ntrained\n"
    assert ["nothing trained in this process" in line for line in printed_notes(done)] == [True]
    assert not (tmp_path / "forerun-out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-c", SEE.replace("running() is not None", "running() is None")),
        ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_one.py"),
    ],
)
def test_code_on_the_command_line_and_test_runners_are_left_alone(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    test = "    from forerun.hooks.session.session import running\n    assert running() is None\n"
    script(tmp_path, f"import torch\ndef test_one():\n{test}", "test_one.py")
    done = start(tmp_path, *words, FORERUN_CALIBRATE="1")
    assert printed_notes(done) == []
    if words[0] == "-c":
        passed = start(tmp_path, *words, *FLAGS)
        assert (json.loads(passed.stdout), printed_notes(passed)) == ([[*FLAGS], True], [])


OPTIONS = {
    "an option": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--calibrate')",
    "a longer one": "parser.add_argument('--calibrate-momentum', '-m')",
    "a field": "class Arguments:\n    calibrate: bool = False",
    "a field without default": "class Arguments:\n    calibrate: bool",
    "a parameter": "def main(path: str, calibrate: bool = False): ...",
    "an attribute": "def main(args):\n    if args.calibrate: print(1)",
    "a switch of absl": "flags.DEFINE_bool('calibrate', False, 'help')",
}
TEXTS = {
    "a docstring": '"""Start it as: torchrun train.py --calibrate"""',
    "a comment": "x = 1  # --calibrate",
    "a call of ours": "run = attach(model, train_iters=3)",
    "another word": "parser.add_argument('--calibration-steps')\ncalibrated = recalibrate()",
}


@pytest.mark.parametrize("name", [*OPTIONS, *TEXTS])
def test_a_program_names_its_own_option(name: str) -> None:
    code = compile({**OPTIONS, **TEXTS}[name], "program", "exec")
    assert entry.names_flag(code) is (name in OPTIONS)


@pytest.mark.slow
def test_another_tools_option_stays_its_own_and_our_other_name_is_taken(tmp_path: Path) -> None:
    text = "import argparse\n" + SEE + "p = argparse.ArgumentParser()\n"
    tool = script(tmp_path, text + "p.add_argument('--calibrate', action='store_true')\n")
    done = start(tmp_path, tool, "--calibrate")
    assert json.loads(done.stdout) == [["--calibrate"], False]
    assert printed_notes(done)[0].startswith(
        "[forerun] left to the program: --calibrate; to calibrate, "
    )
    both = start(tmp_path, tool, "--calibrate", "--forerun")
    assert json.loads(both.stdout) == [["--calibrate"], True]
    assert start(tmp_path, tool, "--calibrate", FORERUN_OFF="1").stderr == ""


@pytest.mark.parametrize(
    ("launched", "joint", "is_forked", "expected"),
    [
        ((0, 1), None, False, (0, 1)),  # python train.py
        ((0, 1), (1, 2), False, (1, 2)),  # variables that the program reads itself
        ((1, 2), (1, 2), False, (1, 2)),  # torchrun
        ((1, 4), (0, 2), False, (0, 2)),  # two trainings in one allocation
        ((0, 4), None, False, (0, 1)),  # programs of their own: the first answers
        ((3, 4), None, False, None),
        ((3, 4), (0, 1), False, None),  # each in a group of its own
        ((0, 1), (0, 2), True, None),
    ],
)
def test_the_rank_in_training_is_that_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
    launched: tuple[int, int],
    joint: tuple[int, int] | None,
    is_forked: bool,
    expected: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: joint is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: (joint or (0, 1))[0])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: (joint or (0, 1))[1])
    known = RankInfo(
        rank=launched[0], world_size=launched[1], local_rank=0, local_world_size=1, run_id="r"
    )
    rank = rank_in_training(known, {}, is_forked=is_forked)
    assert (rank and (rank.rank, rank.world_size)) == expected


def test_ranks_of_slurm_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    known = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="r")
    environ = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_LOCALID": "1"}
    rank = rank_in_training(known, environ, is_forked=False)
    assert rank is not None
    assert (rank.local_rank, rank.local_world_size) == (1, 4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launch", "num_processes", "num_ranks", "framework"),
    [("plain", 1, 1, "trainer"), ("plain", 1, 2, "lightning"), ("srun", 2, 2, "ddp")],
)
def test_a_launch_without_torchrun_gets_every_answer(
    tmp_path: Path, launch: str, num_processes: int, num_ranks: int, framework: str
) -> None:
    for package in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(package)
    words = [LOOP, framework, "--steps", "40", *FLAGS, f"--calibrate-dir={tmp_path / 'cal'}"]
    words += ["--calibrate-wandb=off", "--calibrate-tensorboard=off"]
    words += [] if framework in ("trainer", "lightning") else ["--calibrate-total-steps=40"]
    joint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    joint["LAUNCHED_RANKS"] = str(num_ranks)
    with ThreadPoolExecutor(num_processes) as pool:
        ranks = range(num_processes)
        done = pool.map(lambda n: start(tmp_path, *words, rank=n, launch=launch, **joint), ranks)
        text = "".join(one.stdout + one.stderr for one in done)
    # On a loaded machine the companion's time may be over before its first answer.
    text += start(tmp_path, "-m", "forerun", "report", tmp_path / "cal").stdout
    assert len([*tmp_path.glob("cal/records/*/rank-*.jsonl")]) == num_ranks, text[-3000:]
    assert re.search(r"^\[forerun\] end(s|ed) ", text, re.MULTILINE), text[-3000:]
    assert re.search(r"^\[forerun\] (next time )?(perhaps )?faster", text, re.MULTILINE), text


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.mark.parametrize(
    ("line", "verdict", "text"),
    [
        ("PYTHON train.py --lr 1 --calibrate", "ok", "nothing stands in the way of --calibrate"),
        ("srun -n 2 PYTHON train.py --calibrate", "ok", "nothing stands in the way"),
        ("FORERUN_CALIBRATE=1 mpirun -n 2 PYTHON train.py", "ok", "nothing stands in the way"),
        ("torchrun --calibrate train.py", "warn", "--calibrate is before train.py"),
        ("PYTHON -c 1 --calibrate", "warn", "code after -c"),
        ("PYTHON none.py --calibrate", "missing", "no script none.py"),
        ("PYTHON tool.py --calibrate", "warn", "tool.py has a --calibrate of its own"),
        (
            "PYTHON train.py --calibrate-steps=2",
            "warn",
            "--calibrate-steps=2: must be a whole number from 4 on",
        ),
        ("FORERUN_OFF=1 PYTHON train.py --calibrate", "warn", "FORERUN_OFF=1"),
    ],
)
def test_doctor_says_what_stands_in_the_way_of_a_launch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    verdict: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    script(tmp_path, TRAIN)
    script(tmp_path, "parser.add_argument('--calibrate')", "tool.py")
    code = main(["doctor", "--", *line.replace("PYTHON", sys.executable).split()])
    rows = [row.split(maxsplit=2) for row in capsys.readouterr().out.splitlines()]
    found = [row for row in rows if row[0] != "->" and row[1] != "ok"] or rows[-1:]
    assert [found[0][1], code] == [verdict, verdict == "missing"]
    assert text in found[0][2]
