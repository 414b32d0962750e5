"""A window's line has the same records as its marks, and damage costs no more than it must."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_steps import SimulatedRank, steps

from forerun.calib.errors import RecordError
from forerun.calib.marks.marked_window import MarkedWindow
from forerun.calib.marks.run_records import MAX_MARKS, RankFile
from forerun.calib.marks.step_marks import NO_TIME, Issued
from forerun.calib.marks.window_calls import KnownGroup, WindowCalls
from forerun.calib.marks.window_records import WindowRecords, records_of
from forerun.calib.records.flight import FlightEntry, HostSpan
from forerun.calib.records.record_kinds import (
    CoverageRecord,
    Header,
    Record,
    WindowRecord,
    to_dict,
)
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.parallelism import Parallelism
from forerun.hooks.sensors.step_log import StepLog

LAYOUT = Parallelism(tp=2, pp=2)
END = WindowRecord(window=0, first_step=0, last_step=5, num_faults=0, num_dropped=3)
INSTALLED = (CoverageRecord(window=0, name="linear_qkv", installed=5, fired=0),)
HEADER = Header(
    schema=1, run_id="r", rank=0, world_size=4, created_by="", device="cpu", started_unix_s=1.0
)
CALLS = WindowCalls(
    entries=(
        (
            FlightEntry(
                group="g#0",
                collective=Collective.ALL_REDUCE,
                peer=-1,
                created_unix_ns=12,
                duration_ns=None,
                number=4,
                nbytes=64,
            ),
        ),
    ),
    spans={1: HostSpan(begin_ns=10, end_ns=20, clock_ns=5)},
    groups={"g#0": KnownGroup(role=GroupRole.DP, ranks=(0, 1))},
    unseen_names=("collectives of DDP",),
    gaps=("collectives of gloo: unseen",),
)


def fail(reason: object) -> None:
    raise AssertionError(reason)


def marked(layout: Parallelism = LAYOUT) -> MarkedWindow:
    rank = SimulatedRank(layout, 0, num_layers=2, num_microbatches=4)
    pairs = [*steps(rank, range(1, 6, 2))]
    for _, log in pairs:
        log.resolve()
    return MarkedWindow(
        steps=[log for _, log in pairs],
        step_ns={record.step: record.duration_ns for record, _ in pairs},
        end=END,
        installed=INSTALLED,
    )


def read(line: str) -> MarkedWindow:
    return MarkedWindow.from_json(json.loads(line), fail)


def made(window: MarkedWindow) -> list[dict]:
    return [to_dict(record) for record in records_of(window, fail)]


def directly(window: MarkedWindow) -> Iterator[Record]:
    """The records that the marks give without a file."""
    known = WindowRecords(logs=[*window.steps], step_ns=dict(window.step_ns))
    for log in window.steps:
        yield from known.of(log)
    end = known.counted(END)
    yield from (*known.coverage(INSTALLED, end), known.summary(end), end)


@pytest.mark.parametrize("layout", [Parallelism(tp=2, pp=2), Parallelism(dp=4)])
def test_a_line_has_the_records_of_the_marks(layout: Parallelism) -> None:
    window = marked(layout)
    expected = [to_dict(record) for record in directly(marked(layout))]
    assert made(read(window.to_line(fail))) == made(marked(layout)) == expected
    assert len(expected) > 100 and expected[-1]["type"] == "window"


columns = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
times = st.lists(st.integers(0, 2**61) | st.just(NO_TIME), max_size=20)


@settings(max_examples=60, deadline=None)
@given(what=columns, marks=times, host=times, is_device=st.booleans(), nbytes=st.integers(0, 2**62))
def test_every_column_comes_back(
    what: list[int], marks: list[int], host: list[int], is_device: bool, nbytes: int
) -> None:
    log = StepLog(step=7, window=2, sites=(), samples=range(3), site_weights=[0.5, 2.0])
    log.what, log.marks = array("i", what), array("q", marks)
    log.transfer_nbytes.append(nbytes)
    log.shapes = [(((4, 2, 64), (8, 2, 96), None), 2)]
    log.counted[1, nbytes] = 3
    log.untimed_passes |= {2, 5}
    log.issued = Issued(host_ns=array("q", host), late=3, queried_ns=9) if is_device else None
    sent = MarkedWindow(steps=[log], calls=CALLS)
    (step,), window = read(sent.to_line(fail)).steps, read(sent.to_line(fail))
    assert window.calls == CALLS and window.end is None and not window.installed
    assert (step.what, step.marks, step.issued) == (log.what, log.marks, log.issued)
    assert step.transfer_nbytes == log.transfer_nbytes and step.shapes == log.shapes
    assert (step.counted, step.untimed_passes) == (log.counted, log.untimed_passes)
    assert (*step.samples,) == (0, 1, 2) and step.site_weights == (0.5, 2.0)


def lines_of(window: MarkedWindow) -> list[str]:
    return [json.dumps(to_dict(HEADER)) + "\n", window.to_line(fail)]


def taken(*lines: str) -> RankFile:
    file = RankFile("rank")
    file.take(lines)
    return file


def test_a_disturbed_step_says_nothing_of_the_calls_of_others() -> None:
    """In a file without room it is left out: the others' weights are the same there."""

    def others(*, has_disturbed: bool) -> list[dict]:
        window = marked(Parallelism(tp=2, pp=2))
        disturbed = window.steps[0]
        disturbed.num_pass_calls = [3 * count for count in disturbed.num_pass_calls]
        del window.step_ns[disturbed.step]
        window.steps = window.steps if has_disturbed else window.steps[1:]
        return [row for row in made(window) if row.get("step") not in (None, disturbed.step)]

    rows = others(has_disturbed=True)
    assert rows == others(has_disturbed=False)
    assert {row["stands_for"] for row in rows if row["type"] == "collective"} == {1.0}


