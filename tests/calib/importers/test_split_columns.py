"""Columns of sharding and schedule: what each comes to, and that none is dropped in silence."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.importers.canonical_steps import (
    SPLIT_COLUMNS,
    canonical_frame,
    read_steps,
    refuse_unread,
    with_split_columns,
)
from forerun.calib.memory.peak import memory
from forerun.calib.records.step_rows import StepTable
from forerun.calib.workload.config import Parallelism, Sharding

ROW: dict[str, object] = {
    "row_id": "a",
    "device": "NVIDIA A100-SXM4-80GB",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "vocab_size": 32000,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "world_size": 16,
    "bf16": True,
    "step_time_s": 1.0,
}


def table(**more: object) -> StepTable:
    return read_steps(pd.DataFrame([{**ROW, **more}]), "t")


def stated(par: Parallelism, **cells: str) -> Parallelism:
    return with_split_columns(par, lambda *names: next((cells[n] for n in names if n in cells), ""))


@pytest.mark.parametrize(
    ("cells", "sharded"),
    [
        ({"zero_stage": "0"}, Sharding.NONE),
        ({"zero": "ZeRO-0"}, Sharding.NONE),
        ({"fsdp": "True"}, Sharding.WEIGHTS),
        ({"fsdp": "False"}, Sharding.NONE),
        ({"fsdp": "8"}, Sharding.WEIGHTS),
        ({"sharding_strategy": "FULL_SHARD"}, Sharding.WEIGHTS),
        ({"sharding": "NO_SHARD"}, Sharding.NONE),
        ({"fsdp": "optim_grads"}, Sharding.GRADS),
    ],
)
def test_what_replicas_share_is_as_it_is_stated(cells: dict[str, str], sharded: Sharding) -> None:
    assert stated(Parallelism(dp=8), **cells).sharded is sharded


def test_fewer_ranks_than_replicas_are_copies() -> None:
    assert stated(Parallelism(dp=16), fsdp="4").num_optimizer_instances == 4
    # Ranks of context parallelism share as well, whichever way they are counted.
    for number in ("2", "8"):
        layout = stated(Parallelism(dp=2, cp=4), fsdp=number)
        assert (layout.sharded, layout.num_optimizer_instances) == (Sharding.WEIGHTS, 1)
    assert not stated(Parallelism(dp=16), sharding="SHARD_GRAD_OP").regathers_weights


@pytest.mark.parametrize(
    ("schedule", "vp"), [("1F1B", 1), ("Interleaved 1F1B", 2), ("Interleaved1F1B", 2)]
)
def test_a_schedule_that_megatron_runs_is_taken(schedule: str, vp: int) -> None:
    par = Parallelism(pp=4, vp=vp)
    assert stated(par, schedule=schedule) == par


@pytest.mark.parametrize(
    ("par", "cells", "expected"),
    [
        ({"dp": 8}, {"zero_stage": "2"}, "zero_stage '2' is DeepSpeed's"),
        ({"dp": 8}, {"zero": "ZeRO-1", "fsdp": "true"}, "zero_stage 'ZeRO-1' is DeepSpeed's"),
        ({"dp": 8}, {"fsdp": "HYBRID_SHARD"}, "fsdp 'HYBRID_SHARD' is not known"),
        ({"dp": 8}, {"fsdp": "3"}, "does not divide dp 8"),
        ({"dp": 8}, {"fsdp": "1"}, "may be a switch or a number of ranks"),
        ({"pp": 4}, {"schedule": "interleaved"}, "needs its virtual stages"),
        ({"pp": 4, "vp": 2}, {"schedule": "1f1b"}, "give interleaved, or vp 1"),
        ({"pp": 4}, {"schedule": "GPipe"}, "'gpipe' is not modelled"),
        ({"pp": 4}, {"schedule": "zb_h1"}, "'zb_h1' is not modelled; known are 1f1b"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(
    par: dict[str, Any], cells: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        stated(Parallelism(**par), **cells)


def test_without_such_columns_a_layout_is_as_it_was() -> None:
    par = Parallelism(dp=8, pp=2, is_optimizer_distributed=True)
    assert stated(par) == par
    assert stated(Parallelism(dp=8), schedule="whatever") == Parallelism(dp=8)


@given(
    name=st.sampled_from(["my_zero", "FSDP_mode", "dp_shard", "pipe_schedule", "act_offload"]),
    cell=st.text(alphabet="abcx123", min_size=1).filter(lambda t: t.lower() not in ("0", "no")),
)
def test_no_column_that_decides_is_dropped(name: str, cell: str) -> None:
    cells = {name: cell, "note": "zero is fine here"}
    with pytest.raises(ConfigError, match=name):
        refuse_unread(cells, ["note"])
    refuse_unread(cells, ["note", name])
    refuse_unread({name: "False", "note": cell}, ["note"])
    refuse_unread({"lr_schedule": "cosine", "scheduler": "slurm", "num_zeros": cell}, [])


def test_own_rows_are_sharded_as_they_say_and_come_back_the_same() -> None:
    """Memory falls with each stage, and a table that is written reads as it did."""
    peaks = []
    for cells in ({"zero_stage": 0}, {"use_distributed_optimizer": True}, {"fsdp": "optim_grads"}):
        (row,) = table(**cells).rows
        (reread,) = read_steps(canonical_frame([row]), "t").rows
        assert reread.config == row.config
        peaks.append(memory(row.config).allocated_nbytes)
    assert peaks == sorted(peaks, reverse=True)
    (fsdp,) = table(fsdp=True).rows
    assert fsdp.config.parallelism.shards_weights
    assert peaks[0] > 2 * memory(fsdp.config).allocated_nbytes


def test_columns_that_nothing_reads_are_named() -> None:
    steps = table(zero_stage=0, cluster_color="blue", num_zeros_in_grad_clip=None)
    assert steps.unused == ("cluster_color", "num_zeros_in_grad_clip")
    assert len(steps.rows) == 1
    skipped = table(my_fsdp_mode="full").skipped
    assert [row.reason.split(" is")[0] for row in skipped] == ["my_fsdp_mode 'full'"]
    # As Megatron's command line spells them.
    assert table(no_masked_softmax_fusion=True).rows[0].config.is_softmax_fused is False
    assert "optimizer_cpu_offload" not in table(optimizer_cpu_offload=True).unused


def test_every_column_of_sharding_is_one_of_our_format() -> None:
    assert all(name in SPLIT_COLUMNS for name in ("zero_stage", "fsdp", "schedule"))
