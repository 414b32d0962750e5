"""Fits at their edges: odd families, refused operators, mixed elements, devices there and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_machine import A100, H100, PlantedMachine, batch, random_shapes, timed

from forerun.calib.fit._device_transfer import transfer_to_device
from forerun.calib.fit._outliers import refuse
from forerun.calib.fit.calibration import calibrate
from forerun.calib.fit.machine import fit_machine
from forerun.calib.regressors.gaussian import Inputs, fit_gaussian
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

K, P = OperatorKind, Phase
M = PlantedMachine()


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (K.EXPERTS, [(t, 1024, 2048, 2, 8, 8) for t in (512, 1024, 2048, 4096)]),
        (K.GROUPED_LINEAR, [(8, t, 1024, 2048) for t in (512, 1024, 2048, 4096)]),
        (K.LAYER, [(1, 16, t, 2048, 1) for t in (512, 1024, 2048, 4096)]),
        (K.ROUTER, [(t, 1024, 64) for t in (512, 1024, 2048, 4096)]),
    ],
)
@pytest.mark.parametrize("with_linear", [False, True])
def test_unmeasured_product_beside_others_of_its_family(kind, shapes, with_linear):
    of = batch(kind, P.FORWARD, shapes)
    groups = {f"{kind.value}/forward": timed(of, 1e-9 * of.sizes[:, :3].prod(axis=1) ** 0.5)}
    if with_linear:
        groups["qkv/forward"] = M.measure(batch(K.LINEAR_QKV, P.FORWARD, [(512, 512, 512)] * 2))
    model = fit_machine(groups, device=A100)
    unmeasured = batch(K.LINEAR_FC1, P.FORWARD, [(1024, 1024, 4096)])
    assert np.isfinite(model.predict_unmeasured(unmeasured).log_time).all()


def test_order_of_repeats_does_not_decide_on_refusals():
    rng = np.random.default_rng(0)
    shapes = np.tile(random_shapes(rng, 8, 3), (3, 1))
    forward, backward = (
        M.measure(batch(K.LINEAR_FC1, p, shapes), rng, noise=0.1) for p in (P.FORWARD, P.BACKWARD)
    )
    copied = backward.time_s.copy()
    copied[:6] = forward.time_s[:6]
    backward = replace(backward, time_s=copied)
    order = rng.permutation(24)
    results = [
        refuse({"a/forward": f, "a/backward": backward}, None)[1]
        for f in (forward, forward.take(order))
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_wild_sample_loses_most_of_its_pull(size):
    p = np.random.default_rng(0).uniform(-2, 2, (30, 2))
    true = 0.15 * np.sin(p[:, 0]) + 0.05 * p[:, 1]
    seen = true + 0.01 * np.random.default_rng(1).normal(size=30)
    seen[4] += size
    inputs = Inputs(coordinates=p, trend=p, member=np.zeros(30, dtype=np.int64))
    mean, _ = fit_gaussian(inputs, seen, np.ones(30)).predict(inputs)
    assert abs(mean[4] - true[4]) < 0.06


def _impossible():
    shapes = [(2048, 2048, 2048), (4096, 4096, 4096)]
    seconds = {}
    for phase, times in ((P.FORWARD, (4e-4, 6e-4)), (P.BACKWARD, (2e-4, 4e-4))):
        for shape, time_s in zip(shapes, times, strict=True):
            seconds[Operator(kind=K.LINEAR_FC1, phase=phase, shape=shape, element_nbytes=2)] = (
                time_s
            )
    for width in (1024, 2048):
        norm = Operator(kind=K.NORM, phase=P.FORWARD, shape=(4096, width), element_nbytes=2)
        seconds[norm] = 1e-4
    return seconds


def test_an_operator_whose_rows_are_refused_one_by_one_has_a_summary(make_table):
    calibration = calibrate(make_table(_impossible()), device=A100)
    assert calibration.summary()


def test_the_optimizer_does_not_switch_the_roofline_off(make_table):
    seconds = {}
    for k in range(1, 9):
        op = Operator(
            kind=K.LINEAR_FC1, phase=P.FORWARD, shape=(1024 * k, 4096, 4096), element_nbytes=2
        )
        seconds[op] = 2 * 1024 * k * 4096**2 / 200e12
    seconds[op] /= 100
    step = Operator(kind=K.OPTIMIZER, phase=P.STEP, shape=(10**8,), element_nbytes=4)
    assert calibrate(make_table(seconds), device=A100).machine.refusals
    assert calibrate(make_table({**seconds, step: 5e-3}), device=A100).machine.refusals


def _moved(nbytes, device, *path):
    of = batch(
        K.LINEAR_FC1, P.FORWARD, [(256 * k, 1024, 4096) for k in range(1, 9)], element_nbytes=nbytes
    )
    model = fit_machine({"a/forward": M.measure(of)}, device=device)
    there = model
    for step in path:
        there = transfer_to_device(there, device=step)
    return there.ceilings.flop_per_s / model.ceilings.flop_per_s


def test_there_and_back_is_here():
    assert _moved(2, A100, H100, A100) == pytest.approx(1.0)


def test_fp32_products_move_by_the_fp32_sheet():
    assert _moved(4, "Tesla V100", A100) == pytest.approx(19.5 / 15.7)
