"""Planted differences come back with their term, rank and cause; nothing is said of equal runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planted_runs import LAYOUT, STEP_S, planted_run
from planted_steps import GPU
from planted_stragglers import config_of

from forerun.calib.differences.levels import Basis, Difference, Verdict
from forerun.calib.differences.two_runs import difference
from forerun.calib.errors import CalibrationError
from forerun.calib.samples.table import only_windows
from forerun.calib.workload.config import Batch, Parallelism

CONFIG = replace(config_of(LAYOUT), device=GPU)


def compare_planted_runs(
    seed: int = 1, first: dict[str, Any] | None = None, **second: Any
) -> Difference:
    draw = np.random.default_rng(seed)
    one = planted_run(draw, name="one", **(first or {}))
    return difference(one, planted_run(draw, name="other", **second))


def changes_s(step_difference: Difference) -> dict[str, float]:
    """Every change that is told, by its name."""
    by_name = {
        term.name: term.change.value for term in (*step_difference.terms, *step_difference.ranks)
    }
    return by_name | {cause.kind.value: cause.change_s for cause in step_difference.causes}


@pytest.mark.parametrize(
    ("part", "terms"),
    [
        ("forward", {"MLP forward", "attention forward"}),
        ("backward", {"MLP backward", "attention backward"}),
        ("optimizer", {"optimizer"}),
        ("host", {"host, between steps"}),
        ("transfer", {"DP transfers"}),
    ],
)
@pytest.mark.parametrize("sign", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_a_planted_change_is_found_where_it_is(part: str, terms: set[str], sign: int) -> None:
    planted: dict[str, Any] = {"extra_s": {part: 0.2}}
    difference = (
        compare_planted_runs(**planted) if sign > 0 else compare_planted_runs(first=planted)
    )
    assert difference.verdict is (Verdict.SLOWER if sign > 0 else Verdict.FASTER)
    assert difference.basis is Basis.STEP_TIME
    log = sign * math.log((STEP_S + 0.2) / STEP_S)
    assert difference.step.low < log < difference.step.high
    shown = {term.name for term in difference.terms if term.change.is_shown}
    assert shown == terms
    moved = [term.change for term in difference.terms if term.name in terms]
    assert sum(one.low for one in moved) < sign * 0.2 < sum(one.high for one in moved)


def test_terms_add_up_to_the_steps() -> None:
    difference = compare_planted_runs(extra_s={"backward": 0.1})
    for side, name in ((difference.first, "first_s"), (difference.second, "second_s")):
        whole_s = sum(getattr(term, name) for term in difference.terms)
        assert whole_s == pytest.approx(side.step_time_s, rel=1e-3)


def test_a_slow_rank_is_named_and_so_is_who_waits_for_it() -> None:
    difference = compare_planted_runs(slow_rank_s=0.3)
    assert difference.verdict is Verdict.SLOWER
    assert [cause.ranks for cause in difference.causes] == [(1,)]
    assert "straggling rank: rank 1: own compute" in difference.main
    assert {term.name for term in difference.ranks} == {"rank 1 own work", "rank 0 waiting"}
    assert "DP waiting" in {term.name for term in difference.terms if term.change.is_shown}
    assert "rank 1" in difference.second.slow and not difference.first.slow


@pytest.mark.slow
@pytest.mark.parametrize("num_windows", [1, 4])
def test_equal_runs_have_no_verdict(num_windows: int) -> None:
    """How often a verdict of noise is wrong is counted over 400 pairs in ``test_levels.py``."""
    shown = [compare_planted_runs(seed, num_windows=num_windows).verdict for seed in range(6)]
    assert shown == [Verdict.NO_DIFFERENCE] * 6
    assert "no difference that these runs could show (below " in compare_planted_runs().sentence


def test_a_run_and_itself_differ_in_nothing() -> None:
    run = planted_run(np.random.default_rng(1))
    result = difference(run, run)
    assert result.verdict is Verdict.NO_DIFFERENCE and not result.settings and not result.causes
    assert result.step.value == 0 and all(term.change.value == 0 for term in result.terms)


@pytest.mark.slow
@pytest.mark.parametrize("second", [{"slow_rank_s": 0.3}, {"extra_s": {"optimizer": 0.1}}, {}])
def test_the_other_way_round_is_the_opposite(second: dict[str, Any]) -> None:
    draw = np.random.default_rng(5)
    one, other = planted_run(draw, name="one"), planted_run(draw, name="other", **second)
    result, back = difference(one, other), difference(other, one)
    assert result.step.value == pytest.approx(-back.step.value, abs=1e-12)
    opposite = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
    assert back.verdict is opposite.get(result.verdict, result.verdict)
    ours, theirs = changes_s(result), changes_s(back)
    assert ours.keys() == theirs.keys()
    for name, change_s in ours.items():
        assert change_s == pytest.approx(-theirs[name], abs=1e-12)


def test_windows_of_one_run_are_compared() -> None:
    run = planted_run(np.random.default_rng(1), num_steps=20)
    slower = run.steps["time_s"].where(run.steps["window"] != 3, run.steps["time_s"] * 1.2)
    run = replace(run, steps=run.steps.assign(time_s=slower))
    same, later = (
        difference(only_windows(run, [0]), only_windows(run, [window])) for window in (1, 3)
    )
    assert same.verdict is Verdict.NO_DIFFERENCE and later.verdict is Verdict.SLOWER
    assert later.step.low < math.log(1.2) < later.step.high


def test_a_larger_micro_batch_is_named_first_and_judged_by_throughput() -> None:
    larger = replace(CONFIG, batch=replace(CONFIG.batch, micro_batch_size=2))
    difference = compare_planted_runs(first={"extra_s": {"host": 0.4}}, config=larger)
    assert difference.basis is Basis.THROUGHPUT and difference.verdict is Verdict.FASTER
    assert difference.settings_text == "B has micro-batch 2 instead of 1"
    assert "in tokens/s" in difference.sentence and not difference.causes


def test_another_batch_is_compared_by_tokens() -> None:
    batch = Batch(micro_batch_size=1, global_batch_size=2 * CONFIG.batch.global_batch_size)
    difference = compare_planted_runs(
        config=replace(CONFIG, batch=batch), extra_s={"backward": STEP_S}
    )
    assert difference.settings_text == "B has global batch 32 instead of 16"
    assert difference.per_tokens == 1000 and difference.basis is Basis.THROUGHPUT
    # Twice the time for twice the tokens.
    assert difference.verdict is Verdict.NO_DIFFERENCE
    assert difference.step.low < 0 < difference.step.high


def test_another_model_is_not_compared() -> None:
    model = replace(CONFIG.model, num_layers=16)
    difference = compare_planted_runs(config=replace(CONFIG, model=model), extra_s={"forward": 1.0})
    assert difference.verdict is Verdict.NOT_COMPARABLE
    assert difference.sentence == "not comparable: another model (B has num layers 16 instead of 8)"
    assert not difference.is_slower_by(0.0)


def test_another_layout_is_judged_by_throughput_and_longer_samples_by_tokens() -> None:
    layout = replace(CONFIG, parallelism=Parallelism(tp=2, dp=1))
    difference = compare_planted_runs(config=layout)
    assert difference.settings_text == "B has TP 2 instead of 1, DP 1 instead of 2"
    assert difference.basis is Basis.THROUGHPUT and difference.verdict is Verdict.NO_DIFFERENCE
    longer = replace(CONFIG.model, seq_length=2 * CONFIG.model.seq_length)
    difference = compare_planted_runs(config=replace(CONFIG, model=longer))
    assert difference.verdict is Verdict.FASTER and difference.per_tokens == 1000


def test_runs_that_did_not_describe_themselves_are_compared_by_their_steps() -> None:
    draw = np.random.default_rng(1)
    runs = [planted_run(draw, name="one"), planted_run(draw, name="two", extra_s={"host": 0.3})]
    bare = [replace(run, runs=run.runs.assign(config="")) for run in runs]
    result = difference(*bare)
    assert result.verdict is Verdict.SLOWER and result.basis is Basis.STEP_TIME
    assert result.first.tokens_per_s is None
    mixed = difference(runs[0], bare[1])
    assert mixed.sentence == "not comparable: the model of only one of the runs is known"


def test_without_a_clean_step_nothing_is_said() -> None:
    run = planted_run(np.random.default_rng(1))
    flagged = replace(run, steps=run.steps.assign(is_clean=False))
    with pytest.raises(CalibrationError, match="record more steps"):
        difference(run, flagged)


@pytest.mark.slow
def test_a_threshold_needs_a_verdict() -> None:
    slower = compare_planted_runs(extra_s={"host": 0.3})
    assert slower.is_slower_by(0.0) and slower.is_slower_by(0.2) and not slower.is_slower_by(0.5)
    assert not compare_planted_runs(first={"extra_s": {"host": 0.3}}).is_slower_by(0.0)
    assert not compare_planted_runs(extra_s={"host": 0.001}).is_slower_by(0.0)
