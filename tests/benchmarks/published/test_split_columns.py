"""No reader of published steps drops how replicas share states, or the order of passes."""

from __future__ import annotations

import pytest
from published_steps import GOLDEN, golden_frame

from forerun.benchmarks.published.readers import read_steps
from forerun.calib.records.step_rows import StepTable
from forerun.calib.workload.config import Engine, Schedule, Sharding

NAMES = sorted(path.stem for path in GOLDEN.glob("*.csv"))


def with_column(name: str, column: str, cell: object) -> tuple[StepTable, StepTable]:
    """A table as it is, and with one column more (or with all of its cells alike)."""
    frame = golden_frame(name)
    return read_steps(frame, "plain"), read_steps(frame.assign(**{column: cell}), "changed")


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_of_zero_shards_or_refuses_each_row(name: str) -> None:
    _, changed = with_column(name, "zero_stage", 2)
    for row in changed.rows:
        par = row.config.parallelism
        assert (par.sharded, par.engine) == (Sharding.GRADS, Engine.DEEPSPEED)
    plain, _ = with_column(name, "zero_stage", None)
    refused = len(changed.skipped) - len(plain.skipped)
    assert sum("zero_stage" in row.reason for row in changed.skipped) >= refused
    assert "zero_stage" not in changed.unused


@pytest.mark.parametrize("name", NAMES)
def test_full_sharding_shards_or_refuses_each_row(name: str) -> None:
    column = "sharding" if "llmfoundry" in name else "fsdp"
    plain, changed = with_column(name, column, "FULL_SHARD")
    assert all(row.config.parallelism.shards_weights for row in changed.rows)
    assert len(changed.rows) == len(plain.rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_run_or_refuses_each_row(name: str) -> None:
    column = "pp_schedule_in_config" if "vtrain" in name else "schedule"
    plain, changed = with_column(name, column, "zb_h1")
    for row in changed.rows:
        par = row.config.parallelism
        assert par.schedule is (Schedule.ZERO_BUBBLE_H1 if par.pp > 1 else Schedule.ONE_F_ONE_B)
    more = [row.reason for row in changed.skipped if "schedule" in row.reason]
    assert len(changed.rows) + len(more) == len(plain.rows)
    _, unknown = with_column(name, column, "dualpipe")
    assert all(row.config.parallelism.pp == 1 for row in unknown.rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_sharding_by_any_other_name_refuses_each_row(name: str) -> None:
    plain, changed = with_column(name, "hybrid_shard_groups", 4)
    assert not changed.rows
    reasons = [row.reason for row in changed.skipped if "hybrid_shard_groups" in row.reason]
    assert len(reasons) == len(plain.rows)
    _, off = with_column(name, "hybrid_shard_groups", False)
    assert len(off.rows) == len(plain.rows)
    assert "hybrid_shard_groups" in off.unused
