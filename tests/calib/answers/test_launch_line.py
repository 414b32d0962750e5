"""Lint of a recorded run's own launch: one line at most, by the model of its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.answers.transcript import PREFIX
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


@pytest.fixture(scope="module")
def table() -> SampleTable:
    return build_table(read_run(GOLDEN))


@pytest.fixture(scope="module")
def answer(table: SampleTable) -> Answer:
    return analyse(table, Request(now_unix_s=1e9, last_step=11))


@pytest.mark.slow
def test_what_hides_no_more_than_is_exposed_is_no_flaw(answer: Answer) -> None:
    """Exposed gradient reduction is 1 % of this run's step: overlap has nothing to hide."""
    assert answer.known.lint is not None
    times = {one.config: one.time_frac for one in answer.known.plan.candidates}
    for flaw in answer.known.lint.flaws:
        if flaw.gain is not None:
            assert flaw.gain.time_frac == pytest.approx(times[flaw.remedy.layout], rel=1e-9)
            assert flaw.gain.time_frac > -0.01


def test_a_sure_one_is_one_line(table: SampleTable) -> None:
    """Evaluations that were seen to take as long as the steps between them."""
    often = replace(table.config().cadence, eval_interval=2, eval_iters=2)
    running = replace(table.config(), cadence=often)
    request = Request(now_unix_s=1e9, last_step=11, eval_times_s=(1.0,) * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Measurements, "config", running)
        answer = analyse(table, request)
    assert answer.known.lint is not None
    (line,) = [line for line in answer.transcript if line.startswith(f"{PREFIX} launch: ")]
    assert "--eval-interval 2 with --eval-iters 2 · about " in line
    assert line == f"{PREFIX} {answer.known.lint.line()}"
