"""The entry point: nothing without a flag, no exception ever, one session per worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SEE = """
import json, sys
before = [type(finder).__name__ for finder in sys.meta_path], list(sys.argv)
import torch
after = [type(finder).__name__ for finder in sys.meta_path], list(sys.argv)
print(json.dumps({
    "before": before, "after": after, "modules": sorted(sys.modules),
    "cuda": [torch.cuda.is_available.__module__, torch.cuda.Stream.__module__],
    "tensor": type(torch.Tensor.cuda).__name__,
}))
"""


WORKER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if "FORERUN" not in key}
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        clean.pop(key, None)
    return subprocess.run(
        [sys.executable, *command], env=clean | environ, text=True, capture_output=True, timeout=120
    )


def see(*arguments: str, **environ: str) -> dict[str, list]:
    done = run("-c", SEE, *arguments, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_a_flag_a_worker_is_as_if_we_were_not_installed() -> None:
    ours = see("--lr", "1", **WORKER)
    bare = see("--lr", "1", **WORKER, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    new = set(ours.pop("modules")) - set(bare.pop("modules"))
    assert ours == bare
    our_modules = {name for name in new if name.partition(".")[0] == "forerun"}
    assert not our_modules
    assert new == {"_forerun_autoload"}


def test_a_launcher_passes_the_flags_on() -> None:
    seen = see("--calibrate", "--calibrate-steps=8")
    assert seen["before"] == seen["after"]
    assert seen["after"][1][1:] == ["--calibrate", "--calibrate-steps=8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "environ", "reason"),
    [
        ("--calibrate-steps=2", {}, "--calibrate-steps=2: must be a whole number from 4 on"),
        ("--calibrate", {"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
        ("--calibrate", {"FORERUN_DEVICE": "gpu"}, "FORERUN_DEVICE=gpu"),
    ],
)
def test_a_mistake_costs_the_calibration_and_never_the_run(
    flag: str, environ: dict[str, str], reason: str
) -> None:
    done = run("-c", SEE, flag, "--lr", "1", **WORKER | environ)
    assert done.returncode == 0, done.stderr
    *_, message, seen = done.stdout.splitlines()
    assert message.startswith(f"[forerun] {reason}")
    assert message.endswith("calibration is off, training goes on")
    assert json.loads(seen)["after"][1][1:] == ["--lr", "1"]


@pytest.mark.slow
def test_only_the_first_rank_speaks() -> None:
    done = run("-c", SEE, "--calibrate-steps=2", **WORKER | {"RANK": "1", "WORLD_SIZE": "2"})
    assert done.returncode == 0, done.stderr
    assert "[forerun]" not in done.stdout


@pytest.mark.slow
def test_what_the_worker_starts_has_its_device_and_no_session_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, torch\n"
        "def look(): print('child', torch.cuda.is_available(), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    print('parent', torch.cuda.is_available(), flush=True)\n"
        "    child = multiprocessing.get_context('spawn').Process(target=look)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    done = run(
        str(script), "--calibrate-steps=2", **WORKER, FORERUN_DEVICE="cpu",
        FORERUN_CALIBRATE="1", CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    messages = [line for line in done.stdout.splitlines() if line.startswith("[forerun]")]
    assert len(messages) == 3
    assert messages[1].startswith("[forerun] --calibrate-steps=2")
    assert messages[2].startswith("[forerun] CPU stand-in")
    assert "parent True\nchild True\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_explicit_form_runs_the_script_as_python_would(tmp_path: Path, autoload: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch, beside\nprint(__name__, sys.argv, sys.path[0])\n")
    (tmp_path / "beside.py").write_text("")
    done = run(
        "-m", "forerun.launch", str(script), "--lr", "1", "--calibrate-steps=2",
        **WORKER, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    took, message, seen = done.stdout.splitlines()
    assert took.startswith("[forerun] taken from the arguments: --calibrate-steps=2 (")
    assert message.startswith("[forerun] --calibrate-steps=2")
    assert seen == f"__main__ {[str(script), '--lr', '1']} {tmp_path}"


@pytest.mark.slow
def test_the_explicit_form_takes_a_module() -> None:
    done = run("-m", "forerun.launch", "-m", "json.tool", "--help", **WORKER)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--calibrate"], ["-m"], ["no/such.py"]])
def test_the_explicit_form_without_a_script_is_a_usage_error(arguments: list[str]) -> None:
    done = run("-m", "forerun.launch", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "usage: " in done.stderr
