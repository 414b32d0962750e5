"""Steps and forecasts of a run as tables: of a whole directory, and of a loop nobody knows."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import forerun
from forerun.calib.forecast._remaining_time import RemainingTime
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.records.files import append_line
from forerun.calib.records.iso_times import Action
from forerun.launch.opened._step_frame import COLUMNS
from forerun.launch.store.place import Place
from forerun.launch.store.run_log import STEPS, LoggedStep, RunLog, read_steps, write_steps

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RUN = "golden-run"
BEGIN_S = 1_700_000_000.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    there = tmp_path / "run"
    shutil.copytree(GOLDEN, there)
    return there


def write_step_file(directory: Path, num_steps: int) -> None:
    """A file of so many steps of 2 s."""
    log = RunLog(lambda step, values: None)
    for number in range(1, num_steps + 1):
        log.add(
            LoggedStep(
                iteration=number,
                time_s=2.0,
                window=0 if number <= 20 else -1,
                is_after_window=number > 20,
                is_hooked=number % 2 == 0 and number <= 20,
                flags=("saved",) if number == 7 else (),
                unix_s=BEGIN_S + 2.0 * number,
                is_disturbed=number == 30,
            )
        )
    log.flush(None, dict, is_final=True)
    write_steps(Place(directory=directory, launch_id="one", run_id=RUN), log)


def forecast(iteration: int, step_s: float) -> Forecast:
    return Forecast(
        now_unix_s=BEGIN_S,
        steps_done=iteration,
        steps_left=10,
        elapsed_s=1.0,
        finish_p50_unix_s=BEGIN_S,
        finish_p95_unix_s=BEGIN_S,
        step_time_s=step_s,
        step_low_s=step_s,
        step_high_s=step_s,
        single_low_s=0.5 * step_s,
        single_high_s=2 * step_s,
        num_samples=5,
        is_measured=True,
        remaining_time=RemainingTime.normal(0.0, 1.0),
    )


def test_recorded_steps_stand_beside_the_newest_forecast_before_each(home: Path) -> None:
    run = forerun.load(home)
    bare = run.steps
    assert {name: str(kind) for name, kind in bare.dtypes.items()} == COLUMNS
    assert bare["predicted_s"].isna().all() and bare["time"].isna().all()
    assert bare["iteration"].is_unique and bare["iteration"].is_monotonic_increasing
    clean = bare[bare["is_clean"]]
    recorded = run._loaded.table.newest("steps")
    recorded_s = recorded[recorded["is_clean"]].groupby("step")["time_s"].median()
    assert np.allclose(clean["step_time_s"], recorded_s)
    first, second = bare["iteration"].iloc[4], bare["iteration"].iloc[9]
    for iteration, step_s in ((second, 3.0), (first, 1.0)):
        append_line(
            home / "forecasts.jsonl", {**forecast(int(iteration), step_s).to_line(), "run_id": RUN}
        )
    predicted_s = forerun.load(home).steps.set_index("iteration")["predicted_s"]
    assert predicted_s.loc[:first].isna().all()
    assert (predicted_s.loc[first + 1 : second] == 1.0).all()
    assert (predicted_s.loc[second + 1 :] == 3.0).all() and predicted_s.iloc[-1] == 3.0


def test_steps_of_the_companion_lead_and_records_fill_in(home: Path) -> None:
    last = int(forerun.load(home).steps["iteration"].iloc[-1])
    write_step_file(home, last - 2)
    steps = forerun.load(home).steps
    assert list(steps["iteration"]) == list(range(1, last + 1))
    assert (steps["step_time_s"].iloc[:-2] == 2.0).all() and steps["time"].iloc[-2:].isna().all()
    assert steps["time"].iloc[0] == pd.Timestamp(BEGIN_S + 2.0, unit="s", tz="UTC")
    assert not steps.loc[steps["iteration"] == 7, "is_clean"].item()


@pytest.mark.slow
def test_a_file_of_steps_is_bounded_and_of_one_run(tmp_path: Path) -> None:
    write_step_file(tmp_path, 45_000)
    frame = read_steps(tmp_path, RUN)
    assert frame is not None and 10_000 <= len(frame) <= 20_000
    gaps = np.diff(frame["iteration"])
    assert gaps.min() == gaps.max() and frame["is_disturbed"].sum() <= 1
    assert (tmp_path / "runs" / "one" / STEPS).stat().st_size < 2**20
    assert read_steps(tmp_path, "another") is None
    (tmp_path / "runs" / "one" / STEPS).write_bytes(b"PAR1 torn")
    assert read_steps(tmp_path, RUN) is None


@pytest.fixture
def plain(home: Path) -> Path:
    """The directory of a loop whose layout nobody told."""
    (home / "samples.parquet").unlink()
    for path in (home / "records" / RUN).glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        other_lines = [line for line in lines if json.loads(line).get("type") != "run"]
        assert len(other_lines) < len(lines)
        path.write_text("".join(other_lines), encoding="utf-8")
    return home


@pytest.mark.slow
def test_a_loop_without_a_layout_has_steps_and_says_why_there_is_no_more(plain: Path) -> None:
    run = forerun.load(plain)
    assert len(run.steps) > 5 and run.report().transcript
    assert "has no forecast of its end: the loop does not say how many steps" in run._repr_html_()
    for ask in (run.predict, run.plan, lambda: run.layout, lambda: run.explain("running")):
        with pytest.raises(forerun.ForerunError, match="has no description of its layout; give"):
            ask()
    with pytest.raises(forerun.ForerunError, match="has no forecast"):
        _ = run.forecast
    assert run.decision.action is Action.ABSTAIN
    assert "The measured step" in run.report().html


def test_its_forecast_is_what_it_said_last(plain: Path) -> None:
    last_forecast = forecast(20, 2.0)
    value = {
        **last_forecast.to_json(),
        **{"run_id": RUN, "now_unix_s": BEGIN_S, "steps_done": 20, "remaining_s": 20.0},
        **{"remaining_low_s": 18.0, "remaining_high_s": 22.0, "total_s": 60.0},
        "finish_p50_unix_s": BEGIN_S + 20.0,
        "gpu_hours": None,
    }
    (plain / "forecast.json").write_text(json.dumps(value))
    run_forecast = forerun.load(plain).forecast
    assert (run_forecast.steps_left, run_forecast.remaining_s, run_forecast.gpu_hours) == (
        10,
        20.0,
        None,
    )
    assert run_forecast.finish_p50_unix_s == BEGIN_S + 20.0
    assert " ".join(repr(run_forecast).split()).startswith(
        "ends Tue 14 Nov 2023 22:13 UTC (by 22:13 with 95 %) · 20.000 s left"
    )
    assert math.isclose(run_forecast.step_time_s, 2.0)
    (plain / "forecast.json").write_text(json.dumps({**value, "remaining_s": "soon"}))
    with pytest.raises(forerun.ForerunError, match=r"forecast\.json is not readable"):
        _ = forerun.load(plain).forecast
