"""The baselines recover what was planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from step_fixtures import grid, layout, row, timed

from forerun.benchmarks.baselines.step_terms import NUM_TERMS, step_flop, step_terms
from forerun.benchmarks.baselines.steps import (
    BASELINES,
    ConstantRate,
    PerfectScaling,
    TenTerms,
)
from forerun.benchmarks.protocols.scores import score_folds, step_folds
from forerun.calib.fit.priors import device_prior
from forerun.calib.workload.config import Attention, Parallelism, Recompute


def test_flop_is_narayanans() -> None:
    # Narayanan et al. 2021, section 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) with full recompute;
    # it counts the whole attention square, of which causal attention needs half.
    config = layout(1, 1, 8, 1)
    model = config.model
    hidden, seq, depth = model.hidden_size, model.seq_length, model.num_layers
    square = 96 * 64 * seq * depth * hidden**2
    whole = square * (1 + seq / 12 / hidden + model.vocab_size / 16 / depth / hidden)
    assert step_flop(config) == pytest.approx(whole, rel=1e-9)
    bare = replace(config, recompute=Recompute.NONE)
    assert step_flop(bare) < step_flop(config) < 4 / 3 * step_flop(bare)


def test_bubble_of_a_pipeline_and_of_an_interleaved_one() -> None:
    assert layout(1, 8, 1, 4).bubble_frac == pytest.approx(7 / 16)
    virtual = replace(layout(1, 8, 1, 4), parallelism=Parallelism(pp=8, vp=2))
    assert virtual.bubble_frac == pytest.approx(7 / 32)


def test_a_planted_rate_is_found() -> None:
    peak = device_prior("A100").peaks_for(2).flop_per_s

    def time(config: object) -> float:
        return step_flop(config) * (1 + config.bubble_frac) / 0.37 / peak / 8  # type: ignore[arg-type]

    rows = [r for r in grid(time) if r.num_ranks == 8]
    predictions = ConstantRate().fit(rows[:3]).predict(rows[3:])
    np.testing.assert_allclose(predictions.time_s, [r.measured_s for r in rows[3:]], rtol=1e-9)
    assert (predictions.low_s < predictions.time_s).all() and (
        predictions.time_s < predictions.high_s
    ).all()


def test_perfect_scaling_keeps_the_efficiency_of_the_smallest_scale() -> None:
    # On twice the devices half the time, whatever bubble and collectives there are; twice the
    # batch takes twice the time.
    small, other = layout(2, 2, 1, 4), layout(4, 1, 1, 4)
    large = layout(2, 2, 8, 1)
    double = replace(large, batch=replace(large.batch, global_batch_size=128))
    known = [row(small, 3.0), row(other, 5.0), row(layout(2, 2, 4, 1), 99.0)]
    predictions = PerfectScaling().fit(known).predict([row(large, np.nan), row(double, np.nan)])
    middle = np.sqrt(3.0 * 5.0)
    np.testing.assert_allclose(predictions.time_s, [middle / 8, middle / 4], rtol=1e-9)
    assert (predictions.low_s < predictions.time_s).all() and (
        predictions.time_s < predictions.high_s
    ).all()


def test_planted_scales_are_found_from_enough_rows() -> None:
    rng = np.random.default_rng(3)
    scales = rng.normal(0.0, 0.5, NUM_TERMS)
    rows = grid(lambda c: float(np.dot(step_terms(c), np.exp(scales))), depths=(8, 16))
    shuffled = rng.permutation(len(rows))
    train, test = [rows[i] for i in shuffled[:30]], [rows[i] for i in shuffled[30:]]
    predictions = TenTerms().fit(train).predict(test)
    error = np.abs(predictions.time_s / [r.measured_s for r in test] - 1)
    assert error.mean() < 0.03 and error.max() < 0.2


def test_intervals_cover_what_the_terms_leave_out() -> None:
    rng = np.random.default_rng(5)
    plain = grid(lambda c: float(sum(step_terms(c))), depths=(8, 16))
    inside = []
    for _ in range(8):
        rows = timed(plain, [r.measured_s * np.exp(rng.normal(0, 0.1)) for r in plain])
        order = rng.permutation(len(rows))
        predictions = (
            TenTerms().fit([rows[i] for i in order[:12]]).predict([rows[i] for i in order[12:]])
        )
        measured = np.array([rows[i].measured_s for i in order[12:]])
        inside.append((predictions.low_s <= measured) & (measured <= predictions.high_s))
    assert 0.85 <= np.mean(inside) <= 0.98


def test_without_rows_priors_answer_and_intervals_are_wide() -> None:
    rows = grid(lambda _: 1.0)
    for model in (ConstantRate(), TenTerms(), PerfectScaling()):
        cold = model.fit([]).predict(rows)
        warm = model.fit(rows[:10]).predict(rows)
        assert np.isfinite(cold.time_s).all() and (cold.time_s > 0).all()
        if isinstance(model, TenTerms):
            assert np.mean(cold.high_s / cold.low_s) > np.mean(warm.high_s / warm.low_s)


def test_terms_grow_with_what_they_stand_for() -> None:
    names = ("products", "attention", "memory", "launches", "collectives")
    names += ("head", "transfers", "reduction", "optimizer", "constant")

    def terms(config: object) -> dict[str, float]:
        return dict(zip(names, step_terms(config), strict=True))  # type: ignore[arg-type]

    alone, split = terms(layout(1, 1, 8, 1)), terms(layout(2, 1, 4, 1))
    assert alone["collectives"] == alone["transfers"] == 0 < split["collectives"]
    assert terms(layout(1, 2, 4, 1))["transfers"] > 0
    assert terms(layout(1, 1, 1, 1))["reduction"] == 0 < alone["reduction"]
    fused = replace(layout(1, 1, 8, 1), attention=Attention.FUSED)
    bare = replace(fused, attention=Attention.UNFUSED)
    assert terms(fused)["attention"] < terms(bare)["attention"]
    assert terms(layout(1, 1, 8, 4))["launches"] == pytest.approx(alone["launches"] / 4)


@pytest.mark.parametrize("model", BASELINES, ids=lambda m: m.name)
def test_no_baseline_learns_from_a_scored_row(model: object) -> None:
    rows = grid(lambda c: 1.0 + c.parallelism.tp)
    folds = list(step_folds(rows, 6, 2))
    one = score_folds(rows, folds, model.fit)
    for fold, frame in zip(folds, one, strict=True):
        times = [r.measured_s * (7 if i in fold.test else 1) for i, r in enumerate(rows)]
        (other,) = score_folds(timed(rows, times), [fold], model.fit)
        np.testing.assert_array_equal(frame["predicted_s"], other["predicted_s"])
        np.testing.assert_array_equal(frame["high_s"], other["high_s"])
