"""A command under torchrun on the CPU, as a test starts it: to its end, and that a good one."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import forked_torchrun

_DROPPED = ("RANK", "WORLD_SIZE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "FORERUN_CALIBRATE")
_TIMEOUT_S = 400.0
_counter = itertools.count()


class Launch:
    """One launch by the process that has imported torch."""

    def __init__(
        self, directory: Path, words: Sequence[str], environ: Mapping[str, str], num_ranks: int
    ) -> None:
        self._files = directory / f".launch-{next(_counter)}"
        self._files.mkdir()
        self._words = words
        request = {
            "directory": str(directory),
            "words": [*map(str, words)],
            "environ": {**environ, "OMP_NUM_THREADS": "1"},
            "num_ranks": num_ranks,
            "timeout_s": _TIMEOUT_S,
            **{name: str(self._files / name) for name in ("stdout", "stderr", "status")},
        }
        pipe = _server().stdin
        assert pipe is not None
        pipe.write(json.dumps(request) + "\n")
        pipe.flush()

    def wait(self) -> subprocess.CompletedProcess[str]:
        """What it printed, and how it ended."""
        while not (self._files / "status").exists():
            assert _server().poll() is None, "the process that forks has died"
            time.sleep(0.01)
        status, stdout, stderr = (
            (self._files / name).read_text() for name in ("status", "stdout", "stderr")
        )
        return subprocess.CompletedProcess(self._words, int(status), stdout, stderr)


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
    *command: str,
    num_ranks: int = 2,
    options: tuple[str, ...] = (),
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Its output; fails with the end of it where the exit code is not 0."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    words = ["--standalone", "--nproc-per-node", str(num_ranks), *options, *command]
    own = {"FORERUN_DEVICE": "cpu", "WANDB_MODE": "disabled"}
    done = Launch(directory, words, {**kept, **own, **environ}, num_ranks).wait()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done
