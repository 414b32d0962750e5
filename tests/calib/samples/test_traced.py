"""Trace records become one row per operator: its median time, its number, its most kernels."""

from __future__ import annotations

import pandas as pd
import pytest

from forerun.calib.samples._operator_rows import traced_rows
from forerun.calib.workload.operators import OperatorKind, Phase


def test_a_row_is_the_median_of_an_operators_traces():
    times_s = {Phase.FORWARD: [2.0], Phase.BACKWARD: [1.0, 3.0, 3.5]}
    rows = [(phase.value, time_s) for phase, times in times_s.items() for time_s in times]
    traces = pd.DataFrame(
        {
            "window": 0,
            "kind": OperatorKind.LINEAR_FC1.value,
            "phase": [phase for phase, _ in rows],
            "shape": "4x8x16",
            "element_nbytes": 2,
            "stage": 0,
            "time_s": [time_s for _, time_s in rows],
            "num_kernels": range(len(rows)),
        }
    )
    by_phase = traced_rows(traces).set_index("phase")
    assert by_phase["time_s"].to_dict() == {"forward": 2.0, "backward": pytest.approx(3.0)}
    assert by_phase["count"].to_dict() == {"forward": 1, "backward": 3}
    assert by_phase["num_kernels"].to_dict() == {"forward": 0, "backward": 3}
