"""Durations that are planted in a dump of the flight recorder's format come back in the records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.calib.errors import RecordError
from forerun.calib.records.flight import HostSpan, parse_dump, with_durations
from forerun.calib.records.record_kinds import CollectiveRecord, PhaseRecord
from forerun.calib.workload.collectives import Collective, GroupRole

GROUP = ("4", "DATA_PARALLEL_GROUP")
SPANS = {3: HostSpan(begin_ns=1000, end_ns=2000), 6: HostSpan(begin_ns=3000, end_ns=4000)}


def entry(number: int, name: str, created_ns: int, duration_ms: float | None) -> dict:
    result = {
        "record_id": number,
        "process_group": list(GROUP),
        "profiling_name": name,
        "time_created_ns": created_ns,
        "state": "completed",
    }
    return result if duration_ms is None else {**result, "duration_ms": duration_ms}


def dump(*entries: dict) -> str:
    return json.dumps({"version": "2.10", "entries": entries})


def record(step: int, sequence: int, **changes: object) -> CollectiveRecord:
    known = CollectiveRecord(
        step=step,
        window=0,
        collective=Collective.REDUCE_SCATTER,
        role=GroupRole.DP,
        group="DATA_PARALLEL_GROUP#4",
        ranks=(8, 9),
        nbytes=64,
        sequence=sequence,
        peer=-1,
        is_async=True,
        is_bound=True,
        issue_ns=0,
        duration_ns=999,
        exposed_ns=0,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def amended(records, *entries):
    return list(with_durations(records, parse_dump(dump(*entries)), SPANS))


NAME = "nccl:_reduce_scatter_base"


def test_planted_durations_come_back_in_order_of_calling():
    records = [record(3, 0), record(3, 1), record(6, 0)]
    entries = [entry(2, NAME, 1600, 0.25), entry(0, NAME, 900, 9.0), entry(1, NAME, 1500, 0.5),
               entry(3, NAME, 2500, 9.0), entry(4, NAME, 3500, 0.125)]  # fmt: skip
    result = amended(records, *entries)
    assert [r.duration_ns for r in result] == [500_000, 250_000, 125_000]
    assert not any(r.is_bound for r in result)


@pytest.mark.parametrize(
    "entries",
    [
        [entry(1, NAME, 1500, 0.5)],  # the ring has forgotten one
        [entry(n, NAME, 1500 + n, 0.5) for n in range(3)],
        [entry(1, NAME, 1500, None), entry(2, NAME, 1600, None)],  # not timed, or not retired
        [entry(1, "nccl:all_reduce", 1500, 0.5), entry(2, "nccl:all_reduce", 1600, 0.5)],
    ],
)
def test_what_does_not_match_keeps_its_bound(entries):
    records = [record(3, 0), record(3, 1)]
    assert amended(records, *entries) == records


def test_messages_are_matched_by_the_place_of_their_peer():
    sends = [
        record(3, 0, collective=Collective.SEND, peer=9),
        record(3, 0, collective=Collective.RECV, peer=9),
    ]
    records = amended(
        sends, entry(1, "nccl:send 0->1", 1500, 0.5), entry(2, "nccl:recv 0<-1", 1501, 0.25)
    )
    assert [r.duration_ns for r in records] == [500_000, 250_000]


def test_synchronous_calls_and_all_else_stay_as_they_are():
    phase = PhaseRecord(step=3, window=0, name="p", microbatch=0, start_ns=0, duration_ns=1)
    records = [phase, record(3, 0, is_async=False, is_bound=False), phase, record(6, 0), phase]
    result = amended(records, entry(1, NAME, 1500, 0.5), entry(2, NAME, 3500, 0.5))
    assert result[:3] == records[:3]
    assert (result[3].duration_ns, result[4]) == (500_000, phase)


@pytest.mark.parametrize("text", ["no json", '{"entries": [{"record_id": 1}]}', "[]"])
def test_another_format_is_named(text):
    with pytest.raises(RecordError, match="not of the known format"):
        parse_dump(text)
