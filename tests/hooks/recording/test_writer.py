"""Files: what is written, and what happens where it cannot be."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from forerun.calib.marks.marked_window import TYPE, MarkedWindow
from forerun.calib.marks.window_calls import WindowCalls
from forerun.calib.marks.window_records import records_of
from forerun.calib.records.record_kinds import (
    SCHEMA,
    CoverageRecord,
    Header,
    OperatorRecord,
    StepRecord,
    WindowRecord,
    to_dict,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.operators import OperatorKind
from forerun.hooks.process.guard import Guard
from forerun.hooks.recording import _bounded_window as bounded_window
from forerun.hooks.recording import writer as writer_module
from forerun.hooks.recording.flight_recorder import FlightWindow
from forerun.hooks.recording.writer import RecordWriter, WindowEnd
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch


def header() -> Header:
    return Header(
        schema=SCHEMA,
        run_id="r",
        rank=0,
        world_size=1,
        created_by="test",
        device="cpu",
        started_unix_s=1.0,
    )


def step(number: int) -> StepRecord:
    return StepRecord(step=number, window=0, start_ns=0, duration_ns=5, gap_ns=0, is_hooked=False)


def window_end(**more) -> WindowEnd:
    record = WindowRecord(window=0, first_step=0, last_step=1, num_faults=0, num_dropped=0)
    return WindowEnd(record=record, **more)


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path, header, Guard())


problems: list[str] = []


def lines(path: Path) -> list[dict]:
    """The lines of a file, a window's marks as the records that a reader makes of them."""
    known: list[dict] = []
    for line in path.read_text().splitlines():
        value = json.loads(line)
        if value["type"] == TYPE:
            window = MarkedWindow.from_json(value, problems.append)
            known += map(to_dict, records_of(window, problems.append))
        else:
            known.append(value)
    return known


def test_a_file_starts_with_its_header_and_keeps_the_order(
    writer: RecordWriter, tmp_path: Path
) -> None:
    for number in range(3):
        assert writer.put(step(number))
    writer.close()
    written = lines(tmp_path / "records" / "r" / "rank-00000.jsonl")
    assert [r["type"] for r in written] == ["header", "step", "step", "step"]
    assert [r["step"] for r in written[1:]] == [0, 1, 2]
    assert read_run(tmp_path, "r").problems == ()


def test_nothing_is_created_before_the_first_record(writer: RecordWriter, tmp_path: Path) -> None:
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_operators_follow_when_the_window_closes_and_coverage_counts_what_fired(
    writer: RecordWriter, tmp_path: Path, clock
) -> None:
    recorder = Recorder(HostStopwatch(clock))
    site = Site(kind=OperatorKind.NORM)
    log = recorder.open(StepLog(step=1, window=0, sites=(site, site)))
    span = recorder.begin_span(0)
    recorder.end_span(span, clock(), ((4, 8), (4, 8)), 4)
    recorder.close()
    log.resolve()
    written = threading.Event()
    writer.put(log)
    writer.put(step(1))
    writer.put(
        window_end(
            coverage=(CoverageRecord(window=0, name="norm", installed=2, fired=0),),
            on_written=written.set,
        )
    )
    assert written.wait(20)
    path = tmp_path / "records" / "r" / "rank-00000.jsonl"
    types = ["header", "step", "operator", "coverage", "rank", "window"]
    assert [r["type"] for r in lines(path)] == types
    coverage = lines(path)[3]
    assert (coverage["installed"], coverage["fired"]) == (2, 1)
    writer.close()


def test_a_window_cut_off_by_the_end_is_written_all_the_same(
    writer: RecordWriter, tmp_path: Path, clock
) -> None:
    recorder = Recorder(HostStopwatch(clock))
    log = recorder.open(StepLog(step=1, window=0, sites=()))
    recorder.begin_phase("x")
    recorder.end_phase("x")
    recorder.close()
    log.resolve()
    writer.put(log)
    writer.close()
    path = tmp_path / "records" / "r" / "rank-00000.jsonl"
    assert [r["type"] for r in lines(path)] == ["header", "phase"]


def test_a_restarted_worker_goes_on_in_its_file(tmp_path: Path) -> None:
    for number in range(2):
        writer = RecordWriter(tmp_path, header, Guard())
        writer.put(step(number))
        writer.close()
    run = read_run(tmp_path, "r")
    assert [r.step for r in run.records[0]] == [0, 1] and run.problems == ()


def test_a_full_queue_drops_counts_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()

    def slow_header() -> Header:
        entered.set()
        release.wait(20)
        return header()

    monkeypatch.setattr(writer_module, "QUEUE_LENGTH", 2)
    writer = RecordWriter(tmp_path, slow_header, Guard())
    assert writer.put(step(0))
    assert entered.wait(20)
    assert [writer.put(step(n)) for n in range(1, 6)] == [True, True, False, False, False]
    assert writer.num_dropped == 3
    release.set()
    writer.close()


