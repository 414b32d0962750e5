"""What is left of a run, as the files of its directory tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.calib.forecast.rates import RemainingRun
from forerun.calib.samples.store import read_run
from forerun.launch.store.forecast_log import read_forecasts, read_remaining_run

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
LOG = GOLDEN.parent / "megatron_forecasts" / "forecasts.jsonl"


def test_a_directory_says_what_is_left_of_its_run(tmp_path: Path) -> None:
    config = read_run(GOLDEN).configs[0]

    def read_remaining(run_id: str = "one", **more: float) -> RemainingRun | None:
        return read_remaining_run(tmp_path, run_id, config, 0.5, **more)

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


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"schema": 9}, "schema 9, this version reads up to 1; upgrade forerun"),
        ({"kind": "hope"}, "kind 'hope' is not known, skipped"),
        ({"unix_s": "soon"}, "is not of type float"),
        ({"finish_intervals_unix_s": {"0.9": [1.0]}}, "is not a list of values"),
        ({"run_id": None}, "is not of type str"),
    ],
)
def test_a_line_that_is_no_forecast_is_named_and_skipped(
    changed: dict[str, object], problem: str, tmp_path: Path
) -> None:
    good = LOG.read_text().splitlines()[0]
    lines = [good, json.dumps({**json.loads(good), **changed})]
    (tmp_path / "forecasts.jsonl").write_text("\n".join(lines) + "\n")
    logged = read_forecasts(tmp_path)
    ((forecast,),) = logged.made.values()
    assert (forecast.steps_done, forecast.steps_left) == (25, 973)
    (said,) = logged.problems
    assert problem in said
