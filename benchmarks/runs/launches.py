"""Launches of the recipe and of other programs on this machine, and parsing of their step times."""

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
    """Return the launcher of this Python's environment, for ``num_ranks`` ranks on this machine."""
    program = Path(sys.executable).parent / "torchrun"
    launcher = (
        [str(program)] if program.exists() else [sys.executable, "-m", "torch.distributed.run"]
    )
    return [*launcher, "--standalone", "--nproc-per-node", str(num_ranks)]


def step_times_s(text: str) -> list[float]:
    """Return seconds of each step in a log of Megatron's format."""
    return [float(elapsed_ms) / 1e3 for elapsed_ms in _ELAPSED.findall(text)]


def cpu_environment() -> dict[str, str]:
    """Return this environment for a launch on CPUs, without variables that W&B and Forerun read."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "FORERUN"))}
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return clean | {
        "FORERUN_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PATH": bin_first,
    }


def output_of(command: Sequence[str], *, limit_s: float, cwd: Path | None = None) -> str | None:
    """Return the output of a launch on CPUs; None if it fails or exceeds the limit."""
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
    """Ask the launcher first, so that it ends its workers, which have sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=45.0)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
