"""Choices among measured layouts: cases whose best, folds and figures are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_fixtures import layout, row

from forerun.benchmarks.baselines.layout_rules import published_rule
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.scoring.layout_choices import (
    Choice,
    Scores,
    against_the_better,
    best_known,
    by_model,
    choice_figures,
    choices,
    jobs,
    known_rows,
    rank_correlation,
    rows_of_one_size,
    rows_of_other_jobs,
)
from forerun.benchmarks.scoring.next_runs import PICKS, after_next_runs
from forerun.calib.records.step_rows import StepRow
from forerun.calib.workload.config import Attention

pytestmark = pytest.mark.slow


def rows(*times_s: float) -> list[StepRow]:
    """Layouts of one job on 8 GPUs."""
    degrees = [(1, 1, 8), (2, 1, 4), (4, 1, 2), (8, 1, 1), (1, 2, 4)]
    return [
        row(layout(tp, pp, dp, 1), time_s)
        for (tp, pp, dp), time_s in zip(degrees, times_s, strict=False)
    ]


def fixed_scores(*scores: float) -> Scores:
    return lambda rows, known: np.array(scores)


def test_a_layout_that_was_run_twice_is_one_with_the_median_of_its_steps() -> None:
    first, second = rows(1.0, 2.0)
    (job,) = jobs([first, second, replace(first, measured_s=1.2)])
    assert job.times_s.tolist() == pytest.approx([1.1, 2.0])


def test_other_batches_releases_and_flags_are_no_layouts_of_the_same_job() -> None:
    first, second = rows(1.0, 2.0)
    batch = replace(second.config.batch, global_batch_size=128)
    others = [
        replace(second, config=replace(second.config, batch=batch)),
        replace(second, config=replace(second.config, framework="another release")),
        replace(second, config=replace(second.config, attention=Attention.UNFUSED)),
        replace(second, flag="a resumed run"),
        replace(second, machine="another"),
    ]
    assert jobs([first, *others]) == []
    assert len(jobs([first, second, *others])) == 1


def test_a_vocabulary_that_is_padded_for_tp_is_no_other_model() -> None:
    first, second = rows(1.0, 2.0)
    padded = replace(second.config.model, vocab_size=second.config.model.vocab_size + 256)
    wider = replace(second.config.model, hidden_size=4096, kv_channels=256)
    of = [replace(second, config=replace(second.config, model=one)) for one in (padded, wider)]
    assert len(jobs([first, of[0]])) == 1
    assert jobs([first, of[1]]) == []


def test_every_one_and_drawn_threes_are_known_and_leave_something_to_find() -> None:
    (job,) = jobs(rows(1.0, 2.0, 3.0, 4.0, 5.0))
    assert list(known_rows(job, 0, 4)) == [()]
    assert list(known_rows(job, 1, 4)) == [(one,) for one in job.rows]
    assert len(list(known_rows(job, 3, 10))) == 10
    drawn = list(known_rows(job, 3, 4))
    assert len(drawn) == 4 and drawn == list(known_rows(job, 3, 4))
    (small,) = jobs(rows(1.0, 2.0, 3.0))
    assert list(known_rows(small, 3, 4)) == []


def test_rows_of_other_jobs_and_sizes_are_of_the_machine_and_never_of_the_job() -> None:
    def of_depth(depth: int) -> list[StepRow]:
        results = [layout(tp, 1, 8 // tp, 1, num_layers=depth) for tp in (1, 2, 4)]
        return [row(one, 1.0, f"L{depth} {place}") for place, one in enumerate(results)]

    elsewhere = [replace(one, machine="another") for one in of_depth(64)]
    here = jobs([*of_depth(16), *of_depth(32), *of_depth(48), *elsewhere])
    job = here[0]
    (all_,) = rows_of_other_jobs(job, here, 10, 5)
    assert {one.config.model.num_layers for one in all_} == {32, 48} and len(all_) == 6
    drawn = list(rows_of_other_jobs(job, here, 4, 5))
    assert [len(set(one)) for one in drawn] == [4] * 5
    sizes = [
        {one.config.model.num_layers for one in some} for some in rows_of_one_size(job, here, 9)
    ]
    assert sizes == [{32}, {48}]
    assert list(rows_of_one_size(here[-1], here, 9)) == []


def test_tau_of_the_right_order_is_one_of_the_reversed_minus_one_and_of_none_zero() -> None:
    times_s = np.array([1.0, 2.0, 4.0, 8.0])
    assert rank_correlation(times_s**2, times_s) == pytest.approx(1.0)
    assert rank_correlation(-times_s, times_s) == pytest.approx(-1.0)
    assert rank_correlation(np.ones(4), times_s) == 0.0
    # One of six pairs stands the wrong way round.
    assert rank_correlation(np.array([2.0, 1.0, 4.0, 8.0]), times_s) == pytest.approx(4 / 6)
    assert math.isnan(rank_correlation(times_s[:1], times_s[:1]))


def test_a_perfect_order_regrets_nothing_and_known_layouts_have_no_part_in_tau() -> None:
    (job,) = jobs(rows(1.0, 1.5, 3.0, 2.0))
    (perfect,) = choices(job, [()], fixed_scores(*job.times_s))
    figures = choice_figures([perfect])
    assert [figures[name] for name in ("mean_frac", "p95_frac", "max_frac")] == [0.0, 0.0, 0.0]
    assert figures["tau"] == pytest.approx(1.0) and figures["best_frac"] == 1.0
    (reversed_,) = choices(job, [()], fixed_scores(*-job.times_s))
    assert reversed_.tau == pytest.approx(-1.0) and reversed_.time_ratio == 3.0
    # The last two rows are known; the other two are ranked correctly.
    (half,) = choices(job, [job.rows[2:]], fixed_scores(1.0, 2.0, 0.0, 9.0))
    assert half.tau == pytest.approx(1.0)


def test_ours_less_the_better_is_paired_by_job_and_sure_where_each_job_says_so() -> None:
    here = [jobs(rows(1.0, 1.0 + 0.1 * n))[0] for n in range(1, 21)]
    best = [one for job in here for one in choices(job, [()], fixed_scores(1.0, 2.0))]
    worst = [one for job in here for one in choices(job, [()], fixed_scores(2.0, 1.0))]

    def regrets(ours: Sequence[Choice], **others: Sequence[Choice]) -> tuple[str, float, float]:
        difference = against_the_better(ours, others, "time_ratio")
        assert difference is not None and difference.low <= difference.mean <= difference.high
        return difference.other, difference.low, difference.high

    other, low, high = regrets(worst, good=best, bad=worst)
    assert other == "good" and 0 < low < 1.05 < high
    assert regrets(best, bad=worst)[2] < 0 and regrets(best, good=best) == ("good", 0.0, 0.0)
    taus = against_the_better(worst, {"bad": worst, "good": best}, "tau")
    assert taus is not None and (taus.other, taus.mean, taus.high) == ("good", -2.0, -2.0)


def test_the_ratio_is_that_of_the_chosen_layout_and_of_a_tie_the_mean() -> None:
    (job,) = jobs(rows(1.0, 1.5, 3.0))
    (second,) = choices(job, [()], fixed_scores(2.0, 1.0, 3.0))
    (tie,) = choices(job, [()], fixed_scores(1.0, 1.0, 3.0))
    assert (second.time_ratio, second.best_frac) == (1.5, 0.0)
    assert (tie.time_ratio, tie.best_frac) == (1.25, 0.5)


def test_what_runs_of_one_layout_differ_by_sets_no_layouts_apart() -> None:
    first, second = rows(1.0, 1.1)
    noisy = [
        replace(one, measured_s=one.measured_s * f) for one in (first, second) for f in (0.8, 1.2)
    ]
    (job,) = jobs(noisy)
    deviation = np.log(1.2 / 0.8) / np.sqrt(2)
    assert job.sigma_log == pytest.approx(deviation) and job.num_runs == (2, 2)
    (same,) = choices(job, [()], fixed_scores(2.0, 1.0))
    assert same.time_ratio == pytest.approx(1.1) and same.apart_ratio == 1.0
    (once,) = jobs([first, second])
    (apart,) = choices(once, [()], fixed_scores(2.0, 1.0))
    assert apart.apart_ratio == pytest.approx(1.1)
    figures = choice_figures([same])
    assert figures["p95_frac"] == pytest.approx(0.1) and figures["apart_p95_frac"] == 0.0


def test_each_job_weighs_the_same_in_the_figures() -> None:
    (job,) = jobs(rows(1.0, 2.0, 3.0))
    (other,) = jobs(rows(1.0, 4.0))
    good = choices(job, [[one] for one in job.rows], fixed_scores(1.0, 2.0, 3.0))
    bad = choices(other, [()], fixed_scores(2.0, 1.0))
    figures = choice_figures([*good, *bad])
    assert figures["jobs"] == 2 and figures["choices"] == 4
    assert [figures[f"{name}_frac"] for name in ("median", "mean", "p95", "max")] == pytest.approx(
        [0.0, 1.5, 3.0, 3.0]
    )
    assert figures["best_frac"] == pytest.approx(0.5)


def test_a_known_layout_has_its_measured_step_in_the_models_eyes() -> None:
    given = rows(1e-3, 9.0, 9.0)
    (job,) = jobs(given)
    scores = by_model(TableSteps())
    (wonder,) = choices(job, [given[:1]], scores)
    assert wonder.time_ratio == 1.0
    assert scores(job.rows, given[:1])[0] == 1e-3
    remeasured = [replace(one, measured_s=7.0) for one in given[:2]]
    hidden = scores([*remeasured, given[2]], given[2:])
    assert hidden.tolist() == pytest.approx(scores(given, given[2:]).tolist())


def test_whoever_stays_takes_the_best_of_those_that_were_run() -> None:
    (job,) = jobs(rows(1.0, 2.0, 3.0))
    (stays,) = choices(job, [job.rows[1:]], best_known)
    assert stays.time_ratio == 2.0


def test_two_more_runs_of_each_kind_follow_each_running_layout() -> None:
    (job,) = jobs(rows(1.0, 1.1, 1.3, 2.0, 1.2))
    results = list(after_next_runs(job, TableSteps(), 3))
    assert [name for name, _ in results] == [name for name in ("none", *PICKS) for _ in range(3)]
    assert all(one.weight == pytest.approx(1 / 3) for _, one in results)
    model = TableSteps()
    running, *others = job.rows
    steps = model.fit([running]).steps(running)
    for name, pick in PICKS.items():
        named = pick(steps, running, others)
        assert all(one in others for one in named) and len({id(one) for one in named}) == len(named)
        # A plan names none that cannot be faster than what runs.
        assert 0 < len(named) <= 2 if name == "named by the plan" else len(named) == 2
    times_s = steps.predict([one.config for one in others]).time_s
    fastest = PICKS["predicted fastest"](steps, running, others)
    assert fastest[0] is others[int(np.argmin(times_s))]
    (small,) = jobs(rows(1.0, 2.0, 3.0, 4.0))
    assert list(after_next_runs(small, model, 3)) == []


def test_the_published_rule_fills_the_node_with_tensor_parallelism_first() -> None:
    def order(configs: Sequence[tuple[int, int, int]]) -> list[int]:
        results = [layout(tp, pp, dp, 1) for tp, pp, dp in configs]
        return np.argsort(published_rule(results)).tolist()

    assert order([(1, 8, 2), (8, 1, 2), (2, 4, 2)]) == [1, 2, 0]
    assert order([(16, 1, 1), (8, 2, 1)]) == [1, 0]
    assert order([(2, 1, 8), (1, 1, 16)]) == [1, 0]
