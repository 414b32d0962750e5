"""Gains are told only where the model's interval holds the measured step of the running layout."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.advice.planning import compare
from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.measured_steps import run_steps
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import Measurements, overhead
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.model import MISFIT
from forerun.calib.workload.config_json import encode

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
TABLE = build_table(read_run(GOLDEN))
RUNNING = Measurements(table=TABLE).config
LARGER = replace(RUNNING, batch=replace(RUNNING.batch, micro_batch_size=8))
FACTORS = (0.4, 1.0, 2.5)
FEW = settings(max_examples=3, deadline=None)


def stretched(factor: float) -> SampleTable:
    """The run with each step so many times as long, its operators as they were."""
    steps = TABLE.steps
    return replace(TABLE, steps=steps.assign(time_s=steps["time_s"] * factor))


@cache
def answered(factor: float) -> Answer:
    return analyse(stretched(factor), Request(now_unix_s=1e9, last_step=11))


@pytest.mark.parametrize("factor", FACTORS)
def test_gains_are_in_doubt_where_the_model_misses_the_step_by_far(factor: float) -> None:
    answer = answered(factor)
    assert bool(answer.known.plan.doubt) == (factor != 1)
    # A verb that refits the same records agrees.
    refitted_log = run_steps(Measurements(table=stretched(factor))).misfit_log
    assert refitted_log == pytest.approx(answer.known.plan.misfit_log, abs=1e-6)


@pytest.mark.parametrize("factor", [factor for factor in FACTORS if factor != 1])
def test_a_step_that_the_model_misses_ranks_nothing(factor: float) -> None:
    answer = answered(factor)
    assert answer.known.plan.doubt
    faster = [one for one in answer.known.plan.candidates if one.time_frac < 0]
    assert faster and all(one.is_unsure for one in faster)
    assert not answer.is_stop
    assert answer.known.lint is None or answer.known.lint.best is None


def test_a_step_that_the_model_holds_is_ranked() -> None:
    answer = answered(1.0)
    assert not answer.known.plan.doubt
    assert any(not one.is_unsure for one in answer.known.plan.candidates)


@pytest.mark.slow
@given(factor=st.floats(2.0, 6.0), gain_frac=st.floats(0.3, 0.6))
@FEW
def test_a_layout_that_was_recorded_too_has_its_gain(factor: float, gain_frac: float) -> None:
    """Both steps were measured: what the model lacks of one says nothing of their ratio."""
    measured = Measurements(table=stretched(factor))
    running_s = run_steps(measured).measured_s(RUNNING)
    assert running_s is not None
    other = KnownStep(config=LARGER, time_s=running_s * (1 - gain_frac), sigma_log=0.01)
    (row,) = compare(RUNNING, [LARGER], run_steps(measured, [other]))
    assert not row.is_unsure
    assert row.ratio.low <= 1 - gain_frac <= row.ratio.high


@given(cost_frac=st.floats(-0.2, 0.2), noise_s=st.floats(0.001, 0.3))
@settings(max_examples=60, deadline=None)
def test_what_hooks_cost_is_a_value_or_a_bound(cost_frac: float, noise_s: float) -> None:
    """Alternate sixteen hooked and bare steps; a share is sent only if its interval is above 0."""
    times = [
        1 + cost_frac * (step % 2) + noise_s * math.sin(7.3 * step * step) for step in range(16)
    ]
    result = overhead(times, [bool(step % 2) for step in range(16)])
    (name, value), *more = result.values.items()
    assert not more and value > 0
    assert (name == "overhead_frac") == (result.low_frac > 0)


def test_the_running_layout_is_known_at_any_batch_and_however_its_node_is_stated() -> None:
    steps = run_steps(Measurements(table=stretched(2.5)))
    alike = [
        replace(RUNNING, batch=replace(RUNNING.batch, global_batch_size=32)),
        *(
            replace(RUNNING, parallelism=replace(RUNNING.parallelism, ranks_per_node=number))
            for number in (0, 2, 8)
        ),
    ]
    staged = replace(RUNNING.parallelism, dp=1, pp=2)
    others = [LARGER, replace(RUNNING, parallelism=staged)]
    assert steps.misfit_log
    assert not any(MISFIT in one.error_log for one in steps.estimates(alike))
    assert all(MISFIT in one.error_log for one in steps.estimates(others))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear_attention_freq", "deterministic_mode"])
def test_an_option_that_is_not_modelled_widens_what_was_not_measured(name: str) -> None:
    """The measured steps hold it; of other layouts it may change a factor of two, but for what is
    known to stand beside the step."""
    with_option = replace(RUNNING, unmodelled=(name,))
    config = json.dumps(encode(with_option))
    table = replace(TABLE, runs=TABLE.runs.assign(config=config))
    bare, steps = (run_steps(Measurements(table=one)) for one in (TABLE, table))
    other = replace(LARGER, unmodelled=(name,))
    (widened,), (before,) = steps.estimates([with_option]), bare.estimates([RUNNING])
    assert widened.high_s / widened.low_s == pytest.approx(before.high_s / before.low_s, rel=0.05)
    (row,) = compare(with_option, [other], steps)
    (usual,) = compare(RUNNING, [LARGER], bare)
    widths = [math.log(one.ratio.high / one.ratio.low) for one in (row, usual)]
    if name == "linear_attention_freq":
        assert widths[0] == pytest.approx(math.hypot(widths[1], 2 * math.log(2)), rel=0.1)
        assert row.is_unsure
    else:
        assert widths[0] == pytest.approx(widths[1], rel=0.05)
