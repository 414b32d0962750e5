"""Waiting for a device's host, and the host's own times, from records to the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.errors import RecordError
from forerun.calib.records.record_kinds import OperatorRecord, PhaseRecord, from_dict, to_dict
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.operators import OperatorKind, Phase

PASSES = ("forward-compute", "backward-compute")
RECORD = OperatorRecord(
    step=0, window=0, microbatch=0, kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 8),
    element_nbytes=2, layer=1, start_ns=0, duration_ns=1000,
)  # fmt: skip


def test_a_line_has_it_only_where_there_was_any() -> None:
    assert "host_bound_ns" not in to_dict(RECORD)
    waited = replace(RECORD, host_bound_ns=400)
    assert to_dict(waited)["host_bound_ns"] == 400
    for record in (RECORD, waited):
        assert from_dict(to_dict(record)) == record
    with pytest.raises(RecordError):
        from_dict({**to_dict(waited), "host_bound_ns": -1})


def test_a_row_has_the_share_of_its_events(write_run) -> None:
    run = read_run(write_run())
    plain = build_table(run)
    assert not plain.samples["host_bound_frac"].any()
    seen = 0

    def waits(record):
        nonlocal seen
        if not isinstance(record, OperatorRecord):
            return record
        seen += 1
        return replace(record, host_bound_ns=record.duration_ns // 2 * (seen % 2))

    records = {rank: tuple(map(waits, rows)) for rank, rows in run.records.items()}
    table = build_table(replace(run, records=records))
    shares = table.samples.set_index("kind")["host_bound_frac"]
    assert shares["linear_fc1"] == pytest.approx(0.25, abs=0.02)
    assert (shares.drop("linear_fc1") == 0.0).all()
    columns = plain.samples.columns.drop("host_bound_frac")
    assert table.samples[columns].equals(plain.samples[columns])


def test_a_row_has_the_median_time_of_the_host_over_the_events_that_know_it(write_run) -> None:
    run = read_run(write_run())
    plain = build_table(run)
    assert not plain.samples[["host_s", "host_spread_log"]].any().any()

    def launches(record):
        """The first micro-batch knows it, and one step is slow."""
        if not isinstance(record, OperatorRecord) or record.microbatch:
            return record
        return replace(record, host_ns=9000 if record.step == 0 else 1000 + record.step)

    records = {rank: tuple(map(launches, rows)) for rank, rows in run.records.items()}
    table = build_table(replace(run, records=records))
    rows = table.samples.set_index("kind")
    assert rows["host_s"]["linear_fc1"] == pytest.approx(1.005e-6, rel=0.004)
    assert 0.0 < rows["host_spread_log"]["linear_fc1"] < 0.01
    assert not rows["host_s"].drop("linear_fc1").any()
    columns = plain.samples.columns.drop(["host_s", "host_spread_log"])
    assert table.samples[columns].equals(plain.samples[columns])
    assert table.sha256 != plain.sha256


def test_a_line_has_the_hosts_time_only_where_it_is_known() -> None:
    assert "host_ns" not in to_dict(RECORD)
    timed = replace(RECORD, host_ns=400)
    assert to_dict(timed)["host_ns"] == 400 and from_dict(to_dict(timed)) == timed
    with pytest.raises(RecordError):
        from_dict({**to_dict(timed), "host_ns": -1})


def test_what_recorded_operators_add_is_the_difference_of_passes_of_one_step(write_run) -> None:
    """Passes of one micro-batch in four have operators, and take 3 ms longer."""
    run = read_run(write_run())

    def thinned(records):
        for record in records:
            if isinstance(record, OperatorRecord) and record.microbatch % 4:
                continue
            is_pass = isinstance(record, PhaseRecord) and record.name in PASSES
            if is_pass and not record.microbatch % 4:
                yield replace(record, duration_ns=record.duration_ns + 3_000_000)
            else:
                yield record

    records = {rank: tuple(thinned(rows)) for rank, rows in run.records.items()}
    headers = {rank: replace(h, device="H100") for rank, h in run.headers.items()}
    table = build_table(replace(run, records=records, headers=headers))
    hooked = table.steps[table.steps["is_hooked"] & table.steps["is_clean"]]
    assert len(hooked) and hooked["added_s"].to_numpy() == pytest.approx(0.003, rel=0.2)
    assert not table.steps.loc[~table.steps["is_hooked"], "added_s"].any()
    cost = Measurements(table=table).overhead
    assert cost is not None and cost.at_operators is not None
    assert cost.at_operators[1] <= cost.at_operators[0] <= cost.at_operators[2]
    assert not build_table(run).steps["added_s"].any()  # on a CPU marks cost little
