"""Choices among measured layouts: cases whose best, folds and figures are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from step_fixtures import layout, row

from forerun.benchmarks.baselines.layout_rules import published_rule
from forerun.benchmarks.scoring.layout_choices import (
    Scores,
    best_known,
    by_model,
    choice_figures,
    choices,
    jobs,
    known_places,
)
from forerun.calib.records.step_rows import StepRow
from forerun.calib.steps.table_steps import TableSteps
from forerun.calib.workload.config import Attention


def rows(*times_s: float) -> list[StepRow]:
    """Layouts of one job on 8 GPUs."""
    degrees = [(1, 1, 8), (2, 1, 4), (4, 1, 2), (8, 1, 1), (1, 2, 4)]
    return [
        row(layout(tp, pp, dp, 1), time_s)
        for (tp, pp, dp), time_s in zip(degrees, times_s, strict=False)
    ]


def told(*scores: float) -> Scores:
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
    assert list(known_places(job, 0, 4)) == [()]
    assert list(known_places(job, 1, 4)) == [(0,), (1,), (2,), (3,), (4,)]
    assert len(list(known_places(job, 3, 10))) == 10
    drawn = list(known_places(job, 3, 4))
    assert len(drawn) == 4 and drawn == list(known_places(job, 3, 4))
    (small,) = jobs(rows(1.0, 2.0, 3.0))
    assert list(known_places(small, 3, 4)) == []


def test_the_ratio_is_that_of_the_chosen_layout_and_of_a_tie_the_mean() -> None:
    (job,) = jobs(rows(1.0, 1.5, 3.0))
    (second,) = choices(job, [()], told(2.0, 1.0, 3.0))
    (tie,) = choices(job, [()], told(1.0, 1.0, 3.0))
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
    (same,) = choices(job, [()], told(2.0, 1.0))
    assert same.time_ratio == pytest.approx(1.1) and same.apart_ratio == 1.0
    (once,) = jobs([first, second])
    (apart,) = choices(once, [()], told(2.0, 1.0))
    assert apart.apart_ratio == pytest.approx(1.1)
    figures = choice_figures([same])
    assert figures["p95"] == pytest.approx(1.1) and figures["apart_p95"] == 1.0


def test_each_job_weighs_the_same_in_the_figures() -> None:
    (job,) = jobs(rows(1.0, 2.0, 3.0))
    (other,) = jobs(rows(1.0, 4.0))
    good = choices(job, [(0,), (1,), (2,)], told(1.0, 2.0, 3.0))
    bad = choices(other, [()], told(2.0, 1.0))
    figures = choice_figures([*good, *bad])
    assert figures["jobs"] == 2 and figures["choices"] == 4
    assert (figures["median"], figures["p95"], figures["max"]) == (1.0, 4.0, 4.0)
    assert figures["best_frac"] == pytest.approx(0.5)


def test_a_known_layout_has_its_measured_step_in_the_models_eyes() -> None:
    given = rows(1e-3, 9.0, 9.0)
    (job,) = jobs(given)
    scores = by_model(TableSteps())
    (wonder,) = choices(job, [(0,)], scores)
    assert wonder.time_ratio == 1.0
    assert scores(job.rows, [0])[0] == pytest.approx(1e-3, rel=5e-3)  # known to 1 %
    (blind,) = choices(job, [(2,)], scores)
    again = [replace(one, measured_s=7.0) for one in given[:2]]
    hidden = scores([*again, given[2]], [2])
    assert hidden.tolist() == pytest.approx(scores(given, [2]).tolist())
    assert blind.known == (2,)


def test_whoever_stays_takes_the_best_of_those_that_were_run() -> None:
    (job,) = jobs(rows(1.0, 2.0, 3.0))
    (stays,) = choices(job, [(1, 2)], best_known)
    assert stays.time_ratio == 2.0


def test_the_published_rule_fills_the_node_with_tensor_parallelism_first() -> None:
    def order(configs: Sequence[tuple[int, int, int]]) -> list[int]:
        found = [layout(tp, pp, dp, 1) for tp, pp, dp in configs]
        return np.argsort(published_rule(found)).tolist()

    assert order([(1, 8, 2), (8, 1, 2), (2, 4, 2)]) == [1, 2, 0]
    assert order([(16, 1, 1), (8, 2, 1)]) == [1, 0]
    assert order([(2, 1, 8), (1, 1, 16)]) == [1, 0]
