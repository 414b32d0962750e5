"""Intervals cover what they claim to cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, t

from forerun.calib.fit.calibration import calibrate
from forerun.calib.regressors import robust as intervals
from forerun.calib.regressors.robust import shrunk_sigma_log
from forerun.calib.steps.model import ERROR_INFLATION
from forerun.calib.workload.operators import OperatorKind

NUM_SEEDS = 30
Z_90 = 1.645
CPU_SIGMA_LOG = 0.2
KINDS = (OperatorKind.LINEAR_FC1, OperatorKind.NORM, OperatorKind.ACTIVATION)


def test_quantiles_that_are_written_out_are_scipys() -> None:
    normal = norm.ppf(0.95)
    assert normal == pytest.approx(intervals.Z_90, rel=1e-12)
    assert pytest.approx(t.ppf(0.95, 7), rel=1e-9) == intervals.STUDENT_90
    assert pytest.approx(t.ppf(0.95, 10) / normal, rel=1e-9) == ERROR_INFLATION


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_ninety_percent_intervals_cover_planted_shapes(make_table, planted, noise: float) -> None:
    """Each shape is off by its own factor; widths 256 and 768 train, 512 is held out."""
    hits = []
    for seed in range(NUM_SEEDS):
        known = {
            o: t for o, t in planted(256, 768, seed=seed, noise=noise).items() if o.kind in KINDS
        }
        held_out = {
            o: t for o, t in planted(512, seed=seed + 1000, noise=noise).items() if o.kind in KINDS
        }
        estimates = calibrate(make_table(known), device="cpu").operators(list(held_out))
        error = np.abs(np.log(estimates.time_s / np.array(list(held_out.values()))))
        hits.append((error <= Z_90 * estimates.sigma_log).mean())
    # Operators of one seed share its ceilings: count seeds as the independent draws.
    bound = 3 * math.sqrt(0.9 * 0.1 / NUM_SEEDS)
    assert np.mean(hits) >= 0.9 - bound
    if noise >= CPU_SIGMA_LOG:
        assert np.mean(hits) < 1.0


def test_many_residuals_outweigh_the_prior_and_few_do_not() -> None:
    rng = np.random.default_rng(0)
    many = shrunk_sigma_log(0.02 * rng.normal(size=800), prior_sigma_log=0.08)
    # 1.15 is Student's t with 7 degrees over the normal at 95 %.
    assert many == pytest.approx(1.15 * 0.02, rel=0.15)
    few = shrunk_sigma_log(0.02 * rng.normal(size=2), prior_sigma_log=0.08)
    assert 0.8 * 1.15 * 0.08 < few < 1.15 * 0.08
