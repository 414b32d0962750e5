"""A command under torchrun on the CPU, as a test starts it: to its end, and that a good one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_DROPPED = ("RANK", "WORLD_SIZE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "FORERUN_CALIBRATE")


def torchrun(
    directory: Path,
    *command: str,
    num_ranks: int = 2,
    options: tuple[str, ...] = (),
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Its output; fails with the end of it where the exit code is not 0."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(num_ranks), *options, *command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            **kept,
            "OMP_NUM_THREADS": "1",
            "FORERUN_DEVICE": "cpu",
            "WANDB_MODE": "disabled",
            **environ,
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done
