"""Trainings as tests start them: a script alone, or under torchrun on the CPU."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import forked_torchrun

_OURS = ("WANDB", "FORERUN", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCH")
_TIMEOUT_S = 400.0
_counter = itertools.count()


class Launch:
    """A training, forked from a process that has imported torch; ``wait`` returns its result.

    ``num_workers`` counts those of restarts too; without any, ``words`` are a script and its
    arguments, run without torchrun.
    """

    def __init__(
        self,
        directory: Path,
        *words: object,
        num_workers: int = 0,
        timeout_s: float = _TIMEOUT_S,
        **environ: object,
    ) -> None:
        self._files = directory / f".launch-{next(_counter)}"
        self._files.mkdir(parents=True)
        self._words = [*map(str, words)]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OURS)
        }
        variables = {name: str(value) for name, value in environ.items()}
        request = {
            "directory": str(directory),
            "words": self._words,
            "environ": {**inherited, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **variables},
            "num_workers": num_workers,
            "timeout_s": timeout_s,
            **{name: str(self._files / name) for name in ("stdout", "stderr", "status")},
        }
        pipe = _server().stdin
        assert pipe is not None
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()

    @property
    def ancestor(self) -> int:
        """Id of a process from which all of the launch descends."""
        return _server().pid

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end and return output and exit status."""
        while not (self._files / "status").exists():
            assert _server().poll() is None, "the process that forks has died"
            time.sleep(0.01)
        status, stdout, stderr = (
            (self._files / name).read_text() for name in ("status", "stdout", "stderr")
        )
        shutil.rmtree(self._files)
        return subprocess.CompletedProcess(self._words, int(status), stdout, stderr)

    def end_well(self) -> subprocess.CompletedProcess[str]:
        """Wait as ``wait`` does; fail with the end of the output if the exit code is not 0."""
        done = self.wait()
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
        return done


@cache
def _server() -> subprocess.Popen[str]:
    """Return the forking server, which ends with this process since that holds its input."""
    server = subprocess.Popen(
        [sys.executable, forked_torchrun.__file__],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    atexit.register(server.communicate)
    return server


def torchrun(
    directory: Path,
    *command: object,
    num_ranks: int = 2,
    options: tuple[str, ...] = (),
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command on this machine's CPU to a good end, allowing one restart."""
    words = ("--standalone", "--nproc-per-node", num_ranks, *options, *command)
    variables = {"FORERUN_DEVICE": "cpu", "WANDB_MODE": "disabled", **environ}
    return Launch(directory, *words, num_workers=2 * num_ranks, **variables).end_well()
