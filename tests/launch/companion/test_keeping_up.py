"""A companion that falls behind, that hangs, or whose disk is full: it keeps up and goes home."""

from __future__ import annotations

import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings, started

from forerun.calib.forecast.batch_ratios import PredictedStep
from forerun.launch.companion._companion_loop import ClosedWindows, CompanionLoop
from forerun.launch.companion._forecasting import NUM_RECENT_BRACKETS, ObservedRun
from forerun.launch.companion.program import EventQueue
from forerun.launch.sinks.sink import Sink
from forerun.launch.store.run_log import MAX_STORED_ERRORS, MAX_WAITING_STEPS, Score

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
WINDOW_END = 11


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "event": "step", "step": number, "time_s": 0.15, "is_hooked": False, "flags": [],
        "window": None, "is_after_window": number >= WINDOW_END, "unix_s": 1000.0 + number, **more,
    }  # fmt: skip


def closed(window: int) -> dict[str, Any]:
    return {"event": "window_closed", "window": window, "last_step": WINDOW_END - 1}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    return tmp_path


def test_steps_wait_in_bounded_room_and_windows_and_the_end_are_never_lost() -> None:
    queue = EventQueue(most_steps=10)
    for number in range(100):
        queue.put(step(number))
        if number % 20 == 0:
            queue.put(closed(number // 20))
    queue.put({"event": "phase", "name": "eval", "time_s": 1.0})
    queue.put({"event": "end"})
    queue.put(step(100))
    events, is_over = queue.take(0.0)
    assert is_over and queue.num_dropped == 90
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(90, 100))
    assert [e["window"] for e in events if e["event"] == "window_closed"] == [4]
    assert [e["event"] for e in events][-2:] == ["phase", "end"]
    assert queue.take(0.0) == ([], True)


def test_steps_are_taken_together_and_what_presses_at_once() -> None:
    queue = EventQueue(apart_s=60.0)
    queue.put(step(0))
    assert len(queue.take(0.0)[0]) == 1, "the first comes at once"
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 4):
            queue.put(step(number))
        taken = pool.submit(queue.take, 0.0)
        with pytest.raises(TimeoutError):
            taken.result(0.2)
        queue.put(closed(0))
        events, is_over = taken.result(30.0)
        assert [event["event"] for event in events] == ["step"] * 3 + ["window_closed"]
        queue.put(step(4))
        taken = pool.submit(queue.take, 0.0)
        queue.put({"event": "end"})
        assert not is_over and taken.result(30.0)[1]


@pytest.mark.slow
def test_only_the_newest_closed_window_is_analysed_and_the_others_are_told_of(
    directory: Path,
) -> None:
    options = companion_settings(directory)
    loop = CompanionLoop(options, open_sink=lambda _: Sink())
    for number in range(WINDOW_END):
        loop.handle(step(number), 1000.0)
    for window in (1, 2, 3, 0):  # the run has one window, which closes last
        loop.handle(closed(window), 1000.0)
    assert loop.poll(1001.0)
    assert not loop.poll(1003.0)
    loop.handle(closed(4), 1010.0)
    loop.handle(step(WINDOW_END), 1010.0)  # else the end had cut that window
    loop.finish(1011.0)
    problems = json.loads((directory / "latest" / "decision.json").read_text(encoding="utf-8"))[
        "problems"
    ]
    assert [p for p in problems if p.startswith("3 windows have no answer of their own")]
    score = json.loads((directory / "latest" / "score.json").read_text(encoding="utf-8"))
    assert score["num_skipped_windows"] == 3


def test_windows_that_follow_one_another_leave_no_problem() -> None:
    windows = ClosedWindows()
    for window in (0, 1, 2, 3, 4, 4):
        windows.close(closed(window), 1000.0)
        assert windows.problems() == ()
        windows.settle()
    assert windows.counts() == {}


def test_what_a_run_without_end_leaves_in_memory_is_bounded(directory: Path) -> None:
    score, run = Score(), ObservedRun()
    for number in range(5 * MAX_STORED_ERRORS):
        score.add(1.0 + number % 2, PredictedStep(time_s=1.1, low_s=0.9, high_s=1.3))
        run.add_bracket({"name": "eval", "time_s": 1.0})
    assert len(score.errors_frac.values) <= MAX_STORED_ERRORS
    summary = score.summary()
    assert summary["num_scored_steps"] == 5 * MAX_STORED_ERRORS
    assert summary["interval_coverage_frac"] == 0.5
    assert len(run._brackets["eval"]) == NUM_RECENT_BRACKETS
    notes: list[int] = []

    class Notes(Sink):
        def step(self, step: int, values: Any) -> None:
            notes.append(step)

    options = companion_settings(directory)
    loop = CompanionLoop(options, open_sink=lambda _: Notes())
    for number in range(MAX_WAITING_STEPS + 100):  # no window closes
        loop.handle(step(number), 1000.0)
    assert len(loop._steps._waiting) == MAX_WAITING_STEPS
    assert notes == list(range(1, 101))


def event_lines(*, more: list[dict[str, Any]]) -> str:
    events = [*map(step, range(WINDOW_END)), closed(0), *more]
    return "".join(json.dumps(event) + "\n" for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("has_end_event", [True, False])
def test_it_leaves_at_a_fixed_time_though_its_analysis_hangs(
    directory: Path, has_end_event: bool
) -> None:
    hang = "import time; from forerun.launch.companion import _companion_loop as companion_loop; "
    hang += "companion_loop.CompanionLoop._analyse = lambda *told: time.sleep(600)"
    process = started(directory, leave_after_s=7.0, before=hang)
    with process:
        process.stdin.write(event_lines(more=[{"event": "end"}] if has_end_event else []))
        process.stdin.flush()
        if not has_end_event:
            process.stdin.close()
        begin_s = time.monotonic()
        try:
            # On a busy machine the alarm may come before its own timer, which waits for a core.
            assert process.wait(120) in (0, -signal.SIGALRM)
        finally:
            process.kill()
        assert time.monotonic() - begin_s > 5.0  # it was the watchdog that ended it


@pytest.mark.slow
def test_a_disk_without_room_is_one_line_and_answers_go_on_in_the_log(directory: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))"
    process = started(directory, leave_after_s=120.0, before=limit)
    out, err = process.communicate(event_lines(more=[step(11), {"event": "end"}]), timeout=300)
    assert process.returncode == 0, err
    assert err == ""
    assert "[forerun] stopped " in out and "[forerun] checked: " in out
    assert "[forerun] scored: steps were predicted " in out and "in the median of 1;" in out
    (line,) = [text for text in out.splitlines() if "cannot write" in text]
    assert str(directory) in line and "File too large" in line
    assert "raise the limit of file size" in line and "free space" not in line
    # Files that had room are there, and nothing is half written.
    assert (
        json.loads((directory / "latest" / "forecast.json").read_text(encoding="utf-8"))[
            "steps_left"
        ]
        >= 0
    )
    assert (
        not list(directory.glob(".*.tmp")) and not (directory / "latest" / "report.html").exists()
    )


@pytest.mark.slow
def test_a_log_that_nobody_reads_ends_nothing(directory: Path) -> None:
    process = started(directory, leave_after_s=120.0)
    process.stdout.close()
    process.stdin.write(event_lines(more=[{"event": "end"}]))
    process.stdin.flush()
    assert process.wait(300) in (0, 120)  # 120: Python could not empty its own standard output
    assert (directory / "latest" / "report.html").exists()
    process.stdin.close()
    process.stderr.close()