@pytest.mark.parametrize("kind", ["a file", "a place where nothing can be made"])
def test_a_directory_that_cannot_be_written_switches_recording_off_in_one_line(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "out"
    if kind == "a file":
        target.write_text("in the way")
    else:
        target.symlink_to("/proc/self")
    writer = RecordWriter(target, header, Guard())
    with caplog.at_level(logging.WARNING):
        for number in range(4):
            writer.put(step(number))
        writer.close()
    assert writer.is_broken
    assert len(caplog.records) == 1
    assert "recording is off" in caplog.text and "--calibrate-dir" in caplog.text


@pytest.mark.parametrize("kind", ["a file", "a pipe", "a limit of size"])
def test_the_remedy_follows_what_the_file_raised(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Freeing space helps against none of these."""
    target = tmp_path / "out"
    if kind == "a limit of size":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    elif kind == "a pipe":
        os.mkfifo(target)
    else:
        target.touch()
    writer = RecordWriter(target, header, Guard())
    try:
        writer.put(step(0))
        writer.close()
    finally:
        if kind == "a limit of size":
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "free space" not in line
    assert ("ulimit -f" if kind == "a limit of size" else "remove it") in line


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_what_fails_while_records_are_made_is_no_failure_of_the_file(
    tmp_path: Path, clock, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    """The fault is said, and what hooks saw is written."""

    class Broken(FlightWindow):
        def read(self) -> WindowCalls:
            raise kind("the capture mode of a thread cannot be changed: error 35")

    writer = RecordWriter(tmp_path, header, guard := Guard())
    log = Recorder(HostStopwatch(clock)).open(StepLog(step=1, window=0, sites=()))
    log.resolve()
    written = threading.Event()
    writer.put(log)
    writer.put(step(1))
    writer.put(window_end(on_written=written.set, flight=Broken()))
    assert written.wait(20)
    writer.close()
    types = [r["type"] for r in lines(tmp_path / "records" / "r" / "rank-00000.jsonl")]
    assert types == ["header", "step", "rank", "window"]
    assert not writer.is_broken and (guard.num_faults, writer.num_dropped) == (1, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "hook fault" in line and "error 35" in line and "recording is off" not in line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_switches_recording_off_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = io.FileIO("/dev/full", "r+")
    monkeypatch.setattr(writer_module, "open_records", lambda path: io.BufferedWriter(full))
    writer = RecordWriter(tmp_path, header, Guard())
    with caplog.at_level(logging.WARNING):
        writer.put(step(0))
        writer.put(window_end())
        writer.close()
    assert writer.is_broken and len(caplog.records) == 1
    assert "No space left" in caplog.text


@pytest.mark.slow
def test_the_file_of_a_small_world_is_bounded_and_keeps_its_first_windows_whole(
    tmp_path: Path, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WHOLE_NBYTES", 8_000)
    monkeypatch.setattr(bounded_window, "PACKED_NBYTES", 60_000)
    writer, path = RecordWriter(tmp_path, header, Guard()), tmp_path / "records/r/rank-00000.jsonl"
    recorder, sites = Recorder(HostStopwatch(clock)), (Site(kind=OperatorKind.NORM),) * 40
    sizes, num_operators = [0], []
    for window in range(80):
        begin = 10 * window
        for number in range(begin, begin + 4):
            log = recorder.open(StepLog(step=number, window=window, sites=sites))
            for place in range(len(sites)):
                span = recorder.begin_span(place)
                recorder.end_span(span, clock(), ((4 + number, 8), (4 + number, 8)), 4)
            recorder.close()
            log.resolve()
            writer.put(log)
            row = step(number)
            writer.put(replace(row, window=window, is_hooked=True, start_ns=number))
        written = threading.Event()
        end = window_end(on_written=written.set)
        record = replace(end.record, window=window, first_step=begin, last_step=begin + 3)
        writer.put(replace(end, record=record))
        assert written.wait(20)
        sizes.append(path.stat().st_size)
    writer.close()
    run = read_run(tmp_path, "r")
    assert run.problems == () and not writer.is_broken
    ends = [r.window for r in run.records[0] if isinstance(r, WindowRecord)]
    assert ends == list(range(80))
    num_operators = Counter(r.window for r in run.records[0] if isinstance(r, OperatorRecord))
    # Whole windows first, then such as still fit, at last their ends alone.
    assert num_operators[0] == 4 * len(sites) and num_operators[79] == 0
    assert sorted(num_operators.values(), reverse=True) == list(num_operators.values())
    growth = [after - before for before, after in pairwise(sizes)]
    assert growth[0] > 3_000 > 1000 > growth[-1] > 0
    assert len(num_operators) > 4


@pytest.mark.parametrize("kind", ["dangling", "link", "fifo", "folder"])
def test_what_lies_in_the_place_of_the_file_is_left_alone_and_holds_nothing_up(
    writer: RecordWriter, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, victim = tmp_path / "records" / "r" / "rank-00000.jsonl", tmp_path / "victim"
    path.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim)
    if kind == "link":
        victim.write_text(json.dumps(to_dict(header())) + "\n")
    before = victim.read_bytes() if kind == "link" else None
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            writer.put(step(number))
        begin_s = time.monotonic()
        writer.close()
    assert time.monotonic() - begin_s < 5.0
    assert (victim.read_bytes() if victim.exists() else None) == before
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and str(path) in messages[0] and "remove it" in messages[0]
    assert "training goes on" in messages[0]


def test_a_file_that_is_no_record_is_moved_aside_and_a_torn_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "records" / "r" / "rank-00000.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("somebody's notes")
    for number in range(2):
        with path.open("a") as file:
            file.write("{torn" * number)
        writer = RecordWriter(tmp_path, header, Guard())
        writer.put(step(number))
        writer.close()
    assert path.with_name(path.name + ".damaged").read_text() == "somebody's notes"
    whole = [line for line in path.read_text().splitlines() if line != "{torn"]
    assert [json.loads(line)["type"] for line in whole] == ["header", "step"] * 2


def test_training_loads_nothing_that_makes_records_of_marks() -> None:
    """Marks are read by the companion, or later."""
    program = (
        "import forerun.hooks.session.session, forerun.hooks.session.instruments\n"
        "import forerun.hooks.recording.kineto, sys\n"
        "print(*(name for name in sys.modules if name.startswith('forerun.calib.marks.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert names == {"marked_window", "step_marks", "traced_step", "window_calls"}
