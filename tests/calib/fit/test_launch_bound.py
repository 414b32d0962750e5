"""Operators for which a device waited: the run's own stay, others are the host's or the device's.

Planted: the host takes as long for any shape, the device by published rates of an H100.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from tiny_shape import of_width

from forerun.calib.answers.run_measurements import Measurements, launch_bound_remark
from forerun.calib.fit.calibration import Calibration, calibrate, calibration_for_device
from forerun.calib.fit.machine import fit_machine
from forerun.calib.fit.measured_rows import measured_operators
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.samples._operator_rows import probed_operator_rows
from forerun.calib.samples.columns import normalise, shape_text
from forerun.calib.samples.table import SampleTable
from forerun.calib.steps.live import live_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase
from forerun.launch.store import model_archive as models

GPU = "NVIDIA H100 80GB HBM3"
HOST_S = 120e-6
FLOP_PER_S, BYTES_PER_S = 0.72 * 989e12, 0.7 * 3.35e12
"""Shares of the data sheet that large products and copies reach."""
Z_90 = 1.645
MakeTable = Callable[..., SampleTable]


def linear(tokens: int, width: int, phase: Phase = Phase.FORWARD) -> Operator:
    shape = (tokens, width, 4 * width)
    return Operator(kind=OperatorKind.LINEAR_FC1, phase=phase, shape=shape, element_nbytes=2)


def norm(tokens: int, width: int) -> Operator:
    shape = (tokens, width)
    return Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=shape, element_nbytes=2)


def device_s(operator: Operator) -> float:
    """Return seconds of the device alone."""
    tokens, width = operator.shape[:2]
    if operator.kind is OperatorKind.NORM:
        return 6 * tokens * width / BYTES_PER_S + 2e-6
    return 8 * tokens * width**2 / FLOP_PER_S + 3e-6


def waited(
    table: SampleTable, frac: float = 1.0, kernels: Mapping[Operator, float] | None = None
) -> SampleTable:
    """The table of operators that waited for the host; ``kernels`` were traced."""
    rows = [
        {
            "run_id": "r", "kind": o.kind.value, "phase": o.phase.value,
            "shape": shape_text(o.shape), "element_nbytes": o.element_nbytes, "time_s": time_s,
            "count": 1, "num_kernels": 2,
        }
        for o, time_s in (kernels or {}).items()
    ]  # fmt: skip
    samples = table.samples.assign(host_bound_frac=frac)
    traced = normalise("traced", pd.DataFrame(rows)) if rows else table.traced
    return replace(table, samples=normalise("samples", samples), traced=traced)


SMALL_OPERATORS = (linear(512, 512), norm(512, 512))


@pytest.fixture(scope="module")
def plain(make_table: MakeTable) -> SampleTable:
    return make_table({o: max(HOST_S, device_s(o)) for o in SMALL_OPERATORS})


@pytest.fixture(scope="module")
def launch_bound(plain: SampleTable) -> Calibration:
    return calibrate(waited(plain), device=GPU)


def is_inside(
    calibration: Calibration, operators: Iterable[Operator], times_s: Iterable[float]
) -> bool:
    estimates = calibration.operators(list(operators))
    return bool(
        (np.abs(np.log(estimates.time_s / list(times_s))) <= Z_90 * estimates.sigma_log).all()
    )


def test_what_was_measured_stays_as_it_is(plain: SampleTable, launch_bound: Calibration) -> None:
    before, after = (
        calibrate(plain, device=GPU).operators(SMALL_OPERATORS),
        launch_bound.operators(SMALL_OPERATORS),
    )
    assert after.time_s.tolist() == before.time_s.tolist()
    assert after.sigma_log.tolist() == before.sigma_log.tolist()
    assert after.sources == before.sources


def test_other_shapes_take_no_less_than_the_host_and_may_be_the_devices(
    plain: SampleTable, launch_bound: Calibration
) -> None:
    others = [linear(512, 256), linear(512, 1024), norm(512, 1024), norm(1024, 512)]
    estimates = launch_bound.operators(others)
    assert estimates.time_s == pytest.approx(HOST_S, rel=1e-6)
    assert is_inside(launch_bound, others, [HOST_S] * 4)
    # Both kinds waited, so a third would with 3/4: else it is anywhere down to the device's time.
    away = np.log(estimates.time_s / [device_s(o) for o in others])
    assert (estimates.sigma_log > 0.7 * away * math.sqrt(1 / 4 / 3)).all()
    as_rates = calibrate(plain, device=GPU).operators(others)
    assert (estimates.sigma_log > as_rates.sigma_log).all()


def test_large_shapes_are_the_devices(plain: SampleTable, launch_bound: Calibration) -> None:
    """Launches of a small model were extrapolated as if they were slow products."""
    large = [linear(8192, 8192), norm(16384, 16384)]
    true = [device_s(o) for o in large]
    assert min(true) > 5 * HOST_S
    estimated_s = launch_bound.operators(large).time_s
    assert np.abs(np.log(estimated_s / true)).max() < 0.7
    assert is_inside(launch_bound, large, true)


def test_they_are_no_evidence_of_rates(launch_bound: Calibration) -> None:
    nothing = fit_machine({}, device=GPU, use_prior=True)
    assert launch_bound.ceilings == nothing.ceilings
    assert not launch_bound.machine.pools


def test_but_the_device_is_no_slower(make_table: MakeTable) -> None:
    """The device's prior is longer than the measured time, which includes all waiting."""
    sampled, wanted = linear(4096, 4096), linear(8192, 4096)
    prior = fit_machine({}, device=GPU, use_prior=True)
    open_ = calibrate(waited(make_table({linear(512, 512): HOST_S})), device=GPU)
    alone_s, wanted_s = open_.operators([sampled, wanted]).time_s
    assert prior.pools == {}
    table = waited(make_table({sampled: 0.8 * float(alone_s)}))
    estimates = calibrate(table, device=GPU).operators([wanted])
    assert estimates.time_s[0] == pytest.approx(0.8 * float(wanted_s), rel=1e-6)


