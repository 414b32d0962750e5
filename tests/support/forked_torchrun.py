"""torchrun, or a script alone, as forks of one process that has imported torch already.

    python forked_torchrun.py    reads one JSON line per launch, and forks for each

This saves each process the seconds of ``import torch``.  The agent is torch's own.  The agent forks
a worker before it has threads; the worker has the arguments, environment, output and session of one
that is started by its command, calls the entry points of the group ``torch.backends`` as the end of
``import torch`` does, and ends as an interpreter does.  No module that hooks wait for is imported
before that.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = (
    "scipy.optimize",
    "scipy.stats",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torchmetrics",
    "wandb",
)
_spares: list[Spare] = []


class Spare:
    """A fork that waits for its worker's command; the agent uses it as a ``Popen``."""

    def __init__(self) -> None:
        read_fd, self._write_fd = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for other in (*_spares, self):
                os.close(other._write_fd)
            _wait_to_work(read_fd)
        os.close(read_fd)

    def work(self, args: tuple[str, ...], env: dict[str, str]) -> Spare:
        """Become the worker of this command."""
        os.write(self._write_fd, json.dumps([args, env]).encode() + b"\n")
        return self

    def poll(self) -> int | None:
        """Return the exit status as ``subprocess`` does, or None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int | None:
        """Wait for the end and return the exit status."""
        until_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.01)
        return self.returncode


def _wait_to_work(read_fd: int) -> None:
    with os.fdopen(read_fd) as file:
        line = file.readline()
    if not line:
        os._exit(0)
    args, env = json.loads(line)
    os.setsid()
    os.closerange(3, 256)
    _run(args, env, args[args.index("-u") + 1 :])
    sys.exit(0)


def _run(command: list[str], env: dict[str, str], words: list[str]) -> None:
    """Run the script ``words[0]`` as the interpreter does."""
    _become(command, env, words)
    module = types.ModuleType("__main__")
    module.__file__ = words[0]
    sys.modules["__main__"] = module
    sys.path[0] = str(Path(words[0]).parent)
    source = Path(words[0]).read_text(encoding="utf-8")
    exec(compile(source, words[0], "exec"), vars(module))


def _become(command: list[str], env: dict[str, str], words: list[str]) -> None:
    import torch

    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv[:], sys.argv[:] = command, words
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()


def _launch(request: dict[str, Any]) -> None:
    """Become the script, or the agent if there are workers."""
    os.chdir(request["directory"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    words, environ = request["words"], request["environ"]
    if not request["num_workers"]:
        _run([sys.executable, *words], environ, words)
        return
    from torch.distributed.elastic.multiprocessing import subprocess_handler
    from torch.distributed.run import main

    _spares.extend(Spare() for _ in range(request["num_workers"]))
    handler = subprocess_handler.subprocess_handler.SubprocessHandler
    handler._popen = lambda _, args, env: _spares.pop(0).work(args, env)
    _become([sys.executable, "-m", "torch.distributed.run", *words], environ, ["torchrun", *words])
    main(words)
    # Nothing of ours is in the agent, and unloading torch's libraries costs a fifth of a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _supervise(request: dict[str, Any]) -> None:
    """Fork the agent, and write its exit status at its end."""
    agent = os.fork()
    if agent == 0:
        _launch(request)
        sys.exit(0)
    until_s = time.monotonic() + request["timeout_s"]
    while not (ended := os.waitpid(agent, os.WNOHANG))[0]:
        time.sleep(0.01)
        if time.monotonic() > until_s:
            os.kill(agent, signal.SIGTERM)
            until_s = float("inf")
    part = Path(request["status"] + ".part")
    part.write_text(str(os.waitstatus_to_exitcode(ended[1])))
    part.rename(request["status"])
    os._exit(0)


def serve() -> None:
    """Fork for every line until the input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    sys.stdout.reconfigure(write_through=True)
    gc.collect()
    gc.freeze()  # or every fork would look through all of it at its end
    while line := sys.stdin.readline():
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # not the lines of later launches
            _supervise(json.loads(line))
    with suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    serve()
