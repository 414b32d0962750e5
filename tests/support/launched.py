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
    """A training that the process which has imported torch forks; ``wait`` gives its end.

    ``num_workers`` counts those of restarts too; without any, ``words`` are a script and its
    arguments, and no torchrun is above it.
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
        kept = {name: held for name, held in os.environ.items() if not name.startswith(_OURS)}
        own = {name: str(held) for name, held in environ.items()}
        request = {
            "directory": str(directory),
            "words": self._words,
            "environ": {**kept, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", **own},
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
        """Number of a process that all of it descends from."""
        return _server().pid

    def wait(self) -> subprocess.CompletedProcess[str]:
        """What it printed, and how it ended."""
        while not (self._files / "status").exists():
            assert _server().poll() is None, "the process that forks has died"
            time.sleep(0.01)
        status, stdout, stderr = (
            (self._files / name).read_text() for name in ("status", "stdout", "stderr")
        )
        shutil.rmtree(self._files)
        return subprocess.CompletedProcess(self._words, int(status), stdout, stderr)

    def end_well(self) -> subprocess.CompletedProcess[str]:
        """The same; fails with the end of what it printed where the exit code is not 0."""
        done = self.wait()
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
        return done


@cache
def _server() -> subprocess.Popen[str]:
    """It ends with this process, which holds its input."""
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
    """A good end of a command on this machine's CPU, with room for one restart."""
    words = ("--standalone", "--nproc-per-node", num_ranks, *options, *command)
    own = {"FORERUN_DEVICE": "cpu", "WANDB_MODE": "disabled", **environ}
    return Launch(directory, *words, num_workers=2 * num_ranks, **own).end_well()
