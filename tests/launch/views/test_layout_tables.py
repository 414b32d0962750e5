"""Layouts as a table: what stays on a narrow screen, and what the rest of the run would take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.forecast.rates import RemainingRun
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.store.forecast_log import read_remaining_run
from forerun.launch.views.answer_tables import (
    layouts_table,
    rest_json,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
PRICE = 2.0


@pytest.fixture(scope="module")
def answer() -> Answer:
    request = json.loads((GOLDEN / "request.json").read_text())
    return analyse(build_table(read_run(GOLDEN)), Request.from_json(request))


def remaining_run_of(answer: Answer) -> RemainingRun:
    running = answer.known.plan.running
    return RemainingRun(
        config=running.config,
        step_time_s=running.step_time_s,
        remaining_s=3600.0,
        now_unix_s=1_700_000_000.0,
        price_per_gpu_hour=PRICE,
    )


def test_each_row_says_what_the_rest_of_the_run_would_take(answer: Answer) -> None:
    remaining_run, rows = (
        remaining_run_of(answer),
        (answer.known.plan.running, *answer.known.plan.candidates),
    )
    table = layouts_table(answer.known.plan, remaining_run=remaining_run)
    for name in ("GPU-hours left", "finish (UTC)", "cost"):
        assert name in table.columns
        assert name not in layouts_table(answer.known.plan).columns
    running = dict(zip(table.columns, table.rows[0], strict=True))
    assert running["GPU-hours left"] == "2"
    assert running["finish (UTC)"] == "2023-11-14 23:13"
    assert running["cost"] == "4.00"
    for row in rows:
        row_json = rest_json(row, remaining_run)
        assert row_json is not None
        assert row_json["remaining_s"] == pytest.approx(3600 * (1 + row.time_frac))
        assert row_json["cost"] == pytest.approx(PRICE * row_json["gpu_hours"])
        assert rest_json(row, None) is None


def test_a_directory_says_what_is_left_of_its_run(answer: Answer, tmp_path: Path) -> None:
    def read_remaining(run_id: str = "one", **more: float) -> RemainingRun | None:
        return read_remaining_run(tmp_path, run_id, answer.known.config, 0.5, **more)

    assert read_remaining() is None
    forecast = {"run_id": "one", "remaining_s": 100.0, "now_unix_s": 5.0}
    (tmp_path / "forecast.json").write_text(json.dumps(forecast))
    result = read_remaining()
    assert result is not None
    assert (result.remaining_s, result.step_time_s, result.price_per_gpu_hour) == (100.0, 0.5, None)
    request = {"run_id": "one", "price_per_gpu_hour": 2.5, "restart_cost_s": 30.0}
    (tmp_path / "request.json").write_text(json.dumps(request))
    result, given = read_remaining(), read_remaining(price_per_gpu_hour=4.0)
    assert result is not None
    assert given is not None
    assert (result.price_per_gpu_hour, result.restart_s) == (2.5, 30.0)
    assert given.price_per_gpu_hour == 4.0
    assert read_remaining("another") is None
    (tmp_path / "forecast.json").write_text(json.dumps({**forecast, "remaining_s": 0.0}))
    assert read_remaining() is None
