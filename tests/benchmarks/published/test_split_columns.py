"""No reader of published steps drops how replicas share states, or the order of passes."""

from __future__ import annotations

import pytest
from published_steps import GOLDEN, golden_frame

from forerun.benchmarks.published.readers import read_steps
from forerun.calib.records.step_rows import StepTable

NAMES = sorted(path.stem for path in GOLDEN.glob("*.csv"))


def with_column(name: str, column: str, cell: object) -> tuple[StepTable, StepTable]:
    """A table as it is, and with one column more (or with all of its cells alike)."""
    frame = golden_frame(name)
    return read_steps(frame, "plain"), read_steps(frame.assign(**{column: cell}), "changed")


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_of_zero_refuses_each_row(name: str) -> None:
    plain, changed = with_column(name, "zero_stage", 2)
    assert not changed.rows
    assert sum("zero_stage" in row.reason for row in changed.skipped) >= len(plain.rows)
    assert "zero_stage" not in changed.unused


@pytest.mark.parametrize("name", NAMES)
def test_full_sharding_shards_or_refuses_each_row(name: str) -> None:
    column = "sharding" if "llmfoundry" in name else "fsdp"
    plain, changed = with_column(name, column, "FULL_SHARD")
    assert all(row.config.parallelism.shards_weights for row in changed.rows)
    assert len(changed.rows) == len(plain.rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_that_megatron_does_not_run_refuses_each_row(name: str) -> None:
    column = "pp_schedule_in_config" if "vtrain" in name else "schedule"
    plain, changed = with_column(name, column, "zb_h1")
    assert all(row.config.parallelism.pp == 1 for row in changed.rows)
    more = [row.reason for row in changed.skipped if "schedule" in row.reason]
    assert len(changed.rows) + len(more) == len(plain.rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_sharding_by_any_other_name_refuses_each_row(name: str) -> None:
    plain, changed = with_column(name, "hybrid_shard_groups", 4)
    assert not changed.rows
    reasons = [row.reason for row in changed.skipped if "hybrid_shard_groups" in row.reason]
    assert len(reasons) == len(plain.rows)
    _, off = with_column(name, "hybrid_shard_groups", False)
    assert len(off.rows) == len(plain.rows)
    assert "hybrid_shard_groups" in off.unused
