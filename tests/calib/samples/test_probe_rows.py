"""Probes in the table: planted times come back corrected by their control, and in no step's sum."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from forerun.calib.fit.calibration import calibrate
from forerun.calib.fit.estimates import Source
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, Record, from_dict
from forerun.calib.samples.store import read_run, read_table, write_table
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

LIVE_NS = 300_000
CONTROL_NS, WIDE_NS = 240_000, 1_000_000
SEND_NS = 90_000
CONTROL_SHAPE, WIDE = (256, 256, 512), (1024, 256, 512)


@pytest.fixture
def run(write_run) -> RunRecords:
    return read_run(write_run())


def operator(shape: tuple[int, ...], repeat: int, duration_ns: int) -> OperatorRecord:
    return OperatorRecord(
        step=9,
        window=0,
        microbatch=repeat,
        kind=OperatorKind.LINEAR_FC1,
        phase=Phase.FORWARD,
        shape=shape,
        element_nbytes=4,
        layer=0,
        start_ns=0,
        duration_ns=duration_ns,
        is_probe=True,
    )


def message(rank: int, repeat: int, duration_ns: int) -> CollectiveRecord:
    return CollectiveRecord(
        step=9,
        window=0,
        collective=Collective.SEND if rank == 0 else Collective.RECV,
        role=GroupRole.PP,
        group="group",
        ranks=(0, 1),
        nbytes=4096,
        sequence=repeat,
        peer=1 - rank,
        is_async=False,
        is_bound=False,
        issue_ns=0,
        duration_ns=duration_ns,
        exposed_ns=duration_ns,
        is_probe=True,
    )


def with_probes(run: RunRecords, *, device: str = "cpu") -> RunRecords:
    """Five repeats each, one of them disturbed; the receiver of a message is there first."""
    records: dict[int, tuple[Record, ...]] = {}
    for rank, rank_records in run.records.items():
        extra: list[Record] = []
        for repeat in range(5):
            slow = 30 if repeat == 3 else 1
            extra.append(operator(CONTROL_SHAPE, repeat, CONTROL_NS * slow))
            extra.append(operator(WIDE, repeat, WIDE_NS * slow))
            extra.append(message(rank, repeat, SEND_NS * slow + 50_000 * rank))
        records[rank] = (*rank_records, *extra)
    headers = {rank: replace(header, device=device) for rank, header in run.headers.items()}
    return replace(run, records=records, headers=headers)


def wide_s(table: SampleTable) -> float:
    rows = table.samples[(table.samples["shape"] == "1024x256x512") & table.samples["is_probe"]]
    assert len(rows) == 1
    return float(rows["time_s"].iloc[0])


@pytest.mark.parametrize(
    ("device", "expected_ns"),
    [
        ("cpu", WIDE_NS + LIVE_NS - CONTROL_NS),
        ("NVIDIA A100-SXM4-80GB", WIDE_NS * LIVE_NS / CONTROL_NS),
    ],
)
def test_what_a_control_lacks_is_carried_over(
    run: RunRecords, device: str, expected_ns: float
) -> None:
    assert wide_s(build_table(with_probes(run, device=device))) == pytest.approx(expected_ns / 1e9)


def test_a_transfer_is_matched_on_both_ends(run: RunRecords) -> None:
    samples = build_table(with_probes(run)).samples
    row = samples[(samples["kind"] == "send") & samples["is_probe"]]
    assert row["time_s"].tolist() == [pytest.approx(SEND_NS / 1e9)]
    assert (row["num_ranks"].tolist(), row["role"].tolist()) == ([2], ["pp"])


@pytest.mark.slow
def test_nothing_of_the_run_itself_changes(run: RunRecords) -> None:
    bare, probed = build_table(run), build_table(with_probes(run))
    for spec in fields(SampleTable):
        ours = getattr(probed, spec.name)
        if spec.name == "samples":
            ours = ours[~ours["is_probe"]].reset_index(drop=True)
        assert ours.equals(getattr(bare, spec.name)), spec.name


def test_live_times_win_and_probes_are_named(run: RunRecords) -> None:
    table = build_table(with_probes(run))
    calibration = calibrate(table, device="cpu")
    control, wide = (
        Operator(kind=OperatorKind.LINEAR_FC1, phase=Phase.FORWARD, shape=s, element_nbytes=4)
        for s in (CONTROL_SHAPE, WIDE)
    )
    estimates = calibration.operators([control, wide])
    assert estimates.sources == (Source.MEASURED, Source.PROBED)
    assert estimates.time_s[0] == pytest.approx(LIVE_NS / 1e9)
    call = CollectiveCall(collective=Collective.SEND, role=GroupRole.PP, num_ranks=2, nbytes=4096)
    assert calibration.collectives([call]).sources == (Source.PROBED,)


def test_the_table_keeps_which_rows_are_probes(run: RunRecords, tmp_path) -> None:
    table = build_table(with_probes(run))
    write_table(tmp_path / "samples.parquet", table)
    assert read_table(tmp_path / "samples.parquet").equals(table)


def test_records_of_before_are_no_probes() -> None:
    value = {
        "type": "operator",
        "step": 1,
        "window": 0,
        "microbatch": 0,
        "kind": "norm",
        "phase": "forward",
        "shape": [4, 4],
        "element_nbytes": 4,
        "layer": 0,
        "start_ns": 0,
        "duration_ns": 5,
    }
    record = from_dict(value)
    assert isinstance(record, OperatorRecord) and not record.is_probe
