"""Planted laws come back; estimates say where they come from."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor

from forerun.calib.errors import CalibrationError
from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.fit.estimates import Source
from forerun.calib.regressors.trees import tree_model
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

PEAK, BANDWIDTH = 8e10, 9e9
NORM = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(256, 512), element_nbytes=4)
HOST = Operator(kind=OperatorKind.HOST_MICROBATCH, phase=Phase.FORWARD, shape=(), element_nbytes=0)


def _mape(estimated: np.ndarray, true: np.ndarray) -> float:
    return float(np.mean(np.abs(estimated / true - 1)))


@pytest.mark.parametrize(
    ("factor", "kwargs"), [(2.0, {}), (0.5, {}), (1.0, {"tp": 2}), (1.0, {"tokens": 512})]
)
def test_one_layout_extrapolates_to_others(make_table, planted, gpt, truth, factor, kwargs) -> None:
    calibration = calibrate(make_table(planted(512)), device="cpu")
    operators = gpt(int(512 * factor), **kwargs)
    estimates = calibration.operators(operators)
    true = truth(operators)
    # Noise 2 %, efficiencies 0.5 to 2: launches are the one rate that one width cannot tell.
    assert _mape(estimates.time_s, true) < 0.07
    assert estimates.time_s.sum() == pytest.approx(true.sum(), rel=0.04)
    inside = np.abs(np.log(estimates.time_s / true)) <= 1.645 * estimates.sigma_log
    assert inside.mean() >= 0.85


def test_planted_ceilings_come_back(make_table, planted) -> None:
    table = make_table(planted(64, 128, 256, 512, 1024, noise=0.01))
    ceilings = calibrate(table, device="cpu").ceilings
    # Products run at 0.86 to 0.97 of the peak: the envelope is their 90 % quantile.
    assert ceilings.flop_per_s == pytest.approx(0.96 * PEAK, rel=0.05)
    assert ceilings.bytes_per_s == pytest.approx(BANDWIDTH, rel=0.3)


def test_efficiency_beats_a_forest_on_time_from_small_to_large(
    make_table, planted, gpt, truth
) -> None:
    measured = planted(128, 192, 256, 320, 384, 448, 512)
    calibration = calibrate(make_table(measured), device="cpu")
    large = [o for o in gpt(2048) if o.kind is OperatorKind.LINEAR_FC1]
    ours = _mape(calibration.operators(large).time_s, truth(large))
    for operator in large:
        rows = [
            (o, t)
            for o, t in measured.items()
            if (o.kind, o.phase) == (operator.kind, operator.phase)
        ]
        forest = RandomForestRegressor(random_state=0).fit(
            [o.shape for o, _ in rows], [t for _, t in rows]
        )
        raw = _mape(forest.predict([operator.shape]), truth([operator]))
        assert ours < 0.1 * raw
    assert ours < 0.05


def test_boosting_takes_over_with_many_shapes(make_table, planted, gpt, truth) -> None:
    widths = range(32, 32 * 70, 32)
    measured = {
        o: t
        for o, t in planted(*widths, noise=0.01).items()
        if o.kind in (OperatorKind.LINEAR_FC1, OperatorKind.NORM)
    }
    calibration = calibrate(make_table(measured), device="cpu")
    assert {row["model"] for row in calibration.summary()["operators"]} == {tree_model()}
    operators = [o for o in gpt(32 * 80) if o.kind is OperatorKind.LINEAR_FC1]
    assert _mape(calibration.operators(operators).time_s, truth(operators)) < 0.03


def test_what_was_measured_is_returned_as_it_is(make_table, planted) -> None:
    measured = planted(512)
    estimates = calibrate(make_table(measured), device="cpu").operators(list(measured))
    assert estimates.time_s == pytest.approx(list(measured.values()), rel=1e-9)
    assert set(estimates.sources) == {Source.MEASURED}
    assert estimates.sigma_log.max() < 0.03


def test_sources_and_widths_follow_the_distance(make_table, planted) -> None:
    table = make_table({**planted(256, 512), HOST: 3e-4})
    calibration = calibrate(table, device="cpu")
    inside, outside, far = (replace(NORM, shape=(256, size)) for size in (400, 2048, 65536))
    other = Operator(kind=OperatorKind.HOST_STEP, phase=Phase.STEP, shape=(), element_nbytes=0)
    estimates = calibration.operators([NORM, inside, outside, far, HOST, other])
    assert estimates.sources == (
        Source.MEASURED,
        Source.FITTED,
        Source.EXTRAPOLATED,
        Source.EXTRAPOLATED,
        Source.MEASURED,
        Source.PRIOR,
    )
    assert estimates.time_s[4] == pytest.approx(3e-4)
    assert np.all(np.diff(estimates.sigma_log[:4]) > 0)
    assert estimates.sigma_log[5] >= estimates.sigma_log[3]


def test_a_kind_that_was_never_measured_is_a_prior(make_table, planted, gpt, truth) -> None:
    measured = {o: t for o, t in planted(512).items() if o.kind is not OperatorKind.LINEAR_FC2}
    calibration = calibrate(make_table(measured), device="cpu")
    operators = [o for o in gpt(512) if o.kind is OperatorKind.LINEAR_FC2]
    estimates = calibration.operators(operators)
    assert set(estimates.sources) == {Source.PRIOR}
    assert _mape(estimates.time_s, truth(operators)) < 0.1
    assert estimates.sigma_log.min() >= 0.499


def test_recomputing_costs_what_forward_costs(make_table, planted) -> None:
    calibration = calibrate(make_table({**planted(512), HOST: 3e-4}), device="cpu")
    forward = calibration.operators([NORM, HOST])
    recomputed = calibration.operators([replace(o, phase=Phase.RECOMPUTE) for o in (NORM, HOST)])
    assert recomputed.time_s == pytest.approx(forward.time_s, rel=0.1)
    assert Source.PRIOR not in recomputed.sources


def _answers(calibration: Calibration, operators: list[Operator]) -> list[list[float]]:
    estimates = calibration.operators(operators)
    return [estimates.time_s.tolist(), estimates.sigma_log.tolist()]


def test_order_of_rows_changes_nothing(make_table, planted, gpt) -> None:
    kinds = (OperatorKind.LINEAR_FC1, OperatorKind.NORM, OperatorKind.LOSS)
    measured = planted(128, 192, 256, 320, 384)
    table = make_table({o: t for o, t in measured.items() if o.kind in kinds})
    shuffled = replace(table, samples=table.samples.sample(frac=1, random_state=1))
    reordered = SampleTable.concat([shuffled])
    operators = gpt(640)
    first, second = calibrate(table, device="cpu"), calibrate(reordered, device="cpu")
    third = calibrate(shuffled, device="cpu")
    assert first.sha256 == second.sha256
    assert _answers(first, operators) == _answers(second, operators)
    assert _answers(first, operators) == _answers(third, operators)


def test_rows_given_twice_change_nothing(make_table, planted, gpt) -> None:
    table = make_table(planted(256))
    twice = SampleTable.concat([table, table])
    assert _answers(calibrate(twice, device="cpu"), gpt(512)) == _answers(
        calibrate(table, device="cpu"), gpt(512)
    )


def test_recent_windows_weigh_more_and_old_ones_stay(make_table) -> None:
    windows = [make_table({NORM: 1e-3 * (1 + w)}, window=w) for w in range(3)]
    calibration = calibrate(SampleTable.concat(windows), device="cpu")
    estimates = calibration.operators([NORM])
    assert 2e-3 < estimates.time_s[0] < 3e-3
    assert estimates.sigma_log[0] > 0.2
    assert calibration.summary()["operators"][0]["num_rows"] == 3


def test_host_constant_is_the_mean_of_the_stages(make_table, planted) -> None:
    table = SampleTable.concat(
        [
            make_table(planted(256)),
            make_table({HOST: 2e-4}, stages=(0,)),
            make_table({HOST: 4e-4}, stages=(1,)),
        ]
    )
    estimates = calibrate(table, device="cpu").operators([HOST])
    assert estimates.time_s[0] == pytest.approx(3e-4)


def test_no_operator_samples_says_what_to_record(make_table) -> None:
    call = CollectiveCall(
        collective=Collective.ALL_REDUCE, role=GroupRole.TP, num_ranks=2, nbytes=1024
    )
    with pytest.raises(CalibrationError, match="no operator samples in 1 rows; record"):
        calibrate(make_table({}, {call: 1e-4}), device="cpu")


def test_summary_is_json_and_names_every_model(make_table, planted) -> None:
    call = CollectiveCall(
        collective=Collective.ALL_REDUCE, role=GroupRole.TP, num_ranks=2, nbytes=1 << 20
    )
    table = make_table({**planted(256, 512), HOST: 3e-4}, {call: 1e-3})
    calibration = calibrate(table, device="cpu")
    summary = json.loads(json.dumps(calibration.summary(), allow_nan=False))
    assert summary["sha256"] == table.sha256
    assert {row["kind"] for row in summary["operators"]} >= {"norm", "optimizer", "host_microbatch"}
    (row,) = summary["collectives"]
    assert (row["collective"], row["num_ranks"], row["left_out_error_frac"]) == (
        "all_reduce",
        2,
        None,
    )


def test_many_operators_cost_little_more_than_few(make_table, planted, gpt) -> None:
    calibration = calibrate(make_table(planted(128, 192, 256, 320, 384)), device="cpu")
    few = gpt(448)
    many = [o for width in range(448, 448 + 64 * 40, 64) for o in gpt(width)]

    def cost(operators: list[Operator]) -> float:
        start = time.process_time()
        calibration.operators(operators)
        return time.process_time() - start

    least = min(cost(few) for _ in range(7))
    assert min(cost(many) for _ in range(7)) < 80 * least


@pytest.mark.slow
def test_refit_grows_no_faster_than_the_table(make_table, planted) -> None:
    one = make_table(planted(256))
    ten = SampleTable.concat([make_table(planted(256, seed=w), window=w) for w in range(10)])
    assert len(ten.samples) == 10 * len(one.samples)

    def cost(table: SampleTable) -> float:
        start = time.process_time()
        calibrate(table, device="cpu")
        return time.process_time() - start

    cost(one)
    assert min(cost(ten) for _ in range(3)) < 10 * min(cost(one) for _ in range(7))