def test_kernels_of_a_traced_step_take_their_place(plain: SampleTable) -> None:
    """They are the device's, and narrow what launches leave open."""
    kernels = {o: device_s(o) for o in SMALL_OPERATORS}
    calibration = calibrate(waited(plain, kernels=kernels), device=GPU)
    assert calibration.operators(SMALL_OPERATORS).time_s == pytest.approx(HOST_S)
    assert set(calibration.machine.pools) == {"linear_fc1/forward", "norm/forward"}
    large = [linear(8192, 8192), norm(16384, 16384)]
    assert is_inside(calibration, large, [device_s(o) for o in large])


def test_gradients_that_were_traced_apart_are_one_backward_pass(make_table: MakeTable) -> None:
    backward = linear(512, 512, Phase.BACKWARD)
    gradients = {
        linear(512, 512, Phase.INPUT_GRADIENT): 4e-6,
        linear(512, 512, Phase.WEIGHT_GRADIENT): 5e-6,
    }
    table = waited(make_table({backward: HOST_S}), kernels=gradients)
    assert measured_operators(table)[backward].device_s == pytest.approx(9e-6)
    half = dict(list(gradients.items())[:1])
    table = waited(make_table({backward: HOST_S}), kernels=half)
    assert measured_operators(table)[backward].device_s == 0.0


@pytest.mark.parametrize("frac", [0.0, 0.2, 0.5])
def test_a_little_waiting_takes_weight_alone(plain: SampleTable, frac: float) -> None:
    before, after = measured_operators(plain), measured_operators(waited(plain, frac))
    for operator, one in after.items():
        assert one.device_s == one.time_s == before[operator].time_s
        assert one.device_weight == pytest.approx((1 - frac) * before[operator].device_weight)


def test_without_waiting_nothing_changes(plain: SampleTable) -> None:
    """As tables are that were written before there was a share, and all of CPUs."""
    assert waited(plain, 0.0).sha256 == plain.sha256 != waited(plain).sha256
    operators = [*SMALL_OPERATORS, linear(8192, 8192)]
    before, after = (
        calibrate(table, device=GPU).operators(operators) for table in (plain, waited(plain, 0.0))
    )
    assert after.time_s.tolist() == before.time_s.tolist()
    assert after.sigma_log.tolist() == before.sigma_log.tolist()


def test_the_host_is_the_same_beside_another_device(launch_bound: Calibration) -> None:
    other = calibration_for_device(launch_bound, "NVIDIA A100-SXM4-80GB")
    assert other.operators([linear(512, 1024)]).time_s[0] > 0.999 * HOST_S


