"""Forecasts between windows, on the recorded run; energy from counters that a stand-in holds."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from companion_settings import companion_settings
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.answers.analysis import analyse, with_new_forecast
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_end import RunEnd
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.companion._forecasting import (
    RENEW_AFTER_S,
    RENEW_AFTER_STEPS,
    AnswerCost,
    ForecastSchedule,
    ObservedRun,
    open_meter,
)
from forerun.launch.sinks.sink import Sink
from forerun.launch.store.run_log import LoggedStep, RunLog

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
BEGIN_S = 1795187030.0


def row(iteration: int, time_s: float = 0.2, *flags: str) -> LoggedStep:
    return LoggedStep(
        iteration=iteration,
        time_s=time_s,
        is_after_window=True,
        is_hooked=False,
        flags=flags,
    )


@pytest.fixture(scope="module")
def answer() -> Answer:
    answer = analyse(build_table(read_run(GOLDEN)), Request(now_unix_s=BEGIN_S, last_step=11))
    cadence = replace(answer.known.config.cadence, train_iters=1000)
    config = replace(answer.known.config, cadence=cadence)
    view = replace(answer.known.model_forecast, config=config)
    modelled = replace(answer.known, config=config, model_forecast=view)
    return replace(answer, end=RunEnd(steps_total=1000), modelled=modelled)


def test_what_is_irregular_is_kept_apart() -> None:
    run = ObservedRun()
    for iteration in range(1, 41):
        run.add(row(iteration), BEGIN_S + iteration)
    run.add(row(41, 0.9, "collected"), BEGIN_S + 41)
    run.add(row(42, 5.0, "warmup", "collected"), BEGIN_S + 42)
    run.add_bracket({"name": "eval", "time_s": 3.0})
    request = run.request(Request(now_unix_s=0.0), BEGIN_S + 99)
    assert request.step_numbers == tuple(range(1, 41))
    assert request.irregular_times_s == (0.9,) and request.num_regular == 40
    assert request.eval_times_s == (3.0,)
    # Events may have waited: the forecast starts where the last step ended.
    assert (request.now_unix_s, request.last_step) == (BEGIN_S + 42, 42)


@given(
    num_waiting=st.integers(0, 40),
    times_s=st.lists(st.floats(0.05, 0.4), min_size=1, max_size=12),
    every=st.integers(0, 90),
)
def test_what_answers_cost_is_measured_and_counted_in_the_forecast(
    answer: Answer, num_waiting: int, times_s: list[float], every: int
) -> None:
    """Steps of 0.2 s, slower beside answers: each further answer costs as much as those so far."""
    run, now = ObservedRun(), BEGIN_S
    for iteration in range(1, 41):
        run.add(row(iteration), now := now + 0.2)
    for number, time_s in enumerate(times_s):
        run.answers.append(AnswerCost())
        for iteration in (41 + 2 * number, 42 + 2 * number):
            slow = replace(row(iteration, time_s), is_disturbed=True)
            run.add(slow, now := now + time_s)
    request = run.request(Request(now_unix_s=0.0, answers_every=every), now)
    added_s = [max(0.0, 2 * (time_s - 0.2)) for time_s in times_s]
    assert request.answer_times_s == pytest.approx(added_s, abs=1e-12)
    alone = with_new_forecast(answer, replace(request, answer_times_s=())).forecast
    ahead = with_new_forecast(answer, request).forecast
    num_answers = (1000 - request.last_step) // every if every else 0
    expected_s = num_answers * sum(added_s) / len(added_s)
    assert ahead.remaining_s - alone.remaining_s == pytest.approx(expected_s, abs=1e-6)
    waiting = [
        replace(row(request.last_step + n, 0.3), unix_s=now + 0.3 * n)
        for n in range(1, num_waiting + 1)
    ]
    later = run.with_waiting(request, waiting)
    assert later.last_step == request.last_step + num_waiting
    assert later.now_unix_s == pytest.approx(now + 0.3 * num_waiting)
    assert sum(later.answer_times_s) - sum(added_s) <= 0.1 * num_waiting + 1e-9
    assert run.request(Request(now_unix_s=0.0), now).answer_times_s == request.answer_times_s


def test_the_log_says_what_an_answer_cost_where_that_shows() -> None:
    cost = AnswerCost()
    for _ in range(10):
        cost.add(0.3, 0.2)
    assert "10 steps took 50.0 % longer (1.000 s in all)" in cost.line
    assert AnswerCost(num_steps=2, time_s=9.0, regular_s=1.0).line == ""
    assert AnswerCost(num_steps=50, time_s=10.2, regular_s=10.0).line == ""


def test_a_new_forecast_waits_for_steps_and_seconds(answer: Answer) -> None:
    run, made = ObservedRun(), ForecastSchedule()
    made.answered(replace(answer.forecast, total_s=1000.0), 11)
    first_request = Request(now_unix_s=0.0)
    for iteration in range(12, 12 + RENEW_AFTER_STEPS):
        assert made.due(answer.end, run, first_request, BEGIN_S + RENEW_AFTER_S) is None
        run.add(row(iteration), BEGIN_S + iteration)
    assert made.due(answer.end, run, first_request, BEGIN_S + 0.5 * RENEW_AFTER_S) is None
    request = made.due(answer.end, run, first_request, BEGIN_S + RENEW_AFTER_S)
    assert request is not None
    assert with_new_forecast(answer, request).forecast.remaining_s == pytest.approx(
        0.2 * (1000 - run.last_iteration), rel=1e-6
    )
    assert made.due(answer.end, run, first_request, BEGIN_S + 1e6) is None


def test_a_run_of_a_minute_has_its_next_forecast_after_six_seconds(answer: Answer) -> None:
    run, made = ObservedRun(), ForecastSchedule()
    made.answered(replace(answer.forecast, total_s=60.0), 11)
    first_request = Request(now_unix_s=0.0)
    for iteration in range(12, 12 + RENEW_AFTER_STEPS):
        assert made.due(answer.end, run, first_request, BEGIN_S + 6.0) is None
        run.add(row(iteration), BEGIN_S + 0.1 * iteration)
    assert made.due(answer.end, run, first_request, BEGIN_S + 5.9) is None
    assert made.due(answer.end, run, first_request, BEGIN_S + 6.1) is not None


def test_it_is_news_where_the_end_leaves_the_interval(answer: Answer) -> None:
    forecast = answer.forecast
    made = ForecastSchedule()
    made.answered(answer.forecast, 11)
    inside = replace(
        forecast, finish_p50_unix_s=0.5 * (forecast.now_unix_s + forecast.finish_p95_unix_s)
    )
    assert not made.is_news(replace(forecast, now_unix_s=forecast.now_unix_s + 1))
    late = replace(inside, finish_p50_unix_s=forecast.finish_p95_unix_s + 1)
    assert made.is_news(late)
    assert not made.is_news(replace(forecast, finish_p50_unix_s=forecast.finish_p95_unix_s))


def test_the_companion_writes_it_and_says_only_news(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    counters = iter(range(10**6))
    loop = CompanionLoop(
        companion_settings(tmp_path, num_ranks=2),
        open_sink=lambda _: Sink(),
        read_energy=lambda: 100.0 * next(counters),
    )

    def step(number: int, time_s: float) -> dict[str, Any]:
        return {
            "event": "step", "step": number, "time_s": time_s, "window": None,
            "is_after_window": number >= 11, "is_hooked": False, "flags": [],
            "unix_s": BEGIN_S + number * time_s,
        }  # fmt: skip

    for number in range(11):
        loop.handle(step(number, 0.13), BEGIN_S)
    loop.handle({"event": "window_closed", "window": 0, "last_step": 10}, BEGIN_S)
    loop.poll(BEGIN_S + 2)
    assert capsys.readouterr().out.count("] ends ") == 1
    first = json.loads((tmp_path / "latest" / "forecast.json").read_text(encoding="utf-8"))
    # The recorded run has 20 steps; slow ones then bring it far beyond its interval.
    for number in range(11, 19):
        loop.handle(step(number, 60.0), BEGIN_S + 500)
    loop.poll(BEGIN_S + 5000)
    assert "] ends " not in capsys.readouterr().out  # 8 new steps are not yet 20
    assert json.loads((tmp_path / "latest" / "forecast.json").read_text(encoding="utf-8")) == first
    assert first["energy_j"] is None or first["energy_j"] >= 0


def nvml(num_devices: int) -> Any:
    counts = [1000 * (index + 1) for index in range(num_devices)]
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: num_devices,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=lambda index: counts[index],
    )


@pytest.mark.parametrize(
    ("visible", "num_local", "expected_j"),
    [("", 2, 3.0), ("1", 1, 2.0), ("", 1, None), ("0,1", 2, 3.0), ("MIG-0", 1, None)],
)
def test_only_devices_of_this_job_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str, num_local: int, expected_j: float | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2))
    assert open_meter(num_local, {"CUDA_VISIBLE_DEVICES": visible})() == expected_j


def test_without_a_driver_there_is_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_meter(1, {})() is None


HOUR_S = 3600.0


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_jumps_holds_up_no_forecast(answer: Answer, jump_s: float) -> None:
    """The end is told by the new clock at once, from the same steps that are left."""
    run, made = ObservedRun(), ForecastSchedule()
    made.answered(answer.forecast, 11)
    for iteration in range(12, 12 + RENEW_AFTER_STEPS):
        run.add(row(iteration), BEGIN_S + jump_s + iteration)
    now_s = BEGIN_S + jump_s + RENEW_AFTER_S
    request = made.due(answer.end, run, Request(now_unix_s=0.0), now_s)
    assert request is not None
    forecast = with_new_forecast(answer, request).forecast
    assert forecast.remaining_s > 0.0
    remaining_s = 0.2 * (1000 - run.last_iteration)
    assert forecast.finish_p50_unix_s - now_s == pytest.approx(remaining_s, rel=0.2)


@pytest.mark.slow
def test_a_window_is_answered_though_the_clock_was_set_back(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    options = companion_settings(tmp_path, num_ranks=2)
    loop = CompanionLoop(options, open_sink=lambda _: Sink(), read_energy=lambda: None)
    loop.poll(BEGIN_S)
    now_s = BEGIN_S - HOUR_S
    loop.handle({"event": "window_closed", "window": 0, "last_step": 10}, now_s)
    loop.poll(now_s)
    assert (tmp_path / "latest" / "forecast.json").is_file()


def test_the_end_of_a_run_is_that_of_its_last_step_where_the_clock_was_set_back() -> None:
    run_log = RunLog(lambda step, values: None)
    for iteration, unix_s in ((1, BEGIN_S), (2, BEGIN_S + 1), (3, BEGIN_S - HOUR_S)):
        run_log.add(replace(row(iteration), unix_s=unix_s))
    run_log.flush(None, dict, is_final=True)
    ended = run_log.ended("r", BEGIN_S - HOUR_S + 1, 3)
    assert ended.last_step_unix_s == BEGIN_S - HOUR_S
    assert ended.end_unix_s == BEGIN_S - HOUR_S + 1
