"""Windows arrive one by one: what is known grows, what is old fades, order does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.fit.measured_rows import measured_operators
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.operators import Operator, OperatorKind

K = OperatorKind
KINDS = (K.LINEAR_FC1, K.NORM)
ARRIVALS = (64, 160, 320, 640, 1536)
"""Widths that windows bring, one each."""
LATER = (96, 224, 448, 896)
SLOWER = 1.2
NUM_SEEDS = 3
Truth = Callable[[Sequence[Operator]], np.ndarray]
Gpt = Callable[..., list[Operator]]


def _of_kinds(operators: Sequence[Operator]) -> list[Operator]:
    return [o for o in operators if o.kind in KINDS]


def _bend(operator: Operator, seed: int) -> float:
    """Efficiency that rises and falls with the width, for each kind in its own way: no law."""
    octaves = np.log2(operator.shape[1])
    phase = 2.0 * KINDS.index(operator.kind) + seed
    return float(np.exp(0.25 * np.sin(0.9 * octaves + phase)))


def _window(
    make_table: Callable[..., SampleTable],
    truth: Truth,
    operators: Sequence[Operator],
    *,
    window: int,
    factor: float = 1.0,
    seed: int = 0,
) -> SampleTable:
    rng = np.random.default_rng([seed, window])
    noise = np.exp(0.01 * rng.normal(size=len(operators)))
    times = factor * truth(operators) * noise * [_bend(o, seed) for o in operators]
    measured = dict(zip(operators, times.tolist(), strict=True))
    return make_table(measured, window=window, spread_log=0.01 * (1 + window))


def _errors(
    calibration: Calibration, operators: Sequence[Operator], truth: Truth, *, seed: int = 0
) -> np.ndarray:
    """Relative error of each operator as it would be measured later."""
    true_s = truth(operators) * np.array([_bend(o, seed) for o in operators])
    return calibration.operators(operators).time_s / true_s - 1


def _windows(
    make_table: Callable[..., SampleTable], truth: Truth, gpt: Gpt, *, seed: int = 0
) -> list[SampleTable]:
    widths = np.random.default_rng(seed).permutation(ARRIVALS).tolist() if seed else ARRIVALS
    return [
        _window(make_table, truth, _of_kinds(gpt(width)), window=i, seed=seed)
        for i, width in enumerate(widths)
    ]


@pytest.fixture(scope="module")
def windows(make_table, truth, gpt) -> list[SampleTable]:
    return _windows(make_table, truth, gpt)


@pytest.mark.slow
def test_error_on_later_windows_falls_with_every_window(make_table, truth, gpt) -> None:
    """Median over operators and over the orders in which their widths may come."""
    later = [o for width in LATER for o in _of_kinds(gpt(width))]
    errors = []
    for seed in range(1, NUM_SEEDS + 1):
        arrived = _windows(make_table, truth, gpt, seed=seed)
        known = [SampleTable.concat(arrived[: i + 1]) for i in range(len(arrived))]
        errors.append(
            [np.abs(_errors(calibrate(t, device="cpu"), later, truth, seed=seed)) for t in known]
        )
    # (seeds, windows, operators)
    medians = np.median(errors, axis=(0, 2))
    assert np.all(np.diff(medians) < 0)
    assert medians[-1] < 0.4 * medians[0]
    assert medians[-1] < 0.08


def _answers(table: SampleTable, operators: Sequence[Operator]) -> list[list[float]]:
    estimates = calibrate(table, device="cpu").operators(operators)
    return [estimates.time_s.tolist(), estimates.sigma_log.tolist()]


def test_order_of_arrival_changes_not_one_bit(windows, make_table, truth, gpt) -> None:
    """Every window measures one width again, so that rows of one operator are joined as well."""
    repeats = [
        _window(make_table, truth, _of_kinds(gpt(512)), window=i) for i in range(len(ARRIVALS))
    ]
    windows = [
        SampleTable.concat([one, other]) for one, other in zip(windows, repeats, strict=True)
    ]
    operators = _of_kinds([*gpt(512), *gpt(640), *gpt(2048)])
    one_after_the_other = windows[0]
    for window in windows[1:]:
        one_after_the_other = SampleTable.concat([one_after_the_other, window])
    expected = _answers(one_after_the_other, operators)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        shuffled = [windows[i] for i in rng.permutation(len(windows))]
        shuffled = [
            replace(w, samples=w.samples.sample(frac=1, random_state=seed)) for w in shuffled
        ]
        table = SampleTable.concat(shuffled)
        assert table.sha256 == one_after_the_other.sha256
        assert _answers(table, operators) == expected


def test_an_old_window_weighs_less_than_a_new_one(windows, gpt) -> None:
    measured = measured_operators(SampleTable.concat(windows))
    weights = [{measured[o].weight for o in _of_kinds(gpt(width))} for width in ARRIVALS]
    assert all(len(results) == 1 for results in weights), "one window, one weight"
    ages = [results.pop() for results in weights]
    assert np.all(np.diff(ages) > 0)
    assert ages[0] > 0, "never dropped"
    # Each window fades by the same factor.
    assert np.diff(np.log(ages)) == pytest.approx(np.full(4, np.log(ages[1] / ages[0])))


def test_a_window_joined_later_is_newer_than_all_before(windows, gpt) -> None:
    (first, *_) = operators = _of_kinds(gpt(ARRIVALS[0]))
    before = measured_operators(SampleTable.concat(windows[:1]))[first]
    after = measured_operators(SampleTable.concat(windows))
    assert after[first].weight < before.weight
    assert after[first].time_s == pytest.approx(before.time_s)
    assert all(o in after for o in operators)


def _drift(
    make_table, truth: Truth, gpt: Gpt, queries: Sequence[Operator], widths: Sequence[int]
) -> list[float]:
    """Median log of estimate over the time before the machine became slower, window by window."""
    windows, drifts = [], []
    for i, width in enumerate(widths):
        factor = SLOWER if i >= len(widths) - 2 else 1.0
        operators = _of_kinds(gpt(width))
        windows.append(_window(make_table, truth, operators, window=i, factor=factor))
        if i >= len(widths) - 3:
            calibration = calibrate(SampleTable.concat(windows), device="cpu")
            drifts.append(float(np.median(np.log1p(_errors(calibration, queries, truth)))))
    return drifts


def test_a_machine_that_becomes_slower_is_followed_where_it_is_measured(
    make_table, truth, gpt
) -> None:
    """Four windows of the old speed and two of the new, all of one layout."""
    drifts = _drift(make_table, truth, gpt, _of_kinds(gpt(512)), [512] * 6)
    assert drifts[0] == pytest.approx(0.0, abs=0.01)
    assert drifts[0] < drifts[1] < drifts[2]
    assert drifts[2] > 0.5 * np.log(SLOWER)


def test_a_machine_that_becomes_slower_is_followed_on_other_shapes(make_table, truth, gpt) -> None:
    drifts = _drift(make_table, truth, gpt, _of_kinds(gpt(640)), [512, 768] * 3)
    assert drifts[2] - drifts[0] > 0.5 * np.log(SLOWER)
