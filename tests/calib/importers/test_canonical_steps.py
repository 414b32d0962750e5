"""Step tables in our own format: what a row leaves open, and what that is worth."""

from __future__ import annotations

import pandas as pd
import pytest

from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.calib.importers.canonical_steps import canonical_frame, read_steps
from forerun.calib.memory.peak import fit_probability, memory, memory_with_offset
from forerun.calib.records.step_rows import StepRow

ROW = {
    "device": "NVIDIA A100-SXM4-80GB",
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 4096,
    "padded_vocab_size": 32000,
    "micro_batch_size": 1,
    "global_batch_size": 64,
    "world_size": 64,
    "ranks_per_node": 8,
    "bf16": True,
    "use_distributed_optimizer": True,
    "step_time_s": 1.0,
}


def read(**more: object) -> StepRow:
    (row,) = read_steps(pd.DataFrame([{**ROW, **more}]), "t").rows
    return row


@pytest.mark.parametrize(
    "widths",
    [
        {"grad_reduce_in_bf16": False},
        {"grad_reduce_in_bf16": True},
        {"accumulate_allreduce_grads_in_fp32": True},
        {"main_grads_dtype": "fp32"},
    ],
)
def test_a_row_that_says_how_wide_gradients_are_leaves_nothing_open(
    widths: dict[str, object],
) -> None:
    assert read().config.has_open_widths
    stated = read(**widths)
    assert not stated.config.has_open_widths
    for row in (stated, read()):
        (reread,) = read_steps(canonical_frame([row]), "t").rows
        assert reread.config == row.config


def test_what_nobody_said_is_wider_in_time_and_memory() -> None:
    open_, stated = read(), read(grad_reduce_in_bf16=False)
    wide, narrow = (TableSteps().fit([]).predict([row]) for row in (open_, stated))
    assert wide.time_s[0] == pytest.approx(narrow.time_s[0])
    assert wide.high_s[0] / wide.low_s[0] > 1.001 * narrow.high_s[0] / narrow.low_s[0]
    estimates = [memory(row.config) for row in (open_, stated)]
    assert estimates[0].total_nbytes == estimates[1].total_nbytes
    capacity = round(1.15 * estimates[0].total_nbytes)
    unsure, sure = (fit_probability(estimate, capacity) for estimate in estimates)
    assert 0.5 < unsure < sure
    # Once a peak was measured, the widths are told with all else.
    unsure, sure = (
        fit_probability(memory_with_offset(one, one, 0), capacity, is_calibrated=True)
        for one in (open_.config, stated.config)
    )
    assert unsure == pytest.approx(sure)


@pytest.mark.parametrize(
    ("device", "per_node", "counted"),
    [("NVIDIA GB200", 4, 72), ("NVIDIA GB200", 64, 64), ("NVIDIA H100 80GB HBM3", 8, 8)],
)
def test_hosts_of_a_rack_are_one_node(device: str, per_node: int, counted: int) -> None:
    columns = {
        "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
        "vocab_size": 1024, "micro_batch_size": 1, "global_batch_size": 16, "world_size": 16,
        "ranks_per_node": per_node, "device": device, "step_time_s": 1.0,
    }  # fmt: skip
    (row,) = read_steps(pd.DataFrame([columns]), "t").rows
    assert row.config.parallelism.ranks_per_node == counted
