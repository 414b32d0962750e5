"""Planted machines come back, alone and moved to another device."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from planted_machine import A100, H100, PlantedMachine, batch, random_shapes, stacked, timed

from forerun.calib.fit._device_transfer import transfer_to_device
from forerun.calib.fit.batches import ShapeBatch, Timed
from forerun.calib.fit.machine import MachineModel, Prediction, fit_machine
from forerun.calib.regressors.trees import tree_model
from forerun.calib.workload.operators import OperatorKind, Phase

K = OperatorKind
P = Phase
EFFICIENCY = {K.LINEAR_FC1: 0.85, K.LINEAR_FC2: 0.65, K.NORM: 0.9, K.ACTIVATION: 0.7}
MACHINE = PlantedMachine(efficiency=EFFICIENCY)
KINDS = {K.LINEAR_FC1: 3, K.LINEAR_FC2: 3, K.NORM: 2}
NUM_SEEDS = 6


def _name(kind: K, phase: P = P.FORWARD) -> str:
    return f"{kind.value}/{phase.value}"


def _groups(
    number: int,
    *,
    seed: int = 0,
    noise: float = 0.03,
    machine: PlantedMachine = MACHINE,
    kinds: dict[K, int] = KINDS,
) -> dict[str, Timed]:
    rng = np.random.default_rng(seed)
    return {
        _name(kind, phase): machine.measure(
            batch(kind, phase, random_shapes(rng, number, num_sizes)), rng, noise=noise
        )
        for kind, num_sizes in kinds.items()
        for phase in (P.FORWARD, P.BACKWARD)
    }


@cache
def _fitted(number: int) -> MachineModel:
    return fit_machine(_groups(number), device=A100)


def _median_error(
    prediction: Prediction,
    shapes: ShapeBatch,
    machine: PlantedMachine = MACHINE,
    *,
    signed: bool = False,
) -> float:
    error = prediction.log_time - np.log(machine.time_s(shapes))
    return float(np.median(error if signed else np.abs(error)))


@pytest.mark.parametrize(("number", "most"), [(8, 0.06), (24, 0.035), (70, 0.03)])
def test_operators_of_different_efficiency_are_predicted(number: int, most: float) -> None:
    model = _fitted(number)
    for name, group in _groups(40, seed=1).items():
        assert _median_error(model.predict(name, group.batch), group.batch) < most


def test_the_ceiling_of_products_is_that_of_the_best() -> None:
    model = _fitted(24)
    assert model.ceilings.flop_per_s == pytest.approx(0.85 * MACHINE.flop_per_s, rel=0.1)


def _equal(one: Prediction, other: Prediction) -> bool:
    return all(
        np.array_equal(getattr(one, part), getattr(other, part))
        for part in ("log_time", "low", "high", "octaves")
    )


@pytest.mark.parametrize("number", [8, 24, 70])
def test_order_of_rows_and_of_groups_changes_nothing(number: int) -> None:
    groups = _groups(number, kinds={K.LINEAR_FC1: 3, K.LINEAR_FC2: 3})
    rng = np.random.default_rng(7)
    shuffled = {
        name: groups[name].take(rng.permutation(number)) for name in sorted(groups, reverse=True)
    }
    first, second = (fit_machine(g, device=A100) for g in (groups, shuffled))
    for name in groups:
        shapes = batch(
            groups[name].batch.kind,
            groups[name].batch.phase,
            random_shapes(rng, 20, groups[name].batch.sizes.shape[1]),
        )
        assert _equal(first.predict(name, shapes), second.predict(name, shapes))
    assert first.ceilings == second.ceilings


def test_heavy_rows_are_followed() -> None:
    """Half of the rows come from a time when the machine was 1.4 times slower."""
    groups = _groups(20)
    for stale_weight, fresh_weight, expected in ((0.02, 1.0, 0.0), (1.0, 0.02, math.log(1.4))):
        mixed = {
            name: stacked(
                timed(of.batch, 1.4 * of.time_s, weight=stale_weight),
                timed(of.batch, of.time_s, weight=fresh_weight),
            )
            for name, of in groups.items()
        }
        model = fit_machine(mixed, device=A100)
        for name, group in _groups(20, seed=1).items():
            bias = _median_error(model.predict(name, group.batch), group.batch, signed=True)
            assert bias == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize(
    ("number", "expected"), [(8, "gaussian process"), (24, "gaussian process"), (70, tree_model())]
)
def test_the_number_of_shapes_decides_on_the_regressor(number: int, expected: str) -> None:
    model = _fitted(number)
    assert {pool.model for pool in model.pools.values()} == {expected}


def test_products_of_a_phase_share_a_pool_and_nothing_else_does() -> None:
    pools = _fitted(8).pools
    for phase in P.FORWARD, P.BACKWARD:
        assert pools[_name(K.LINEAR_FC1, phase)] is pools[_name(K.LINEAR_FC2, phase)]
    assert len({id(pool) for pool in pools.values()}) == 4


def test_an_operator_with_few_shapes_is_less_certain_than_one_with_many() -> None:
    groups = _groups(24)
    groups[_name(K.LINEAR_FC2)] = groups[_name(K.LINEAR_FC2)].take(np.arange(2))
    model = fit_machine(groups, device=A100)
    widths = []
    for kind in (K.LINEAR_FC1, K.LINEAR_FC2):
        shapes = batch(kind, P.FORWARD, groups[_name(kind)].batch.sizes[:2])
        prediction = model.predict(_name(kind), shapes)
        widths.append(np.median(prediction.high - prediction.low))
    assert widths[1] > 1.2 * widths[0]


@pytest.mark.parametrize("number", [8, 24, 70])
def test_a_product_that_was_never_measured_runs_like_the_others(number: int) -> None:
    model = _fitted(number)
    shapes = batch(K.LINEAR_QKV, P.FORWARD, random_shapes(np.random.default_rng(3), 40, 3))
    prediction = model.predict_unmeasured(shapes)
    # Between the two products that were, which take 1 / 0.85 and 1 / 0.65.
    bias = _median_error(prediction, shapes, signed=True)
    assert math.log(1 / 0.85) - 0.08 < bias < math.log(1 / 0.65) + 0.08
    assert np.all(np.isinf(prediction.octaves))
    assert np.all(prediction.high - prediction.low >= 2 * 1.645 * 0.499)


@pytest.mark.parametrize("kind", [K.LINEAR_QKV, K.NORM, K.FLASH_ATTENTION])
@pytest.mark.parametrize("number", [0, 24])
def test_what_is_asked_for_beside_an_operator_changes_nothing(kind: K, number: int) -> None:
    """Elements of any width in one question are as each alone."""
    groups = _groups(number) if number else {}
    model = fit_machine(groups, device=H100, use_prior=True)
    num_sizes = {K.LINEAR_QKV: 3, K.NORM: 2, K.FLASH_ATTENTION: 6}[kind]
    sizes = random_shapes(np.random.default_rng(5), 6, num_sizes, highest=512)
    widths = np.array([4.0, 2.0, 1.0, 2.0, 4.0, 2.0])
    together = replace(batch(kind, P.BACKWARD, sizes), element_nbytes=widths)
    prediction = model.predict_unmeasured(together)
    for row in range(len(widths)):
        alone = model.predict_unmeasured(together.take(np.array([row])))
        for name in ("log_time", "low", "high"):
            assert getattr(prediction, name)[row] == pytest.approx(
                getattr(alone, name)[0], abs=1e-12
            )


def test_memory_traffic_that_was_never_measured_follows_the_ceilings() -> None:
    model = _fitted(24)
    shapes = batch(K.ELEMENTWISE, P.FORWARD, random_shapes(np.random.default_rng(3), 40, 2))
    prediction = model.predict_unmeasured(shapes)
    read_and_written_s = 2 * 2 * shapes.sizes.prod(axis=1) / (0.9 * MACHINE.bytes_per_s)
    large = read_and_written_s > 5e-5
    error = prediction.log_time[large] - np.log(read_and_written_s[large])
    assert abs(np.median(error)) < 0.5
    assert np.mean(np.abs(error) < (prediction.high - prediction.low)[large] / 2) > 0.9


HERE = PlantedMachine()
TWICE = PlantedMachine(
    flop_per_s=2 * HERE.flop_per_s, bytes_per_s=2 * HERE.bytes_per_s, floor_s=HERE.floor_s / 2
)
BY_SHEET = PlantedMachine(
    flop_per_s=HERE.flop_per_s * 989 / 312, bytes_per_s=HERE.bytes_per_s * 3.35 / 2.0
)


@pytest.fixture(scope="module")
def here() -> MachineModel:
    """A machine whose operators all run at its ceilings."""
    return fit_machine(_groups(24, machine=HERE), device=A100)


def _moved_errors(model: MachineModel, machine: PlantedMachine) -> dict[str, float]:
    groups = _groups(60, seed=1, machine=machine)
    return {
        name: _median_error(model.predict(name, of.batch), of.batch, machine)
        for name, of in groups.items()
    }


def test_the_data_sheet_alone_carries_to_a_device_that_keeps_to_it(here: MachineModel) -> None:
    there = transfer_to_device(here, device=H100)
    assert max(_moved_errors(there, BY_SHEET).values()) < 0.07
    # Staying would be off by up to the ratio of the ceilings.
    assert max(_moved_errors(here, BY_SHEET).values()) > 0.4
    ratio = there.ceilings.flop_per_s / here.ceilings.flop_per_s
    assert ratio == pytest.approx(989 / 312)
    assert there.ceilings.bytes_per_s / here.ceilings.bytes_per_s == pytest.approx(3.35 / 2.0)
    assert there.is_moved and not here.is_moved


@pytest.mark.parametrize("device", [H100, "Accelerator 9"])
def test_probes_tell_a_device_that_is_twice_as_fast(here: MachineModel, device: str) -> None:
    probes = _groups(8, seed=5, machine=TWICE, noise=0.02)
    there = transfer_to_device(here, device=device, probes=probes)
    errors = _moved_errors(there, TWICE)
    assert max(errors.values()) < 0.07
    without = _moved_errors(transfer_to_device(here, device=device), TWICE)
    assert max(without.values()) > 3 * max(errors.values())


def test_probes_of_one_operator_help_the_others(here: MachineModel) -> None:
    probes = {
        name: of
        for name, of in _groups(8, seed=5, machine=TWICE).items()
        if name.startswith(K.LINEAR_FC1.value)
    }
    by_sheet, probed = (
        _moved_errors(transfer_to_device(here, device="Accelerator 9", probes=p), TWICE)
        for p in (None, probes)
    )
    for phase in P.FORWARD, P.BACKWARD:
        other = _name(K.LINEAR_FC2, phase)
        assert probed[other] < 0.5 * by_sheet[other]


def test_probes_that_the_model_has_no_operator_for_are_left_out(here: MachineModel) -> None:
    probes = {"other/forward": _groups(8)[_name(K.NORM)]}
    there = transfer_to_device(here, device=H100, probes=probes)
    assert there.shift == transfer_to_device(here, device=H100).shift


def test_moving_nowhere_changes_little(here: MachineModel) -> None:
    there = transfer_to_device(here, device=A100)
    assert there.ceilings.flop_per_s == pytest.approx(here.ceilings.flop_per_s)
    assert max(_moved_errors(there, HERE).values()) < 0.05


def test_half_of_what_an_operator_does_otherwise_goes_along() -> None:
    """Two products lie 0.85 / 0.65 apart; on the other device half of that remains."""
    model = fit_machine(_groups(24, noise=0.01), device=A100)
    there = transfer_to_device(model, device=H100)
    shapes = batch(K.LINEAR, P.FORWARD, random_shapes(np.random.default_rng(3), 40, 3, lowest=2048))

    def apart(of: MachineModel) -> float:
        first, second = (
            of.predict(_name(kind), shapes).log_time for kind in (K.LINEAR_FC1, K.LINEAR_FC2)
        )
        return float(np.median(second - first))

    assert apart(model) == pytest.approx(math.log(0.85 / 0.65), abs=0.04)
    assert apart(there) == pytest.approx(apart(model) / 2, abs=1e-6)


@pytest.mark.parametrize("number", [8, 24, 70])
def test_intervals_of_a_moved_machine_are_wider(number: int) -> None:
    here = _fitted(number)
    there = transfer_to_device(here, device=H100)
    for name, group in _groups(20, seed=1).items():
        stayed, moved = here.predict(name, group.batch), there.predict(name, group.batch)
        assert np.all(moved.high - moved.low > stayed.high - stayed.low)
        assert np.array_equal(moved.octaves, stayed.octaves)


@pytest.mark.parametrize("number", [8, 24])
def test_ninety_percent_intervals_cover_planted_shapes(number: int) -> None:
    """Each shape is off by its own factor of about 6 %; shapes are of the same range."""
    hits, kinds = [], {K.LINEAR_FC1: 3, K.NORM: 2}
    for seed in range(NUM_SEEDS):
        known = _groups(number, seed=seed, noise=0.06, kinds=kinds)
        model = fit_machine(known, device=A100)
        for name, group in _groups(40, seed=1000 + seed, noise=0.06, kinds=kinds).items():
            prediction, seen = model.predict(name, group.batch), np.log(group.time_s)
            hits.append(np.mean((prediction.low <= seen) & (seen <= prediction.high)))
    # Rows of one operator share its model: of its forty about ten are independent.
    bound = 3 * math.sqrt(0.9 * 0.1 / (10 * len(hits)))
    assert 0.9 - bound <= np.mean(hits) <= 0.9 + bound


@pytest.mark.parametrize("number", [6, 20])
def test_intervals_of_a_moved_machine_hold_what_its_probes_hold(
    here: MachineModel, number: int
) -> None:
    """Each operator of the new machine is off by a factor of its own, which probes tell."""
    there = replace(TWICE, efficiency={K.LINEAR_FC1: 0.7, K.LINEAR_FC2: 1.3})
    probes = _groups(number, seed=5, machine=there, noise=0.04)
    moved = transfer_to_device(here, device=H100, probes=probes)
    for name, of in _groups(200, seed=6, machine=there, noise=0.04).items():
        prediction, seen = moved.predict(name, of.batch), np.log(of.time_s)
        inside = np.mean((prediction.low <= seen) & (seen <= prediction.high))
        assert inside >= 0.75, name
        assert np.median(np.abs(prediction.log_time - seen)) < 0.13


def test_without_probes_a_moved_machine_is_wider(here: MachineModel) -> None:
    probes = _groups(20, seed=5, machine=TWICE)
    by_sheet, probed = (transfer_to_device(here, device=H100, probes=p) for p in (None, probes))
    for name, of in _groups(10, seed=6, machine=TWICE).items():
        wide, narrow = (np.median(m.predict(name, of.batch).high) for m in (by_sheet, probed))
        law = np.median(by_sheet.predict(name, of.batch).log_time)
        assert wide - law > 2 * (narrow - np.median(probed.predict(name, of.batch).log_time))


def test_nothing_is_faster_than_the_data_sheet() -> None:
    """Rows of small products, a third slower than a machine of three times the sheet's rates, lead
    no estimate of a large one beyond the sheet."""
    fast = PlantedMachine(flop_per_s=3 * 312e12, bytes_per_s=3 * 2.0e12, floor_s=1e-5)
    rng = np.random.default_rng(0)
    small = batch(K.LINEAR_FC1, P.FORWARD, np.exp2(rng.uniform(5, 9, (80, 3))).round())
    model = fit_machine({"linear_fc1/forward": fast.measure(small)}, device=A100)
    large = batch(K.LINEAR_FC1, P.FORWARD, np.exp2(rng.uniform(12, 15, (40, 3))).round())
    prediction = model.predict("linear_fc1/forward", large)
    least_s = 2 * large.sizes.prod(axis=1) / 312e12
    assert (np.exp(prediction.low) >= least_s * (1 - 1e-9)).all()
    norm = batch(K.NORM, P.FORWARD, np.full((1, 2), 2.0**18))
    moved_s = (2 * 2 * 2.0**36 - 2**28) / 2.0e12
    assert np.exp(model.predict_unmeasured(norm).low[0]) >= moved_s * (1 - 1e-9)
