"""Measurements in a single-threaded child process: its answer, processor time and memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any


def answer_of(module: str, *words: object) -> Any:
    """Return the JSON that ``python -m forerun.benchmarks.MODULE WORDS`` prints last."""
    command = [sys.executable, "-m", f"forerun.benchmarks.{module}", *map(str, words)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | threads
    )
    return json.loads(done.stdout.splitlines()[-1])


def processor_s() -> float:
    """Return processor seconds of this process and of the children it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def peak_nbytes() -> int:
    """Return peak resident bytes: the larger of this process and its largest reaped child."""
    used = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in used)
