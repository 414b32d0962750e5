"""Shares of the weight's gradient, planted in trace records, reach the timeline's blocks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from tiny_shape import SMALL

from forerun.calib.samples.operator_rows import traced_rows, weight_fracs
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.workload.config import Batch, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase
from forerun.calib.workload.parallelism import Parallelism

FC1, QKV = OperatorKind.LINEAR_FC1, OperatorKind.LINEAR_QKV


def traces(*rows: tuple[OperatorKind, Phase, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "window": 0,
            "kind": [kind.value for kind, _, _ in rows],
            "phase": [phase.value for _, phase, _ in rows],
            "shape": "4x8x16",
            "element_nbytes": 2,
            "stage": 0,
            "time_s": [time_s for _, _, time_s in rows],
            "num_kernels": 3,
        }
    )


def test_shares_are_of_both_gradients_and_only_where_both_are_known():
    rows = traced_rows(
        traces(
            (FC1, Phase.INPUT_GRADIENT, 1.0),
            (FC1, Phase.WEIGHT_GRADIENT, 3.0),
            (FC1, Phase.WEIGHT_GRADIENT, 3.0),
            (FC1, Phase.INPUT_GRADIENT, 1.0),
            (QKV, Phase.BACKWARD, 5.0),
            (QKV, Phase.FORWARD, 5.0),
        )
    )
    assert list(rows["count"]) == [2, 2, 1, 1]
    assert weight_fracs(rows) == {FC1: pytest.approx(0.75)}


def test_without_a_trace_there_is_no_share():
    assert weight_fracs(traced_rows(traces())) == {}


def test_a_block_puts_off_the_measured_share_and_half_of_all_other_linears():
    config = RunConfig(
        model=SMALL,
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=1, global_batch_size=4),
        device="cpu",
    )
    usual, deferred = compile_layouts([config]), compile_layouts([config], {FC1: 0.75})
    assert deferred.items == usual.items
    every = np.eye(len(usual.items))
    before, after = usual.sums.weight @ every, deferred.sums.weight @ every
    for column, item in enumerate(usual.items):
        is_split = isinstance(item, Operator) and item.kind is FC1 and item.phase is Phase.BACKWARD
        assert np.allclose(after[:, column], before[:, column] * (1.5 if is_split else 1.0))
        assert not is_split or before[:, column].any()
    assert np.array_equal(usual.sums.backward @ every, deferred.sums.backward @ every)
