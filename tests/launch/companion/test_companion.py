"""The companion on a recorded run: what it logs, in which order, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings, started

from forerun.calib.workload.run_options import OnAdvice
from forerun.launch.cli import main
from forerun.launch.companion._companion_loop import PATIENCE_S, CompanionLoop
from forerun.launch.companion._log_lines import log_line
from forerun.launch.companion._memory_guard import FIT_NBYTES, MemoryGuard
from forerun.launch.sinks.sink import Sink

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
WINDOW_END = 11


class Notes(Sink):
    """A sink that remembers."""

    def __init__(self) -> None:
        super().__init__("notes")
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] | None = None
        self.alerts: list[str] = []

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def tables(self, step: int, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        assert (tables and not self.rows) or step >= self.rows[-1][0]

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.summary = dict(summary)


def event(step: int, time_s: float = 0.15, **more: Any) -> dict[str, Any]:
    is_inside = 3 <= step < WINDOW_END
    return {
        "event": "step", "step": step, "time_s": time_s, "gap_s": 0.0, "is_hooked": False,
        "window": 0 if is_inside else None, "is_after_window": step >= WINDOW_END,
        "flags": ["warmup"] if step < 3 else [], "unix_s": 1000.0 + step, **more,
    }  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    return tmp_path


def companion(directory: Path, notes: Notes, **settings: Any) -> CompanionLoop:
    options = companion_settings(directory, **settings)
    return CompanionLoop(options, open_sink=lambda _: notes)


def test_rows_after_the_window_wait_for_its_prediction(directory: Path) -> None:
    notes = Notes()
    loop = companion(directory, notes)
    for step in range(WINDOW_END + 2):
        loop.handle(event(step), 1000.0)
    assert [step for step, _ in notes.rows] == list(range(1, WINDOW_END + 1))
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    loop.handle(event(WINDOW_END + 2), 1001.0)
    loop.finish(1002.0)
    assert [step for step, _ in notes.rows] == list(range(1, WINDOW_END + 4))
    after = [values for step, values in notes.rows if step > WINDOW_END]
    assert all("step_time_predicted_s" in values for values in after)
    tokens = [values["tokens_per_s"] * values["step_time_s"] for values in after]
    assert tokens == pytest.approx([16 * 128] * 3)  # the golden run's batch and length
    assert notes.summary is not None and notes.summary["num_scored_steps"] == 3


def test_steps_that_came_before_the_answer_are_scored_but_never_learned_from(
    directory: Path,
) -> None:
    notes = Notes()
    loop = companion(directory, notes)
    for step in range(WINDOW_END):
        loop.handle(event(step, time_s=0.15), 1000.0)
    for step in range(WINDOW_END, WINDOW_END + 50):
        loop.handle(event(step, time_s=9.0), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    loop.finish(1002.0)
    predicted = [v["step_time_predicted_s"] for s, v in notes.rows if s > WINDOW_END]
    assert predicted == pytest.approx([0.15] * 50)
    assert notes.summary is not None and notes.summary["num_scored_steps"] == 50
    assert notes.summary["interval_coverage_frac"] == 0.0


@pytest.mark.parametrize(("num_steps", "state"), [(20, "ended"), (14, "stopped")])
def test_what_is_said_after_the_end_is_past_and_no_cut_window_replaces_it(
    directory: Path, capsys: pytest.CaptureFixture[str], num_steps: int, state: str
) -> None:
    loop = companion(directory, notes := Notes())
    for step in range(WINDOW_END):
        loop.handle(event(step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    assert "] ends " in capsys.readouterr().out
    answered = json.loads((directory / "latest" / "answer.json").read_text(encoding="utf-8"))
    for step in range(WINDOW_END, num_steps):
        loop.handle(event(step), 1000.0)
    last = {"event": "window_closed", "window": 1, "last_step": num_steps - 1}
    loop.handle(last, 1000.0)  # as the end of training closes one that a drift has opened
    loop.finish(1000.0 + num_steps)
    out = capsys.readouterr().out
    assert out.count(f"[forerun] {state} ") == 1 and "ends " not in out and "decision:" not in out
    page = (directory / "latest" / "report.html").read_text(encoding="utf-8")
    assert f"<h1>{state.capitalize()} " in page and "<h1>Ends" not in page
    ended = json.loads((directory / "latest" / "answer.json").read_text(encoding="utf-8"))
    assert ended["forecast"] == answered["forecast"]
    decision = json.loads((directory / "latest" / "decision.json").read_text(encoding="utf-8"))
    assert notes.summary is not None and notes.summary["decision"] == decision["action"]
    main(["report", str(directory)])
    report = capsys.readouterr().out
    assert f"[forerun] {state} " in report and "[forerun] ends " not in report
    assert state in main_output(["status", str(directory)], capsys).split("\n")[0]


def test_a_run_whose_first_answer_comes_after_its_end_has_done_all_its_steps(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = companion(directory, Notes())
    for step in range(20):
        loop.handle(event(step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.finish(1020.0)
    out = capsys.readouterr().out
    assert "] ended " in out and "after 20 steps" in out and "] ends " not in out


def main_output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(words)
    return capsys.readouterr().out


def test_a_run_without_records_has_the_end_by_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk, where no window can be read: 980 steps of 0.2 s are left."""
    (tmp_path / "records").mkdir()
    settings = replace(companion_settings(tmp_path, num_steps=1000), started_unix_s=1000.0)
    loop = CompanionLoop(settings, open_sink=lambda _: Notes())
    for step in range(20):
        loop.handle(event(step, time_s=0.2, unix_s=1000.0 + 0.2 * step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": 10}, 1004.0)
    loop.poll(1004.0 + PATIENCE_S)
    assert "] ends 00:20" not in (early := capsys.readouterr().out) and "] ends " not in early
    loop.poll(1006.0 + PATIENCE_S)
    out = capsys.readouterr().out
    assert "no answer for window 0: " in out
    assert "[forerun] ends 00:19:59 UTC (by 00:" in out and "by its steps alone" in out


def test_a_report_on_records_alone_does_not_move_with_the_clock(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in directory.rglob("*"):
        os.utime(path, (1e9, 1e9))
    first = main_output(["report", str(directory)], capsys)
    assert "from records alone, as of step 11" in first
    assert "ends 01:46" in first  # 9 more steps after the last record, 9 September 2001
    for cached in directory.glob("report-*.json"):
        cached.unlink()
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert main_output(["report", str(directory)], capsys) == first


def test_what_is_said_of_a_step_lies_in_its_own_interval(directory: Path) -> None:
    """Also where the steps have left the level of the last forecast."""
    notes = Notes()
    loop = companion(directory, notes)
    for step in range(WINDOW_END):
        loop.handle(event(step, time_s=0.15), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    for step in range(WINDOW_END, 150):
        loop.handle(event(step, time_s=0.25), 1000.0)
    logged_rows = [values for step, values in notes.rows if step > WINDOW_END]
    predicted, low, high = (
        [values[f"step_time_predicted{name}_s"] for values in logged_rows]
        for name in ("", "_low", "_high")
    )
    assert len(logged_rows) == 150 - WINDOW_END
    assert all(a <= b <= c for a, b, c in zip(low, predicted, high, strict=True))
    assert predicted[0] == pytest.approx(0.15) and predicted[-1] == pytest.approx(0.25)


def test_a_missing_rank_is_waited_for_and_then_done_without(directory: Path) -> None:
    (path,) = directory.glob("records/*/rank-00000.jsonl")
    path.unlink()
    notes = Notes()
    loop = companion(directory, notes)
    loop.handle(event(WINDOW_END), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    assert not notes.rows
    loop.poll(1001.0 + PATIENCE_S)
    assert [step for step, _ in notes.rows] == [WINDOW_END + 1]
    problems = json.loads((directory / "latest" / "decision.json").read_text(encoding="utf-8"))[
        "problems"
    ]
    assert any("1 of 2 ranks" in problem for problem in problems)


def test_no_records_is_said_and_every_step_is_still_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    loop = companion(tmp_path, notes)
    for step in range(WINDOW_END + 2):
        loop.handle(event(step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.finish(1001.0)
    assert len(notes.rows) == WINDOW_END + 2
    assert "no answer for window 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_deadline_that_cannot_be_met_alerts_in_the_second_window(directory: Path) -> None:
    notes = Notes()
    loop = companion(directory, notes, deadline_unix_s=900.0, on_advice=OnAdvice.ALERT)
    for step in range(WINDOW_END):
        loop.handle(event(step), 1000.0)
    for window in (0, 1):
        loop.handle({"event": "window_closed", "window": window, "last_step": 8}, 1000.0)
        loop.poll(1001.0 + PATIENCE_S + window)
        assert len(notes.alerts) == window
    value = json.loads((directory / "latest" / "decision.json").read_text(encoding="utf-8"))
    assert value["action"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(("train_iters", "expected_orders"), [(2000, ["window"]), (200, [])])
def test_after_a_drift_the_forecast_rests_on_the_steps_since_then(
    directory: Path,
    train_iters: int,
    expected_orders: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A window is asked for where enough of the run is left for one."""
    notes, orders = Notes(), []
    for path in (directory / "records" / "golden-run").iterdir():
        text = path.read_text(encoding="utf-8")
        text = text.replace('"train_iters": 20', f'"train_iters": {train_iters}')
        path.write_text(text, encoding="utf-8")
    options = companion_settings(directory, on_advice=OnAdvice.ALERT)
    loop = CompanionLoop(options, open_sink=lambda _: notes, give_order=orders.append)
    for step in range(WINDOW_END):
        loop.handle(event(step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    usual_s = json.loads((directory / "latest" / "forecast.json").read_text(encoding="utf-8"))[
        "step_time_s"
    ]
    for step in range(WINDOW_END, 80):
        loop.handle(event(step, time_s=0.15 if step < 50 else 0.3), 1010.0)
    loop.poll(1011.0)
    value = json.loads((directory / "latest" / "forecast.json").read_text(encoding="utf-8"))
    assert usual_s == pytest.approx(0.15, rel=0.05)
    assert value["step_time_s"] == pytest.approx(0.3, rel=0.05)
    (drift_event,) = json.loads((directory / "latest" / "drift.json").read_text(encoding="utf-8"))[
        "events"
    ]
    assert drift_event["since_iteration"] == 51 and drift_event["run_id"] == "golden-run"
    assert [order["order"] for order in orders if "drift" in order["reason"]] == expected_orders
    assert notes.alerts == [drift_event["line"]]
    assert f"[forerun] {drift_event['line']}" in capsys.readouterr().out
    assert notes.rows[-1][1]["level_s"] == pytest.approx(0.3)
    assert notes.rows[-1][1]["drift_frac"] == pytest.approx(1.0)


@pytest.mark.slow
def test_the_end_of_its_input_ends_it(directory: Path) -> None:
    lines = [json.dumps(event(step)) for step in range(WINDOW_END)]
    lines += [json.dumps({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1})]
    # On a busy machine an analysis takes longer than the end of a run waits for.
    links = (
        "from forerun.calib.records.cluster import SeenNode; "
        "from forerun.launch.known import node_links; "
        "node_links.detect_links = lambda: SeenNode(num_gpus=4, joint='mesh')"
    )
    done = started(directory, launch_id="first", leave_after_s=200.0, before=links)
    output, errors = done.communicate("\n".join(["{damaged", *lines, ""]))
    assert done.returncode == 0, errors
    assert "[forerun] stopped " in output and "[forerun] checked: " in output
    assert f"[forerun] report: {directory}/latest/report.html" in output
    assert '"mesh"' in (directory / "records" / "golden-run" / "links.json").read_text("utf-8")
    for folder in (directory / "latest", directory / "runs" / "first"):
        assert (folder / "report.html").exists()
        value = json.loads((folder / "decision.json").read_text(encoding="utf-8"))
        assert (value["run_id"], value["launch_id"]) == ("golden-run", "first")


def test_an_answer_waits_for_memory_and_is_then_given(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free, notes = [0], Notes()
    guard = MemoryGuard(log_line, lambda: free[0])
    loop = CompanionLoop(
        companion_settings(directory),
        open_sink=lambda _: notes,
        has_memory=lambda: guard.allows(FIT_NBYTES),
    )
    for step in range(WINDOW_END + 2):
        loop.handle(event(step), 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    for second in range(40):
        assert not loop.poll(1001.0 + second)
    assert capsys.readouterr().out == (
        "[forerun] no answer yet: 0 MiB are free within this job's memory limit and an answer "
        "takes up to 96; records are kept, and an answer follows once so much is free\n"
    )
    free[0] = FIT_NBYTES
    assert loop.poll(1050.0)
    assert "decision: " in capsys.readouterr().out
    loop.finish(1051.0)


def test_without_memory_the_last_window_is_named_at_the_end(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = CompanionLoop(
        companion_settings(directory), open_sink=lambda _: Notes(), has_memory=lambda: False
    )
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.finish(1001.0)
    assert "window 0 has no answer" in capsys.readouterr().out


@pytest.mark.parametrize(("free_mib", "is_short"), [(0, True), (47, True), (48, False)])
def test_a_companion_that_training_leaves_no_memory_ends_with_one_line(
    free_mib: int, is_short: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MemoryGuard(log_line, lambda: free_mib << 20).is_short() is is_short
    out = capsys.readouterr().out
    assert out.count("\n") == is_short and (f"{free_mib} MiB are free" in out) is is_short
