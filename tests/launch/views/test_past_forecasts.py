"""Forecasts that are kept, the end of a run, and both held against each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings
from json_schema import check

from forerun.calib.records.files import read_lines
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.cli import ExitCode, main
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks.sink import Sink
from forerun.launch.store.place import FORECASTS
from forerun.launch.verbs.arguments import file_schema

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
WINDOW_END, NUM_STEPS, STEP_S = 11, 20, 0.15


def run_to(directory: Path, last: int) -> None:
    """The recorded run, told again up to step ``last`` of 20; 1 s later it is over."""
    shutil.copytree(GOLDEN / "records", directory / "records")
    start = float(build_table(read_run(directory)).runs["started_unix_s"].min())
    options = companion_settings(directory)
    loop = CompanionLoop(options, open_sink=lambda _: Sink("nowhere"))
    for step in range(last):
        at = start + STEP_S * (step + 1)
        is_inside = 3 <= step < WINDOW_END
        loop.handle(
            {
                "event": "step", "step": step, "time_s": STEP_S, "gap_s": 0.0, "is_hooked": False,
                "window": 0 if is_inside else None, "is_after_window": step >= WINDOW_END,
                "flags": ["warmup"] if step < 3 else [], "unix_s": at,
            },
            at,
        )  # fmt: skip
        if step == WINDOW_END - 1:
            closed = {"event": "window_closed", "window": 0, "last_step": step}
            loop.handle(closed, at)
            loop.poll(at)
    end = start + STEP_S * last + 1.0
    loop.handle({"event": "end", "step": last - 1, "unix_s": end}, end)
    loop.finish(end + 5.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    run_to(directory, NUM_STEPS)
    return directory


def test_forecasts_and_the_end_are_kept(whole: Path) -> None:
    values, problems = read_lines(whole / FORECASTS)
    kinds = [value["kind"] for value in values]
    assert not problems and kinds[-1] == "end" and kinds.count("end") == 1
    first, end = values[0], values[-1]
    assert (first["iteration"], first["steps_left"]) == (WINDOW_END, NUM_STEPS - WINDOW_END)
    assert first["run_id"] == "golden-run"
    assert end["end_unix_s"] - end["last_step_unix_s"] == pytest.approx(1.0)
    assert (end["iteration"], end["num_steps"]) == (NUM_STEPS, NUM_STEPS - WINDOW_END)


def track_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", str(directory), "--json"]) == ExitCode.ANSWER
    value = json.loads(capsys.readouterr().out)
    check(value["track"], {**file_schema("answer"), "$ref": "#/$defs/track"})
    return value["track"]


def test_the_error_is_that_of_the_first_forecast(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_, end = read_lines(whole / FORECASTS)[0]
    track = track_of(whole, capsys)
    start = first["unix_s"] - first["elapsed_s"]
    expected = (first["finish_p50_unix_s"] - end["end_unix_s"]) / (end["end_unix_s"] - start)
    assert track["first_error_of_total_frac"] == pytest.approx(expected)
    score = json.loads((whole / "latest" / "score.json").read_text(encoding="utf-8"))
    assert (score["schema"], score["track"]) == (2, track)
    assert score["num_scored_steps"] == NUM_STEPS - WINDOW_END


def test_damaged_lines_are_named_and_the_rest_is_used(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "run"
    shutil.copytree(whole, home)
    lines = (whole / FORECASTS).read_text(encoding="utf-8").splitlines()
    text = "\n".join([lines[0], lines[0][:40], '{"schema": 1, "kind": "?"}', lines[-1]])
    (home / FORECASTS).write_text(text, encoding="utf-8")
    assert track_of(home, capsys)["num_forecasts"] == 1
    assert main(["report", str(home)]) == ExitCode.ANSWER
    out = capsys.readouterr().out
    assert "line 2: damaged" in out and "kind '?'" in out
