"""Work beside training: the share of the interpreter that it takes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from forerun.hooks.process.pacing import PAUSE_S, SLICE_S, Pacer

MOST_FRAC = 0.1
"""Bound on the share of a thread's time; a slice is a twentieth of slice and pause."""


def test_work_takes_its_share_of_a_thread_and_gets_on():
    used_s: list[float] = []
    items = iter(range(1_000_000))
    ended = threading.Event()

    def work() -> None:
        for _ in Pacer().over(items):
            if ended.is_set():
                break
        used_s.append(time.thread_time())

    thread, begun_s = threading.Thread(target=work), time.perf_counter()
    thread.start()
    time.sleep(50 * (SLICE_S + PAUSE_S))
    ended.set()
    thread.join()
    spent_s = time.perf_counter() - begun_s
    assert 0 < used_s[0] < MOST_FRAC * spent_s
    assert next(items) > 1000


def test_the_cores_of_training_are_nobody_elses_business():
    root = Path(__file__).parents[3]
    modules = [path for folder in ("hooks", "launch") for path in (root / folder).rglob("*.py")]
    assert len(modules) > 100
    assert [path for path in modules if "setaffinity" in path.read_text("utf-8")] == []


def test_a_piece_that_is_longer_than_a_slice_is_followed_by_a_pause():
    pauses: list[float] = []
    pace = Pacer(pauses.append)
    pace.keep()
    for _ in range(3):
        end_s = time.perf_counter() + 2 * SLICE_S
        while time.perf_counter() < end_s:
            pass
        pace.keep()
    assert pauses == [PAUSE_S] * 4
