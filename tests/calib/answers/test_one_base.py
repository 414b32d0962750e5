"""Gains are differences of two layouts in one model: what the run has in common cancels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.advice.explanation import explain
from forerun.calib.advice.planning import Candidate, compare, plan
from forerun.calib.answers.measured_steps import run_steps
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.steps.model import FittedSteps
from forerun.calib.timeline.terms import Term
from forerun.calib.workload.config import Recompute, RunConfig

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
TABLE = build_table(read_run(GOLDEN))
RUNNING = Measurements(table=TABLE).config
PATIENT = settings(max_examples=12, deadline=None)


@cache
def stretched(factors: tuple[float, ...]) -> FittedSteps:
    """The model of the run with each step as many times as long, its operators as they were."""
    steps = TABLE.steps
    by_step = dict(zip(sorted(steps["step"].unique()), factors, strict=False))
    times = steps["time_s"] * steps["step"].map(by_step).fillna(float(factors[-1]))
    return run_steps(Measurements(table=replace(TABLE, steps=steps.assign(time_s=times))))


def layouts() -> list[RunConfig]:
    sizes = (1, 4, 8)
    changed = [
        replace(RUNNING, batch=replace(RUNNING.batch, micro_batch_size=size)) for size in sizes
    ]
    return [
        *changed,
        replace(RUNNING, recompute=Recompute.FULL),
        replace(RUNNING, parallelism=replace(RUNNING.parallelism, tp=2, dp=1)),
        replace(RUNNING, parallelism=replace(RUNNING.parallelism, pp=2, dp=1)),
    ]


def gains(steps: FittedSteps) -> np.ndarray:
    return np.log([1 + one.time_frac for one in compare(RUNNING, layouts(), steps)])


BARE = (1.0,) * 6
NOISES = tuple(
    tuple(np.random.default_rng(seed).uniform(0.6, 1.7, 6).tolist()) for seed in range(10)
)
noises = st.sampled_from(NOISES)
"""Ten draws that all properties share, since each is a fit."""


@pytest.mark.slow
@given(noise=noises)
@PATIENT
def test_noise_of_the_measured_step_is_nobodys_gain(noise: tuple[float, ...]) -> None:
    assert gains(stretched(noise)) == pytest.approx(gains(stretched(BARE)), abs=1e-3)


@pytest.mark.slow
@given(factor=st.sampled_from(np.geomspace(0.5, 2.0, 7).tolist()))
@PATIENT
def test_the_running_row_is_the_measured_step(factor: float) -> None:
    steps = stretched((factor,) * 6)
    (unchanged,) = compare(RUNNING, [RUNNING], steps)
    assert unchanged.step_time_s == pytest.approx(steps.measured_s(RUNNING), rel=1e-3)
    assert unchanged.time_frac == 0 and unchanged.ratio.sigma_log == 0


@pytest.mark.slow
@given(factor=st.sampled_from((2.0, 2.5, 3.0, 4.0)), is_slower=st.booleans())
@PATIENT
def test_nothing_is_ranked_where_the_model_misses_the_running_step(
    factor: float, is_slower: bool
) -> None:
    steps = stretched((factor if is_slower else 1 / factor,) * 6)
    result = plan(RUNNING, steps)
    off = steps.measured_s(RUNNING) / stretched(BARE).measured_s(RUNNING)
    assert result.misfit_log == pytest.approx(np.log(off), abs=0.4)
    assert result.doubt and not any(one.ratio.high < 1 for one in result.candidates)


@pytest.mark.slow
@given(noise=noises, place=st.integers(0, 5))
@PATIENT
def test_work_that_is_added_is_never_faster(noise: np.ndarray, place: int) -> None:
    steps = stretched(noise)
    plain = [RUNNING, *layouts()][place]
    recomputed = replace(plain, recompute=Recompute.FULL)
    if recomputed != plain:
        bare, more = compare(RUNNING, [plain, recomputed], steps)
        assert more.step_time_s > bare.step_time_s


@pytest.mark.slow
@given(noise=noises)
@PATIENT
def test_what_is_not_explained_is_no_reason(noise: np.ndarray) -> None:
    steps = stretched(noise)
    for one in compare(RUNNING, layouts(), steps):
        difference = explain(one.config, RUNNING, steps).difference
        assert difference is not None
        largest = max(difference.terms, key=lambda term: term.time_s * np.sign(difference.time_s))
        assert largest.term is not Term.UNEXPLAINED, one.label


@pytest.mark.slow
@given(noise=noises)
@PATIENT
def test_overlap_hides_at_most_what_is_exposed(noise: np.ndarray) -> None:
    steps = stretched(noise)
    running_step = steps.by_term([RUNNING])[0]
    exposed_frac = running_step.terms_s[Term.DP] / running_step.estimate.time_s
    hidden: Candidate
    (hidden,) = compare(
        RUNNING,
        [replace(RUNNING, parallelism=replace(RUNNING.parallelism, overlaps_grad_reduce=True))],
        steps,
    )
    assert -exposed_frac - 1e-3 <= hidden.time_frac <= 1e-3


def test_a_layout_is_its_measurement_however_its_node_is_stated() -> None:
    """All ranks on one node, said or not: the same work, and so the same row."""
    steps = stretched((1.2,) * 6)
    for per_node in (0, 2, 8):
        stated = replace(RUNNING, parallelism=replace(RUNNING.parallelism, ranks_per_node=per_node))
        (row,) = compare(RUNNING, [stated], steps)
        assert row.time_frac == pytest.approx(0.0, abs=1e-9)
        assert row.step_time_s == pytest.approx(steps.measured_s(RUNNING), rel=1e-3)
