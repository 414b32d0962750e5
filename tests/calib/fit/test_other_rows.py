"""An operator at another number of rows: as wide as the public tables say, on accelerators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.calib.fit.calibration import calibrate
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

MakeTable = Callable[..., SampleTable]
GPU = "NVIDIA H100 80GB HBM3"
PRODUCT = Operator(
    kind=OperatorKind.LINEAR_FC1,
    phase=Phase.FORWARD,
    shape=(4096, 2048, 8192),
    element_nbytes=2,
)
ATTENTION = Operator(
    kind=OperatorKind.CORE_ATTENTION,
    phase=Phase.FORWARD,
    shape=(2, 16, 16, 2048, 128),
    element_nbytes=2,
)
NORM = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(4096, 2048), element_nbytes=2)
TIMES_S = {PRODUCT: 230e-6, ATTENTION: 1500e-6, NORM: 25e-6}
MOST_LOG = {PRODUCT: 0.11, ATTENTION: 0.11, NORM: 0.07}


def at(operator: Operator, factor: float) -> Operator:
    rows, *others = operator.shape
    return replace(operator, shape=(round(factor * rows), *others))


@pytest.mark.parametrize("operator", TIMES_S, ids=lambda o: o.kind.value)
def test_twice_the_rows_are_known_better_than_another_shape(
    make_table: MakeTable, operator: Operator
) -> None:
    calibration = calibrate(make_table(TIMES_S), device=GPU)
    twice, half, four, self_ = (at(operator, factor) for factor in (2.0, 0.5, 4.0, 1.0))
    other = replace(operator, shape=(*operator.shape[:-1], 2 * operator.shape[-1]))
    estimates = calibration.operators([twice, half, four, self_, other])
    assert max(estimates.sigma_log[:2]) < MOST_LOG[operator]
    assert estimates.sigma_log[3] < estimates.sigma_log[0] <= estimates.sigma_log[2]
    assert estimates.sigma_log[4] > estimates.sigma_log[0]
    assert estimates.is_rescaled is not None
    assert estimates.is_rescaled.tolist() == [True, True, True, False, False]


def test_a_processor_keeps_its_width(make_table: MakeTable) -> None:
    """Its caches make twice the rows another kernel: layouts differ by more there."""
    gpu, cpu = (
        calibrate(make_table(TIMES_S), device=device).operators([at(PRODUCT, 2.0)])
        for device in (GPU, "cpu")
    )
    assert cpu.sigma_log[0] > 1.2 * gpu.sigma_log[0]
    assert cpu.is_rescaled is not None and not cpu.is_rescaled.any()
