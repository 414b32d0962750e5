"""The second process of a search: it answers in order, and ends with the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forerun.launch.opened.search_effort import forked

SEARCH = """
import os, sys, time
from forerun.launch.opened.search_effort import forked

with forked(lambda one: os.getpid()) as first, forked(lambda one: os.getpid()) as second:
    print(first([0, 0])[1], second([0, 0])[1], flush=True)
    time.sleep(600)
"""


def test_answers_come_in_order_and_errors_come_through() -> None:
    with forked(lambda one: 1 / one) as mapped:
        assert mapped([2.0, 4.0, 8.0]) == [0.5, 0.25, 0.125]
        with pytest.raises(ZeroDivisionError):
            mapped([1.0, 0.0])
        assert mapped([5.0]) == [0.2]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for its processes")
def test_a_search_that_is_killed_leaves_no_process() -> None:
    """Also where two of them know each other's pipes."""
    search = subprocess.Popen([sys.executable, "-c", SEARCH], stdout=subprocess.PIPE, text=True)
    assert search.stdout is not None
    with search, search.stdout:
        others = [int(word) for word in search.stdout.readline().split()]
        assert len(set(others)) == 2 and all(map(_is_alive, others))
        os.kill(search.pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while any(map(_is_alive, others)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [number for number in others if _is_alive(number)]
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left


def _is_alive(number: int) -> bool:
    """Whether there is such a process; one that nobody has waited for yet has ended too."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except FileNotFoundError:
        return False
    return fields[0] not in "ZX"
