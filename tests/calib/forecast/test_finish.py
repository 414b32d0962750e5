"""Time left with failures, against a run that is played a hundred thousand times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.calib.forecast._remaining_time import Failures, RemainingTime, learned_mtbf_s


@pytest.mark.parametrize("mtbf_s", [500.0, 5_000.0, 500_000.0])
def test_quantiles_are_those_of_played_runs(mtbf_s: float):
    failures = Failures(mtbf_s=mtbf_s, restart_s=60.0, save_every_s=120.0)
    remaining = RemainingTime.with_failures(10_000.0, 150.0, failures)
    rng = np.random.default_rng(5)
    work = rng.normal(10_000.0, 150.0, 100_000)
    counts = rng.poisson(10_000.0 / mtbf_s, work.size)
    lost = np.asarray([rng.uniform(0, 120.0, n).sum() for n in counts])
    played = work + 60.0 * counts + lost
    for level in (0.05, 0.5, 0.9, 0.95):
        assert remaining.quantile(level) == pytest.approx(np.quantile(played, level), rel=0.002)
    assert remaining.mean_s == pytest.approx(played.mean(), rel=0.001)
    assert remaining.chance_beyond(10_200.0) == pytest.approx((played > 10_200.0).mean(), abs=0.01)


def test_without_noise_the_time_is_certain():
    remaining = RemainingTime.normal(50.0, 0.0)
    assert remaining.quantile(0.01) == remaining.quantile(0.99) == 50.0
    assert (remaining.chance_beyond(49.9), remaining.chance_beyond(50.1)) == (1.0, 0.0)


def test_nodes_integrate_the_mean():
    failures = Failures(mtbf_s=3_000.0, restart_s=600.0)
    remaining = RemainingTime.with_failures(6_000.0, 100.0, failures)
    assert np.mean(remaining.nodes(400)) == pytest.approx(remaining.mean_s, rel=0.01)


def test_failures_that_were_seen_outweigh_the_prior():
    value = learned_mtbf_s(2_000, 2_000 * 1_000.0, prior_mtbf_s=1e6)
    assert value == pytest.approx(1_500.0, rel=0.01)
    assert learned_mtbf_s(0, 1e5, prior_mtbf_s=1e4) > 1e4


def test_an_unknown_distribution_says_nothing() -> None:
    unknown = RemainingTime()
    said = (unknown.mean_s, unknown.chance_beyond(1.0), unknown.quantile(0.5))
    assert all(map(math.isnan, said))
