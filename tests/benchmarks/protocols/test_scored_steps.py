"""Scores of step predictions against figures worked out by hand; models see no scored time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau
from step_fixtures import grid, layout, row

from forerun.benchmarks.protocols.scores import (
    concat_scored,
    layout_text,
    score_folds,
    step_folds,
    step_results,
    tau_without_ties,
    worst_rows,
)
from forerun.calib.memory.peak import memory
from forerun.calib.records.step_rows import StepKind, StepPredictions, StepRow


@dataclass
class FixedPredictions:
    """A model that says what it is told, and remembers what it saw."""

    times: dict[str, float]
    seen: list[float] = field(default_factory=list)

    def fit(self, rows: Sequence[StepRow]) -> FixedPredictions:
        self.seen += [r.measured_s for r in rows]
        return self

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        assert all(math.isnan(r.measured_s) and r.measured_memory_nbytes is None for r in rows)
        values = np.array([self.times[r.row_id] for r in rows])
        return StepPredictions(time_s=values, low_s=0.9 * values, high_s=1.2 * values)


def scored(rows: Sequence[StepRow], predicted: Sequence[float]) -> pd.DataFrame:
    model = FixedPredictions({r.row_id: t for r, t in zip(rows, predicted, strict=True)})
    return concat_scored(score_folds(rows, step_folds(rows, 0, 1), model.fit))


def ranked(measured: Sequence[float]) -> list[StepRow]:
    configs = [layout(tp, 1, 8 // tp, 1) for tp in (1, 2, 4, 8)]
    return [row(c, t, f"r{i}") for i, (c, t) in enumerate(zip(configs, measured, strict=True))]


def test_figures_by_hand() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0])
    (whole, group) = step_results(scored(rows, [1.1, 1.8, 3.0, 2.0]), "t")
    assert whole["group"] == "all" and group["group"] == "L16 x8"
    assert whole["n"] == 4 and whole["num_abstained"] == 0
    assert whole["mape_frac"] == pytest.approx((0.1 + 0.1 + 0 + 0.5) / 4)
    assert whole["median_ape_frac"] == pytest.approx(0.1)
    assert whole["bias_frac"] == pytest.approx((0.1 - 0.1 + 0 - 0.5) / 4)
    assert whole["max_ape_frac"] == pytest.approx(0.5)
    # intervals: 0.99-1.32, 1.62-2.16, 2.7-3.6, 1.8-2.4
    assert whole["coverage_90_frac"] == pytest.approx(0.75)
    assert whole["interval_width_frac"] == pytest.approx(0.15)
    # 1.1 < 1.8 < 2.0 < 3.0: one of six pairs is the wrong way round; the best is chosen
    assert whole["kendall_tau"] == pytest.approx(4 / 6)
    assert whole["regret_median_frac"] == 0
    assert {k: v for k, v in group.items() if k != "group"} == {
        k: v for k, v in whole.items() if k != "group"
    }


def test_regret_is_of_what_would_be_chosen() -> None:
    rows = ranked([1.3, 1.0, 2.0, 4.0])
    (whole, _) = step_results(scored(rows, [0.9, 1.0, 2.0, 3.0]), "t")
    assert whole["regret_median_frac"] == pytest.approx(0.3) == whole["regret_p95_frac"]


def test_groups_of_three_are_not_ranked_and_draws_are_ranked_apart() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0])
    (whole, _) = step_results(scored(rows[:3], [1.0, 2.0, 3.0]), "t")
    assert whole["kendall_tau"] is None and whole["regret_median_frac"] is None
    one_out = score_folds(
        rows, step_folds(rows, None), FixedPredictions({r.row_id: 1.0 for r in rows}).fit
    )
    (whole, _) = step_results(concat_scored(one_out), "t")
    assert whole["n"] == 4 and whole["regret_median_frac"] == 0


def test_tau_is_scipys_and_ties_may_be_left_out() -> None:
    measured = np.array([1.0, 1.01, 1.5, 2.0, 2.01])
    predicted = np.array([1.1, 1.0, 1.6, 2.2, 2.1])
    rows = [row(layout(1, 1, 8, 1), t, f"r{i}") for i, t in enumerate(measured)]
    (whole, _) = step_results(scored(rows, predicted), "t")
    assert whole["kendall_tau"] == pytest.approx(kendalltau(measured, predicted)[0], abs=1e-6)
    assert whole["kendall_tau_without_ties"] == 1
    assert tau_without_ties(measured, -predicted) == -1
    assert math.isnan(tau_without_ties(np.ones(3), predicted[:3]))


def test_memory_is_offset_by_the_calibration_rows() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0])
    peaks = [memory(r.config).allocated_nbytes + 2e9 for r in rows]
    rows = [replace(r, measured_memory_nbytes=p) for r, p in zip(rows, peaks, strict=True)]
    model = FixedPredictions({r.row_id: 1.0 for r in rows})
    cold = step_results(concat_scored(score_folds(rows, step_folds(rows, 0, 1), model.fit)), "t")[0]
    warm = step_results(concat_scored(score_folds(rows, step_folds(rows, 1, 1), model.fit)), "t")[0]
    assert cold["memory_mape_frac"] == pytest.approx(np.mean([2e9 / p for p in peaks]), rel=1e-3)
    assert warm["memory_mape_frac"] == pytest.approx(0, abs=1e-9)
    assert step_results(scored(ranked([1.0] * 4), [1.0] * 4), "t")[0]["memory_mape_frac"] is None


def test_abstaining_is_counted_not_scored() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0])
    frame = scored(rows, [1.1, math.nan, 3.3, 4.4])
    (whole, _) = step_results(frame, "t")
    assert (whole["n"], whole["num_abstained"]) == (4, 1)
    assert whole["mape_frac"] == pytest.approx(0.1) and whole["kendall_tau"] is None


def test_no_rows_have_no_worst() -> None:
    assert worst_rows(pd.DataFrame()) == []


def test_worst_rows_are_named_with_sign_and_layout() -> None:
    rows = ranked([1.0, 2.0, 3.0, 4.0])
    results = worst_rows(scored(rows, [1.1, 1.0, 3.0, 6.0]))[:2]
    assert [(r["row_id"], r["error_frac"]) for r in results] == [("r1", -0.5), ("r3", 0.5)]
    assert layout_text(row(layout(2, 4, 1, 4), 1.0)) == "tp2 pp4 mb4x16"


def test_machines_draws_and_synthetic_rows_are_told() -> None:
    rows = grid(lambda c: float(c.parallelism.num_ranks))
    rows = [replace(r, machine="ab"[i % 2], kind=StepKind.SYNTHETIC) for i, r in enumerate(rows)]
    model = FixedPredictions({r.row_id: 10.0 for r in rows})
    results = step_results(
        concat_scored(score_folds(rows, step_folds(rows, 10, 3), model.fit)), "t"
    )
    assert [r["group"] for r in results[:3]] == ["all", "a", "b"]
    assert all(r["is_synthetic"] for r in results)
    assert results[0]["n"] == sum(r["n"] for r in results[1:3]) == 3 * (len(rows) - 20)
    assert results[0]["p90_draw_mape_frac"] >= 0
