"""Stand-in for torchrun: workers in sessions of their own, its signals, its exit codes.

``fake_launcher.py PIDS WORKER [SECONDS]``: workers are ``plain`` (SIGTERM ends them), ``saving``
(SIGTERM is noted, they end by themselves a little later) or ``deaf`` (SIGTERM is ignored); each has
a child of its own.  Like torchrun it passes on SIGTERM, SIGINT and SIGHUP as SIGTERM, exits with 1
after a signal, dies of SIGUSR1, and kills no worker when it dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = """
import os, signal, subprocess, sys, time
kind, pids, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
asked = []
if kind == "saving":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
elif kind == "deaf":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sleep", str(seconds)])
with open(pids, "a") as out:
    out.write(f"{os.getpid()} {child.pid}\\n")
end = time.monotonic() + seconds
while time.monotonic() < end and not (asked and time.monotonic() > asked[0] + 0.5):
    time.sleep(0.02)
if asked:
    with open(pids + ".saved", "a") as out:
        out.write("saved\\n")
child.kill()
child.wait()
"""


def main() -> int:
    """Start two workers, wait for them or for a signal."""
    pids, kind = sys.argv[1], sys.argv[2]
    seconds = sys.argv[3] if len(sys.argv) > 3 else "60"
    came: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: came.append(got))
    command = [sys.executable, "-S", "-c", WORKER, kind, pids, seconds]
    workers = [subprocess.Popen(command, start_new_session=True) for _ in range(2)]
    with Path(pids + ".agent").open("w") as out:
        out.write(str(os.getpid()))
    while not came and any(worker.poll() is None for worker in workers):
        time.sleep(0.02)
    if came:
        with Path(pids + ".signals").open("a") as out:
            time.sleep(0.2)
            out.write(" ".join(map(str, came)))
        for worker in workers:
            worker.terminate()
    codes = [worker.wait() for worker in workers]
    return int(bool(came) or any(codes))


if __name__ == "__main__":
    sys.exit(main())