def test_a_damaged_step_costs_itself_alone() -> None:
    head, line = lines_of(marked())
    value = json.loads(line)
    value["steps"][1] = value["steps"][1][:-40]
    file = taken(head, json.dumps(value))
    (problem,) = file.problems
    assert problem.startswith("rank:2: marks of hooked step 1 are damaged (")
    assert {record.step for record in file.records if hasattr(record, "microbatch")} == {1, 5}
    assert to_dict(file.records[-1])["type"] == "window"


@pytest.mark.parametrize("length", [10, 200, -30])
def test_a_torn_line_costs_its_window_alone(length: int) -> None:
    head, line = lines_of(marked())
    file = taken(head, line, line[:length] + "\n", line)
    assert len(file.problems) == 1 and len(file.records) == 2 * len(taken(head, line).records)


def inconsistent(log: StepLog) -> None:
    log.what[5] = 2**20 << 4


def test_an_inconsistent_step_is_named_and_the_others_stay() -> None:
    window = marked()
    inconsistent(window.steps[0])  # type: ignore[arg-type]
    file = taken(*lines_of(window))
    (problem,) = file.problems
    assert "marks of step 1 are inconsistent" in problem
    (end,) = (record for record in file.records if isinstance(record, WindowRecord))
    assert end.num_dropped == END.num_dropped + 1


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["head", "steps"]), st.booleans())
def test_noise_is_refused_with_words(data: bytes, where: str, is_packed: bool) -> None:
    value = json.loads(lines_of(MarkedWindow(steps=[], end=END))[1])
    text = base64.b64encode(zlib.compress(data) if is_packed else data).decode()
    value[where] = text if where == "head" else [text]
    file = taken(json.dumps(to_dict(HEADER)) + "\n", json.dumps(value) + "\n")
    assert len(file.problems) == 1 and "damaged" in file.problems[0]


def test_a_small_file_does_not_unpack_to_a_huge_one() -> None:
    log = StepLog(step=1, window=0, sites=())
    log.what, log.marks = array("i", bytes(8_000_000)), array("q", bytes(16_000_000))
    head, line = lines_of(MarkedWindow(steps=[log] * 8))
    assert len(line) < 10_000_000
    file = taken(head, line)
    assert "marks of hooked step 5 are damaged" in file.problems[0]
    assert file.num_marks == 5 * len(log.what)
    file = taken(head, line, line)
    assert file.is_over and f"more than {MAX_MARKS} marks" in file.problems[-1]


def test_what_steps_share_is_needed() -> None:
    with pytest.raises(RecordError, match="line with marks is damaged"):
        MarkedWindow.from_json({"type": "marks", "steps": []}, fail)
