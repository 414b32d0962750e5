"""Planted faults are refused and counted; nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_machine import A100, PlantedMachine, batch, random_shapes, timed

from forerun.benchmarks.protocols.operators import validate_operators
from forerun.calib.fit._outliers import Refusal, RefusalReason, refuse
from forerun.calib.fit.batches import Timed
from forerun.calib.fit.laws import Ceilings
from forerun.calib.fit.machine import fit_machine
from forerun.calib.fit.priors import device_prior
from forerun.calib.workload.operators import OperatorKind, Phase

K = OperatorKind
P = Phase
MACHINE = PlantedMachine()
PEAKS = Ceilings(flop_per_s=312e12, bytes_per_s=2e12, launch_s=0.0)
FORWARD, BACKWARD = "fc1/forward", "fc1/backward"
NUM_ROWS = 40


def _pair(
    kind: K = K.LINEAR_FC1, *, number: int = NUM_ROWS, seed: int = 0, noise: float = 0.03
) -> dict[str, Timed]:
    """Forward and backward of one operator, the same shapes in both."""
    rng = np.random.default_rng(seed)
    shapes = random_shapes(rng, number, 3 if kind.is_linear else 2, lowest=1024)
    return {
        f"fc1/{phase.value}": MACHINE.measure(batch(kind, phase, shapes), rng, noise=noise)
        for phase in (P.FORWARD, P.BACKWARD)
    }


def _spoilt(of: Timed, rows: np.ndarray, time_s: np.ndarray | float) -> Timed:
    times = of.time_s.copy()
    times[rows] = time_s
    return replace(of, time_s=times)


def _least_s(of: Timed, *, number: int = 1) -> np.ndarray:
    """Time of a product at the peak of the data sheet."""
    return number * 2 * of.batch.sizes.prod(axis=1) / PEAKS.flop_per_s


def _without(of: Timed, rows: np.ndarray) -> Timed:
    return of.take(np.setdiff1d(np.arange(len(of)), rows))


def _same(one: Timed, other: Timed) -> bool:
    return (
        np.array_equal(one.time_s, other.time_s)
        and np.array_equal(one.batch.sizes, other.batch.sizes)
        and np.array_equal(one.weight, other.weight)
    )


@given(
    kind=st.sampled_from([K.LINEAR_FC1, K.NORM, K.ELEMENTWISE]),
    seed=st.integers(0, 1000),
    noise=st.floats(0, 0.1),
)
def test_rows_that_can_be_true_pass(kind: K, seed: int, noise: float) -> None:
    groups = _pair(kind, seed=seed, noise=noise)
    passed, refusals = refuse(groups, lambda _: PEAKS)
    assert refusals == ()
    assert set(passed) == set(groups)
    assert all(_same(passed[name], groups[name]) for name in groups)


def test_products_above_the_peak_are_refused() -> None:
    groups, wrong = _pair(), np.array([3, 8, 21])
    groups[FORWARD] = _spoilt(groups[FORWARD], wrong, 0.9 * _least_s(groups[FORWARD])[wrong])
    passed, (refusal,) = refuse(groups, lambda _: PEAKS)
    assert refusal == Refusal(
        name=FORWARD,
        reason=RefusalReason.BELOW_ROOFLINE,
        num_rows=NUM_ROWS,
        num_refused=3,
        is_doubtful=False,
    )
    assert _same(passed[FORWARD], _without(groups[FORWARD], wrong))
    assert _same(passed[BACKWARD], groups[BACKWARD])


def test_attention_above_the_peak_is_refused() -> None:
    of = batch(K.FLASH_ATTENTION, P.FORWARD, [(1, 16, 16, 128 * k, 64, 64) for k in range(1, 21)])
    number, heads, _, seq, channels, _ = of.sizes.T
    least_s = 2 * number * heads * seq**2 * channels / PEAKS.flop_per_s
    time_s = 1e-5 + 2 * least_s
    time_s[7] = 0.9 * least_s[7]
    passed, (refusal,) = refuse({"flash/forward": timed(of, time_s)}, lambda _: PEAKS)
    assert (refusal.reason, refusal.num_refused) == (RefusalReason.BELOW_ROOFLINE, 1)
    assert len(passed["flash/forward"]) == 19


@pytest.mark.parametrize("kind", [K.LINEAR_FC1, K.NORM])
def test_no_row_is_held_against_a_roofline_that_is_not_known(kind: K) -> None:
    groups = _pair(kind)
    spoilt = {
        name: replace(of, time_s=1e-3 * of.time_s, weight=of.weight) for name, of in groups.items()
    }
    assert refuse(spoilt, None)[1] == ()
    # Operators that only move memory may run from a cache, faster than the data sheet allows.
    if kind is K.NORM:
        assert refuse(spoilt, lambda _: PEAKS)[1] == ()


def test_products_whose_backward_is_too_short_are_refused() -> None:
    groups, wrong = _pair(), np.array([0, 5, 17, 30])
    groups[BACKWARD] = _spoilt(groups[BACKWARD], wrong, 0.4 * groups[FORWARD].time_s[wrong])
    passed, (refusal,) = refuse(groups, None)
    assert (refusal.name, refusal.reason, refusal.num_refused) == (
        BACKWARD,
        RefusalReason.SHORT_BACKWARD,
        4,
    )
    assert _same(passed[BACKWARD], _without(groups[BACKWARD], wrong))
    assert _same(passed[FORWARD], groups[FORWARD])


def test_a_short_backward_of_what_moves_memory_is_possible() -> None:
    groups = _pair(K.NORM)
    groups[BACKWARD] = replace(groups[BACKWARD], time_s=0.4 * groups[FORWARD].time_s)
    assert refuse(groups, None)[1] == ()


@pytest.mark.parametrize("kind", [K.LINEAR_FC1, K.NORM])
def test_numbers_that_were_copied_are_refused_in_both_phases(kind: K) -> None:
    groups, wrong = _pair(kind), np.arange(4, 16)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], wrong, groups[FORWARD].time_s[wrong])
    passed, refusals = refuse(groups, None)
    assert {(r.name, r.reason, r.num_refused) for r in refusals} == {
        (name, RefusalReason.COPIED_PHASE, 12) for name in groups
    }
    assert all(_same(passed[name], _without(groups[name], wrong)) for name in groups)


@pytest.mark.parametrize("seed", range(20))
def test_phases_that_happen_to_take_about_as_long_are_not_copies(seed: int) -> None:
    """Ratios spread around one: a few lie within a percent of it, as many just beyond."""
    groups = _pair(K.NORM, number=200, seed=seed)
    ratio = np.exp(0.3 * np.random.default_rng(seed).normal(size=200))
    groups[BACKWARD] = replace(groups[BACKWARD], time_s=ratio * groups[FORWARD].time_s)
    assert (np.abs(np.log(ratio)) < 0.01).any()
    assert refuse(groups, lambda _: PEAKS)[1] == ()


def test_a_few_equal_times_are_chance() -> None:
    groups, few = _pair(K.NORM), np.arange(4)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], few, groups[FORWARD].time_s[few])
    assert refuse(groups, None)[1] == ()


def test_phases_of_equal_work_may_take_equal_time() -> None:
    groups = _pair()
    forward = groups[FORWARD]
    permuted = replace(forward.batch, kind=K.PERMUTE)
    both = {
        f"permute/{phase.value}": replace(forward, batch=replace(permuted, phase=phase))
        for phase in (P.FORWARD, P.BACKWARD)
    }
    assert refuse(both, None)[1] == ()


def test_every_kind_of_fault_is_counted_by_itself() -> None:
    groups = _pair(number=60)
    fast, short, copied = np.arange(5), np.arange(10, 16), np.arange(20, 40)
    forward, backward = groups[FORWARD], groups[BACKWARD]
    forward = _spoilt(forward, fast, 0.9 * _least_s(forward)[fast])
    backward = _spoilt(backward, short, 0.4 * forward.time_s[short])
    backward = _spoilt(backward, copied, 1.001 * forward.time_s[copied])
    # A copy of one product's time is too fast for two where it ran above half of the peak.
    impossible = backward.time_s < _least_s(backward, number=2) / 1.03
    passed, refusals = refuse({FORWARD: forward, BACKWARD: backward}, lambda _: PEAKS)
    assert {(r.name, r.reason): r.num_refused for r in refusals} == {
        (FORWARD, RefusalReason.BELOW_ROOFLINE): 5,
        (BACKWARD, RefusalReason.BELOW_ROOFLINE): impossible.sum(),
        (BACKWARD, RefusalReason.SHORT_BACKWARD): 6,
        (FORWARD, RefusalReason.COPIED_PHASE): 20,
        (BACKWARD, RefusalReason.COPIED_PHASE): 20,
    }
    assert _same(passed[FORWARD], _without(forward, np.concatenate([fast, copied])))
    assert _same(passed[BACKWARD], _without(backward, np.concatenate([short, copied])))


@pytest.mark.parametrize("reason", list(RefusalReason))
def test_an_operator_that_is_wrong_throughout_is_doubtful_and_kept(reason: RefusalReason) -> None:
    groups = _pair()
    forward = groups[FORWARD]
    if reason is RefusalReason.BELOW_ROOFLINE:
        groups = {FORWARD: replace(forward, time_s=0.5 * _least_s(forward))}
    else:
        factor = 0.4 if reason is RefusalReason.SHORT_BACKWARD else 1.0
        groups[BACKWARD] = replace(groups[BACKWARD], time_s=factor * forward.time_s)
    passed, refusals = refuse(
        groups, (lambda _: PEAKS) if reason is RefusalReason.BELOW_ROOFLINE else None
    )
    assert {r.reason for r in refusals} == {reason}
    assert all(r.is_doubtful and r.num_refused == NUM_ROWS for r in refusals)
    assert all(_same(passed[name], groups[name]) for name in groups)


def test_a_shape_without_its_other_phase_is_not_judged_by_it() -> None:
    groups = _pair()
    groups[FORWARD] = groups[FORWARD].take(np.arange(10))
    alone = np.arange(10, NUM_ROWS)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], alone, 1e-9)
    assert refuse(groups, None)[1] == ()


def test_nothing_that_was_given_is_changed() -> None:
    groups, wrong = _pair(), np.arange(8)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], wrong, 0.3 * groups[FORWARD].time_s[wrong])
    before = {name: of.take(np.arange(len(of))) for name, of in groups.items()}
    refuse(groups, lambda _: PEAKS)
    assert all(_same(groups[name], before[name]) for name in before)


def test_repeats_of_a_shape_answer_to_each_other() -> None:
    groups = _pair(number=10)
    groups = {name: of.take(np.tile(np.arange(10), 3)) for name, of in groups.items()}
    groups[BACKWARD] = _spoilt(groups[BACKWARD], np.array([25]), 0.4 * groups[FORWARD].time_s[25])
    passed, (refusal,) = refuse(groups, None)
    assert (refusal.num_rows, refusal.num_refused) == (30, 1)
    assert _same(passed[BACKWARD], _without(groups[BACKWARD], np.array([25])))


def test_a_machine_is_fitted_without_them_and_names_them() -> None:
    groups, wrong = _pair(), np.arange(8)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], wrong, 0.3 * groups[FORWARD].time_s[wrong])
    model = fit_machine(groups, device=A100)
    # Two products in a third of the time of one are above the peak as well.
    both = {RefusalReason.BELOW_ROOFLINE, RefusalReason.SHORT_BACKWARD}
    assert {(r.name, r.reason, r.num_refused) for r in model.refusals} == {
        (BACKWARD, reason, 8) for reason in both
    }
    clean = {FORWARD: groups[FORWARD], BACKWARD: _without(groups[BACKWARD], wrong)}
    shapes = groups[BACKWARD].batch
    expected = fit_machine(clean, device=A100).predict(BACKWARD, shapes)
    assert np.array_equal(model.predict(BACKWARD, shapes).log_time, expected.log_time)


def _frame(groups: dict[str, Timed]) -> pd.DataFrame:
    parts = [
        pd.DataFrame(
            {
                "device": A100,
                "group": "fc1",
                "kind": of.batch.kind.value,
                "phase": of.batch.phase.value,
                "shape": ["x".join(str(int(s)) for s in row) for row in of.batch.sizes],
                "element_nbytes": 2,
                "time_s": of.time_s,
                "tp": pd.array([1] * len(of), dtype="Int64"),
                "flag": "",
            }
        )
        for of in groups.values()
    ]
    return pd.concat(parts, ignore_index=True)


def test_refused_rows_are_scored_like_all_others() -> None:
    groups, wrong = _pair(), np.arange(8)
    clean = _frame(groups)
    groups[BACKWARD] = _spoilt(groups[BACKWARD], wrong, 0.3 * groups[FORWARD].time_s[wrong])
    spoilt = _frame(groups)
    assert (RefusalReason.SHORT_BACKWARD, 8) in {
        (r.reason, r.num_refused) for r in refuse(groups, device_prior(A100).peaks_for)[1]
    }

    def measured_s(frame: pd.DataFrame) -> dict[str, np.ndarray]:
        scored = validate_operators(frame, seeds=(0,), protocols=("few_8",))
        return {str(g): part["measured_s"].to_numpy() for g, part in scored.groupby("group")}

    before, after = measured_s(clean), measured_s(spoilt)
    assert {name: len(v) for name, v in before.items()} == {
        name: len(v) for name, v in after.items()
    }
    assert set(groups[BACKWARD].time_s[wrong]) & set(after[BACKWARD])


def test_bytes_beyond_the_memory_are_refused_for_any_kind() -> None:
    """A copy of 4 GiB on a card of 2 TB/s takes 2 ms; rows of half of that cannot be."""
    rng = np.random.default_rng(0)
    sizes = np.column_stack([np.full(20, 2**20), rng.integers(1024, 4096, 20)])
    shapes = batch(OperatorKind.ELEMENTWISE, Phase.FORWARD, sizes)
    honest_s = 2 * 2 * sizes.prod(axis=1) / 1.6e12
    wrong = np.arange(20) < 4
    groups = {"copy/forward": timed(shapes, np.where(wrong, honest_s / 3, honest_s))}
    accepted, (refusal,) = refuse(groups, lambda nbytes: PEAKS)
    assert refusal.num_refused == 4 and len(accepted["copy/forward"]) == 16
