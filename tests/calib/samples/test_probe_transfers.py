"""Probes of transfers: what disturbs some repeats is not theirs, and a control carries over what
training adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, Record
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.collectives import Collective, GroupRole

ALONE_NS, CONTROL_NS, LIVE_NS = 230_000, 2_500_000, 4_000_000
CONTROL_NBYTES, OTHER_NBYTES = 1 << 20, 1 << 12


@pytest.fixture
def run(write_run) -> RunRecords:
    return read_run(write_run())


def transfer(
    rank: int, repeat: int, duration_ns: int, *, nbytes: int = OTHER_NBYTES, live: bool = False
) -> CollectiveRecord:
    """Over both ranks; the late one is ``rank`` 1, which waits least."""
    return CollectiveRecord(
        step=4 if live else 9,
        window=0,
        collective=Collective.ALL_REDUCE,
        role=GroupRole.DP if nbytes == CONTROL_NBYTES else GroupRole.TP,
        group="both",
        ranks=(0, 1),
        nbytes=nbytes,
        sequence=1000 + repeat,
        peer=-1,
        is_async=False,
        is_bound=False,
        issue_ns=0,
        duration_ns=duration_ns + 50_000 * (rank == 0),
        exposed_ns=duration_ns,
        is_probe=not live,
    )


def probed(run: RunRecords, disturbed_ns: int, *, device: str = "cpu", live: bool) -> SampleTable:
    """Three of five repeats lie where something else ran for a while."""
    more: dict[int, tuple[Record, ...]] = {}
    for rank in (0, 1):
        collective_records = [
            transfer(rank, number, ALONE_NS + disturbed_ns * (number < 3)) for number in range(5)
        ]
        collective_records += [
            transfer(
                rank, 10 + number, CONTROL_NS + disturbed_ns * (number < 3), nbytes=CONTROL_NBYTES
            )
            for number in range(5)
        ]
        if live:
            steps = {r.step for r in run.records[rank] if isinstance(r, CollectiveRecord)}
            collective_records += [
                replace(
                    transfer(rank, 20 + place, LIVE_NS, nbytes=CONTROL_NBYTES, live=True), step=step
                )
                for place, step in enumerate(sorted(steps))
            ]
        more[rank] = tuple(collective_records)
    records = {
        rank: (*rank_records, *more.get(rank, ())) for rank, rank_records in run.records.items()
    }
    headers = {rank: replace(header, device=device) for rank, header in run.headers.items()}
    return build_table(replace(run, records=records, headers=headers))


def time_s(table: SampleTable, nbytes: int) -> float:
    rows = table.collectives
    (result,) = rows[rows["is_probe"] & (rows["nbytes"] == nbytes)]["time_s"]
    return result


@pytest.mark.parametrize("disturbed_ns", [0, 15_000_000])
def test_the_wakening_of_threads_is_added_on_a_cpu(run: RunRecords, disturbed_ns: int) -> None:
    table = probed(run, disturbed_ns, live=True)
    expected = ALONE_NS + LIVE_NS - CONTROL_NS
    assert time_s(table, OTHER_NBYTES) == pytest.approx(expected / 1e9, rel=0.01)
    assert time_s(table, CONTROL_NBYTES) == pytest.approx(LIVE_NS / 1e9, rel=0.01)


def test_an_accelerator_carries_the_ratio_over(run: RunRecords) -> None:
    table = probed(run, 15_000_000, device="NVIDIA A100-SXM4-80GB", live=True)
    expected = ALONE_NS * LIVE_NS / CONTROL_NS
    assert time_s(table, OTHER_NBYTES) == pytest.approx(expected / 1e9, rel=0.01)


def test_without_a_control_the_median_stands(run: RunRecords) -> None:
    assert time_s(probed(run, 0, live=False), OTHER_NBYTES) == pytest.approx(ALONE_NS / 1e9)
