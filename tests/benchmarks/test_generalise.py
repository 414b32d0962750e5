"""Sources left out: every table is of one, none of its rates is asked, errors are the planted."""

from __future__ import annotations

import pytest
from step_fixtures import grid, timed

from forerun.benchmarks.baselines.steps import ConstantRate
from forerun.benchmarks.fits.build_priors import SOURCES as RATES
from forerun.benchmarks.generalise import SOURCES, Line, table
from forerun.benchmarks.protocols.scores import score_folds, step_folds
from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.scoring.step_acceptance import CLAIMS
from forerun.calib.fit.rate_priors import rates_prior
from forerun.calib.workload.operators import OperatorKind, Phase


def test_each_table_is_of_one_source():
    steps = [name for source in SOURCES for name in source.steps]
    rates = [name for source in SOURCES for name in source.rates]
    assert len({*steps}) == len(steps) and len({*rates}) == len(rates)
    assert {claim.table for claim in CLAIMS} <= {*steps}
    assert {*rates} <= {*RATES}


@pytest.mark.parametrize("source", [one for one in SOURCES if one.rates], ids=lambda one: one.name)
def test_rates_of_a_source_that_is_left_out_are_not_asked(source):
    for device in ("NVIDIA A100", "NVIDIA H100", "NVIDIA B200", "Tesla V100"):
        for kind in (OperatorKind.LINEAR, OperatorKind.FLASH_ATTENTION, OperatorKind.NORM):
            prior = rates_prior(device, kind, Phase.FORWARD, 2, without=source.rates)
            names = prior.sources if prior else ()
            assert not [name for name in names if name.rpartition(" ")[2] in source.rates]


def test_steps_are_priced_without_them():
    """On an A100, whose rates of products are of several sources."""
    (row, *_) = grid()
    whole, cut = TableSteps(), TableSteps(without=tuple(RATES))
    times_s = [model.fit([]).predict([row]).time_s[0] for model in (whole, cut)]
    assert times_s[0] != pytest.approx(times_s[1], rel=1e-3)


def test_errors_are_those_that_were_planted():
    rows = grid()[:6]
    rows = timed(rows, TableSteps().fit([]).predict(rows).time_s)
    folds = list(step_folds(rows, 0, 2))
    frames = {
        model.name: score_folds(rows, folds, model.fit) for model in (TableSteps(), ConstantRate())
    }
    exact = Line(source="planted", num_known=0, frames=frames)
    assert exact.mape_frac(TableSteps.name) == pytest.approx(0.0, abs=1e-9)
    assert exact.coverage_frac == 1.0
    theirs = exact.mape_frac(ConstantRate.name)
    assert theirs and "| 0.0 | 100.0, " in table([exact])
    assert f"| -{100 * theirs:.1f} (" in table([exact])
