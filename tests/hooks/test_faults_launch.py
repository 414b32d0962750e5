"""Faults that need torchrun: a restart after a worker has died, and a signal to the launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launched import Launch

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import OperatorRecord, StepRecord, WindowRecord
from forerun.calib.samples.store import read_run, run_ids

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "--num-layers=1",
    "--hidden-size=16",
    "--num-attention-heads=2",
    "--seq-length=8",
    "--micro-batch-size=1",
    "--global-batch-size=4",
    "--train-iters=10",
    "--mock-data",
)
CALIBRATE = ("--calibrate", "--calibrate-steps=4", "--calibrate-dir=out", "--calibrate-wandb=off")
PASSES = 2
"""Micro-batches of one rank in one step."""
PROGRAM = """
import os, signal, sys, time
# The agent's store still has the addresses of gloo's first attempt, at which the second one fails.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
told = f"port-{{attempt}}"
if os.environ["RANK"] == "0":
    sys.path.insert(0, {support!r})
    from free_ports import free_port

    with open(told + ".part", "w") as file:
        file.write(str(free_port()))
    os.rename(told + ".part", told)
while not os.path.exists(told):
    time.sleep(0.01)
os.environ["MASTER_PORT"] = open(told).read()
sys.path.insert(0, {recipes!r})
import pretrain_gpt

forward_step, passes = pretrain_gpt.forward_step, 0

def failing(*args):
    global passes
    passes += 1
    if attempt == 0 and os.environ["RANK"] == "1" and passes == {at} * {passes} + 1:
        time.sleep(1.0)
        {do}
    return forward_step(*args)

pretrain_gpt.forward_step = failing
pretrain_gpt.main()
"""


def start(folder: Path, do: str, at: int, *arguments: str) -> Launch:
    """The recipe under torchrun with one restart; ``do`` strikes rank 1 in step ``at``."""
    folder.mkdir()
    program = folder / "train.py"
    folders = {"recipes": str(ROOT / "recipes"), "support": str(ROOT / "tests" / "support")}
    program.write_text(PROGRAM.format(**folders, at=at, passes=PASSES, do=do), "utf-8")
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", program, *SMALL, *arguments)
    environ = {"FORERUN_DEVICE": "cpu", "WANDB_MODE": "disabled"}
    return Launch(folder, *words, num_workers=4, **environ)


def exit_statuses(folder: Path, do: str, at: int) -> tuple[int, int]:
    """Exit statuses without us and with us, which are the same, as are all losses printed."""
    runs = start(folder / "bare", do, at), start(folder / "ours", do, at, *CALIBRATE)
    bare, ours = (run.wait() for run in runs)
    losses = [re.findall(r"loss bits (0x[0-9a-f]+)", run.stdout) for run in (bare, ours)]
    printed = bare.stdout + bare.stderr + ours.stdout + ours.stderr
    assert losses[0] and losses[1] == losses[0], printed
    return bare.returncode, ours.returncode


def steps(run: RunRecords, rank: int) -> list[int]:
    """Numbers of the steps that can be read."""
    return [r.step for r in run.records[rank] if isinstance(r, StepRecord)]


def test_a_worker_dies_in_the_window_and_torchrun_starts_all_again(tmp_path: Path) -> None:
    assert exit_statuses(tmp_path, "os._exit(9)", 5) == (0, 0)
    out = tmp_path / "ours" / "out"
    first, second = (read_run(out, run_id) for run_id in run_ids(out))
    assert steps(first, 1) == [0, 1, 2, 3, 4]
    assert steps(first, 0)[:5] == [0, 1, 2, 3, 4]
    for rank in (0, 1):
        assert steps(second, rank) == list(range(7))
        hooked = {r.step for r in second.records[rank] if isinstance(r, OperatorRecord)}
        assert hooked == {3, 6}
        assert sum(isinstance(r, WindowRecord) for r in second.records[rank]) == 1


def test_sigterm_to_the_launcher_ends_the_run_as_it_does_without_us(tmp_path: Path) -> None:
    do = "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    bare, ours = exit_statuses(tmp_path, do, 5)
    assert bare == ours != 0
    run = read_run(tmp_path / "ours" / "out")
    assert steps(run, 1) == [0, 1, 2, 3, 4]
