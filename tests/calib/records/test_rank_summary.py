"""Rows at the experts of a rank, as its summary sends them."""

from __future__ import annotations

import pytest

from forerun.calib.records.rank_summary import StepSums, summarise
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.workload.operators import OperatorKind as K
from forerun.calib.workload.operators import Phase

GROUPED = [(K.GROUPED_LINEAR, (4, 70, 8, 16)), (K.GROUPED_LINEAR, (4, 70, 16, 8))]
SINGLE = [(K.LINEAR_FC1, (30, 8, 16)), (K.LINEAR_FC1, (40, 8, 16)), (K.LINEAR_FC2, (40, 16, 8))]


def operator(kind: K, shape: tuple[int, ...], layer: int, phase: Phase) -> OperatorRecord:
    return OperatorRecord(
        step=0,
        window=0,
        microbatch=0,
        kind=kind,
        phase=phase,
        shape=shape,
        element_nbytes=2,
        layer=layer,
        start_ns=0,
        duration_ns=1,
    )


@pytest.mark.parametrize("products", [GROUPED, SINGLE])
def test_a_summary_has_the_rows_of_all_layers_with_experts(products) -> None:
    """Two of three layers have a router; the last is dense."""
    sums = {step: StepSums() for step in (4, 5)}
    for step in sums.values():
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for layer in (0, 1):
                for kind, shape in [*products, (K.ROUTER, (64, 8, 4))]:
                    step.add(operator(kind, shape, layer, phase))
            step.add(operator(K.LINEAR_FC1, (999, 8, 16), 2, phase))
    assert summarise(0, {4: 10, 5: 10}, sums, 0).routed_rows == 2 * 70


def test_without_experts_there_are_none() -> None:
    dense = StepSums()
    dense.add(operator(K.LINEAR_FC1, (999, 8, 16), 0, Phase.FORWARD))
    assert summarise(0, {0: 10}, {0: dense}, 0).routed_rows == 0
