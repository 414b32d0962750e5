"""The share of an operator in which a device waited for the host, from records to the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.errors import RecordError
from forerun.calib.records.record_kinds import OperatorRecord, from_dict, to_dict
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.operators import OperatorKind, Phase

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
