"""Laws obey physics, whatever the shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import CalibrationError
from forerun.calib.fit.batches import batch_of
from forerun.calib.fit.laws import Ceilings, work
from forerun.calib.fit.machine import FittedLaw
from forerun.calib.fit.operator_kinds import KINDS
from forerun.calib.fit.priors import device_prior
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

# Sizes by which work is shared out: more ranks or experts elsewhere mean less here.
_SHARED = {OperatorKind.LAYER: {4}, OperatorKind.EXPERTS: {4, 5}}
# Parameters that the host updates are no work of the device.
_SHARED |= {OperatorKind.STATED_OPTIMIZER: {2, 3}}
_CEILINGS = Ceilings(flop_per_s=1e12, bytes_per_s=1e11, launch_s=1e-6)


def law_time_s(operator: Operator, ceilings: Ceilings, num_units: int | None = None) -> float:
    law = FittedLaw(ceilings=ceilings, num_units=num_units)
    return float(np.exp(law.log_time(batch_of([operator])))[0])


machines = st.sampled_from([None, 0])
"""Bare work, and that of a processor."""


@st.composite
def operators(draw: st.DrawFn) -> Operator:
    kinds = [k for k, law in KINDS.items() if law.num_sizes]
    kind = draw(st.sampled_from(kinds))
    phase = (
        Phase.STEP
        if kind is OperatorKind.OPTIMIZER
        else draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE]))
    )
    shape = tuple(draw(st.integers(1, 4096)) for _ in range(KINDS[kind].num_sizes))
    if kind is OperatorKind.STATED_OPTIMIZER:
        shape = (*shape[:2], min(shape[2], shape[0]), draw(st.integers(0, 1)))
    return Operator(
        kind=kind, phase=phase, shape=shape, element_nbytes=draw(st.sampled_from([2, 4]))
    )


@given(operator=operators(), num_units=machines, data=st.data())
def test_more_work_never_takes_less_time(
    operator: Operator, num_units: int | None, data: st.DataObject
) -> None:
    grown = list(operator.shape)
    free = sorted(set(range(len(grown))) - _SHARED.get(operator.kind, set()))
    grown[data.draw(st.sampled_from(free))] *= 2
    larger = replace(operator, shape=tuple(grown))
    before_s, after_s = (law_time_s(one, _CEILINGS, num_units) for one in (operator, larger))
    assert after_s >= (1 - 1e-9) * before_s


@given(operator=operators())
def test_a_processor_never_does_less_than_the_bare_work(operator: Operator) -> None:
    assert law_time_s(operator, _CEILINGS, 0) >= (1 - 1e-9) * law_time_s(operator, _CEILINGS)


@given(operator=operators(), num_units=machines, factor=st.floats(1.1, 100))
def test_faster_ceilings_scale_the_time(
    operator: Operator, num_units: int | None, factor: float
) -> None:
    faster = Ceilings(flop_per_s=factor * 1e12, bytes_per_s=factor * 1e11, launch_s=1e-6 / factor)
    ratio = law_time_s(operator, _CEILINGS, num_units) / law_time_s(operator, faster, num_units)
    assert ratio == pytest.approx(factor, rel=1e-6)


def test_backward_of_a_product_is_two_products_and_recompute_is_forward() -> None:
    forward = Operator(
        kind=OperatorKind.LINEAR_PROJ, phase=Phase.FORWARD, shape=(64, 32, 16), element_nbytes=2
    )
    assert work(replace(forward, phase=Phase.BACKWARD)).flop == 2 * work(forward).flop
    assert work(replace(forward, phase=Phase.RECOMPUTE)) == work(forward)


def test_attention_is_quadratic_in_the_sequence() -> None:
    short = Operator(
        kind=OperatorKind.CORE_ATTENTION,
        phase=Phase.FORWARD,
        shape=(2, 8, 8, 512, 64),
        element_nbytes=2,
    )
    long = replace(short, shape=(2, 8, 8, 1024, 64))
    assert work(short).flop == 2 * 2 * 2 * 8 * 512 * 512 * 64
    assert work(long).flop == 4 * work(short).flop


def test_a_shape_of_another_kind_is_refused() -> None:
    wrong = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(1, 2, 3), element_nbytes=2)
    with pytest.raises(CalibrationError, match=r"norm shape \(1, 2, 3\) has 3 sizes, not 2"):
        work(wrong)


def test_fp32_products_are_slower_than_those_of_two_bytes_on_a_gpu() -> None:
    prior = device_prior("NVIDIA A100-SXM4-80GB")
    assert prior.ceilings_for(4).flop_per_s < prior.ceilings_for(2).flop_per_s / 10
    assert device_prior("NVIDIA GH200 480GB").name == "gh200"
    assert device_prior("cpu").ceilings_for(4) == device_prior("cpu").ceilings_for(2)
