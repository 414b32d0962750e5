"""Files and verbs of a run whose layout nobody knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings
from json_schema import check
from undescribed_runs import undescribed

import forerun
from forerun.calib.records.files import read_lines
from forerun.calib.records.record_kinds import DataLength, LoopRecord
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.launch.cli import ExitCode, main
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks.sink import Sink
from forerun.launch.store.place import FORECASTS
from forerun.launch.verbs.arguments import file_schema

WINDOW_END, NUM_STEPS, STEP_S = 11, 60, 0.5


def step_event(step: int, unix_s: float) -> dict[str, Any]:
    return {
        "event": "step", "step": step, "time_s": STEP_S, "gap_s": 0.0, "is_hooked": False,
        "window": 0 if 3 <= step < WINDOW_END else None, "is_after_window": step >= WINDOW_END,
        "flags": ["warmup"] if step < 3 else [], "unix_s": unix_s,
    }  # fmt: skip


def run_companion(directory: Path, loop: LoopRecord, num_steps: int = NUM_STEPS) -> Path:
    """The recorded run told to a companion, step by step, to its end."""
    undescribed(directory, loop)
    start = float(build_table(read_run(directory)).runs["started_unix_s"].min())
    companion_loop = CompanionLoop(
        companion_settings(directory), open_sink=lambda _: Sink("nowhere")
    )
    for step in range(num_steps):
        at = start + STEP_S * (step + 1)
        companion_loop.handle(step_event(step, at), at)
        if step == WINDOW_END - 1:
            companion_loop.handle({"event": "window_closed", "window": 0, "last_step": step}, at)
        companion_loop.poll(at + 40.0 * (step > WINDOW_END))
    end = start + STEP_S * num_steps
    companion_loop.handle({"event": "end", "step": num_steps - 1, "unix_s": end}, end)
    companion_loop.finish(end)
    return directory


@pytest.fixture(scope="module")
def watched_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loop = LoopRecord(num_steps=NUM_STEPS, samples=4, tokens=128)
    return run_companion(tmp_path_factory.mktemp("told"), loop)


@pytest.fixture(scope="module")
def in_a_pass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loop = LoopRecord(data=DataLength.KNOWN, pass_end=40, pass_steps=40)
    return run_companion(tmp_path_factory.mktemp("pass"), loop)


def value(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("home", ["watched_run", "in_a_pass"])
@pytest.mark.parametrize("name", ["forecast", "decision"])
def test_files_are_what_their_schemas_say(
    home: str, name: str, request: pytest.FixtureRequest
) -> None:
    check(value(request.getfixturevalue(home) / "latest" / f"{name}.json"), file_schema(name))


def test_all_files_are_there(watched_run: Path) -> None:
    for name in ("forecast", "decision", "score", "request"):
        assert value(watched_run / "latest" / f"{name}.json")["run_id"] == "golden-run"
    forecast = value(watched_run / "latest" / "forecast.json")
    assert forecast["reason_no_finish"] == "" and forecast["tokens_per_s"] > 0
    page = (watched_run / "latest" / "report.html").read_text(encoding="utf-8")
    assert "golden-run" in page and "Groups of ranks" in page and "The measured step" in page


def test_forecasts_between_windows_and_the_end_are_kept_and_compared(
    watched_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [line["kind"] for line in read_lines(watched_run / FORECASTS)[0]]
    assert kinds.count("forecast") > 1 and kinds[-1] == "end"
    assert main(["report", str(watched_run), "--json"]) == ExitCode.ANSWER
    track = json.loads(capsys.readouterr().out)["track"]
    assert abs(track["first_error_of_total_frac"]) < 0.05


def test_a_pass_is_no_run(in_a_pass: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not (in_a_pass / FORECASTS).exists()
    forecast = value(in_a_pass / "latest" / "forecast.json")
    assert forecast["pass"]["end_step"] in (40, 80)
    assert main(["report", str(in_a_pass), "--json"]) == ExitCode.ANSWER
    assert "track" not in json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_last_step_of_a_pass_does_not_promise_another(tmp_path: Path) -> None:
    # A forecast is due at every twentieth step after the window's: at this one.
    steps = WINDOW_END + 40
    loop = LoopRecord(data=DataLength.KNOWN, pass_end=steps, pass_steps=steps)
    ahead = value(run_companion(tmp_path, loop, steps) / "latest" / "forecast.json")
    assert ahead["pass"]["end_step"] == steps and ahead["steps_done"] < steps


def test_a_run_without_an_end_says_why_it_has_no_forecast(in_a_pass: Path) -> None:
    run = forerun.load(in_a_pass)
    reason = value(in_a_pass / "latest" / "forecast.json")["reason_no_finish"]
    with pytest.raises(forerun.ForerunError) as raised:
        _ = run.forecast
    assert reason and reason in str(raised.value) and reason in str(run.decision)


@pytest.mark.slow
def test_a_window_that_is_told_again_is_no_second_window(tmp_path: Path) -> None:
    undescribed(tmp_path, LoopRecord(num_steps=NUM_STEPS, samples=4))
    start = float(build_table(read_run(tmp_path)).runs["started_unix_s"].min())
    options = companion_settings(tmp_path, deadline_unix_s=start)
    loop = CompanionLoop(options, open_sink=lambda _: Sink("nowhere"))
    for step in range(WINDOW_END):
        loop.handle(step_event(step, start + step), start + step)
    closed = {"window": 0, "last_step": WINDOW_END - 1}
    actions = []
    events = (("window_closed", 0), ("probed", 0), ("probed", 0), ("window_closed", 1))
    for number, (event, window) in enumerate(events, 1):
        at = start + 100.0 * number
        loop.handle({"event": event, **closed, "window": window}, at)
        assert loop.poll(at + 40.0)
        decision = value(tmp_path / "latest" / "decision.json")
        met = {reason["rule"] for reason in decision["reasons"] if reason["is_met"]}
        assert met == {"deadline"}
        actions.append(decision["action"])
    assert actions == ["abstain", "abstain", "abstain", "stop"]
