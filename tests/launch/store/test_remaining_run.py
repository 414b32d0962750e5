"""What is left of a run, as the files of its directory tell it."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.calib.forecast.rates import RemainingRun
from forerun.calib.samples.store import read_run
from forerun.launch.store.forecast_log import read_remaining_run

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


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