def test_a_summary_names_them(launch_bound: Calibration) -> None:
    rows = launch_bound.summary()["operators"]
    assert {row["model"] for row in rows} == {"none: the device waited"}
    assert all(row["left_out_error_frac"] is None and row["sigma_log"] > 0 for row in rows)
    json.dumps(launch_bound.summary())


def test_a_cached_fit_knows_them(launch_bound: Calibration) -> None:
    restored = models.unpack_model(models.pack_model(launch_bound))
    operators = [linear(512, 1024), linear(8192, 8192)]
    assert (
        restored.operators(operators).time_s.tolist()
        == launch_bound.operators(operators).time_s.tolist()
    )


def test_a_shape_that_waited_is_no_control_of_a_probe(plain: SampleTable) -> None:
    """The ratio of a run's time to its probe's is the device's, unless the run's is the host's."""
    probes = pd.DataFrame(
        {
            "window": 0, "rank": 0, "stage": 0, "step": -1, "microbatch": [0, 1] * 2,
            "kind": "norm", "phase": "forward", "element_nbytes": 2, "start_ns": 0,
            "shape": ["512x512"] * 2 + ["1024x512"] * 2, "time_s": [40e-6] * 2 + [50e-6] * 2,
        }
    )  # fmt: skip
    for frac, factor in ((0.0, HOST_S / 40e-6), (1.0, 1.0)):
        rows = probed_operator_rows(probes, waited(plain, frac).operators, is_host=False)
        assert rows.set_index("shape")["time_s"]["1024x512"] == pytest.approx(50e-6 * factor)


def config(micro_batch_size: int) -> RunConfig:
    return RunConfig(
        model=of_width(512, num_layers=8, seq_length=256, vocab_size=32000),
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=micro_batch_size, global_batch_size=16),
        precision=Precision.BF16,
        device=GPU,
    )


def test_the_running_step_stays_and_other_layouts_widen(make_table: MakeTable) -> None:
    running, other = config(1), config(4)
    work = stage_operators(running, 0)
    passes = {o: 60e-6 for o, _ in (*work.forward, *work.backward)}
    plain = make_table({**passes, **{o: 2e-3 for o, _ in work.step}})
    is_waiting = (plain.samples["phase"] != "step") & (plain.samples["shape"] != "")
    tables = plain, replace(plain, samples=plain.samples.assign(host_bound_frac=1.0 * is_waiting))
    before, after = (
        fit_steps(live_times(calibrate(table, device=GPU), running)).estimates([running, other])
        for table in tables
    )
    # While the device lags, launches take an unknown part of a layer's time, or almost none.
    assert after[0].time_s == pytest.approx(before[0].time_s, rel=0.1)

    def width(one) -> float:
        return math.log(one.high_s / one.low_s)

    # A run that waited shows its host; that of a busy one may be slower than all its work.
    assert width(after[1]) > 2 * width(after[0])
    assert before[1].host_wait_high_frac > 0.3 > after[1].host_wait_high_frac
    # Four times the samples in a launch: the host is asked a quarter as often.
    assert after[1].time_s < 0.5 * after[0].time_s


def test_a_report_says_how_much_of_it_is_waiting(plain: SampleTable) -> None:
    assert Measurements(table=plain).launch_bound_frac == 0.0
    waiting = Measurements(table=waited(plain, 0.62))
    assert waiting.launch_bound_frac == pytest.approx(0.62)
    assert launch_bound_remark(0.09) == ()
    (line,) = launch_bound_remark(0.62)
    assert "launch-bound: the GPU waited for the host in 62.0 %" in line


def test_a_device_that_was_busy_says_nothing_of_its_host(make_table: MakeTable) -> None:
    """An H200 whose layers of 5 ms hid their launches took 6.5 times what was said of a shape whose
    kernels are short; what hosts take before one is measured lies inside now."""
    running = replace(config(1), device=GPU)
    work = stage_operators(running, 0)
    table = make_table({o: 1e-3 if o.phase is not Phase.STEP else 2e-3 for o, _ in [
        *work.forward, *work.backward, *work.step
    ]})  # fmt: skip
    steps = fit_steps(live_times(calibrate(table, device=GPU), running))
    tiny = replace(running, model=replace(running.model, seq_length=8, max_position_embeddings=8))
    (estimate,) = steps.estimates([tiny])
    passes = running.model.num_layers * running.num_microbatches
    assert estimate.high_s > passes * 2.5e-3
    assert estimate.time_s > passes * 0.4e-3
