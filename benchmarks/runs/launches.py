"""Launches of the recipe and of others' programs on this machine, and the steps that they print."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NUM_RANKS = 2
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


def torchrun_words(num_ranks: int = NUM_RANKS) -> list[str]:
    """The launcher beside this Python, for so many ranks of this machine."""
    program = Path(sys.executable).parent / "torchrun"
    found = [str(program)] if program.exists() else [sys.executable, "-m", "torch.distributed.run"]
    return [*found, "--standalone", "--nproc-per-node", str(num_ranks)]


def step_times_s(text: str) -> list[float]:
    """Seconds of each step in a log of Megatron's form."""
    return [float(found) / 1e3 for found in _ELAPSED.findall(text)]


def cpu_environment() -> dict[str, str]:
    """This environment for a launch on CPUs, without what W&B and Forerun read of it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean | {
        "FORERUN_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PATH": bin_first,
    }


def output_of(command: Sequence[str], *, limit_s: float, cwd: Path | None = None) -> str | None:
    """What a launch on CPUs printed; None where it fails, or takes longer and is ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=cpu_environment(), start_new_session=True, cwd=cwd,
    )  # fmt: skip
    begun_s = time.monotonic()
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        text, _ = process.communicate()
    finally:
        _end(process)
    if process.returncode:
        spent_s = time.monotonic() - begun_s
        print(f"{shlex.join(command)}\nfailed after {spent_s:.0f} s:\n{text[-1500:]}",
            file=sys.stderr)  # fmt: skip
        return None
    return text


def _end(process: subprocess.Popen[str]) -> None:
    """The launcher ends its workers, which have sessions of their own, if it is asked first."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=45.0)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
