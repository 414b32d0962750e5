"""The sink of the page is real: it is put into the registry, and a recorded run goes through it."""

from __future__ import annotations

import csv
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from companion_settings import companion_settings

from forerun.calib.records.run_values import RUN_VALUES, SUMMARY_VALUES
from forerun.calib.workload.run_options import AutoSwitch
from forerun.launch.companion._companion_loop import CompanionLoop
from forerun.launch.sinks import registry
from forerun.launch.sinks.sink import Sink

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cpu_dp2"
PAGE = (ROOT / "docs" / "extending" / "sink.md").read_text(encoding="utf-8")
WINDOW_END = 11


@pytest.fixture
def csv_sink() -> Any:
    (code,) = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "csv_sink"}
    exec(compile(code, "sink.md", "exec"), names)
    return names["CsvSink"]


def with_sinks(monkeypatch: pytest.MonkeyPatch, **sinks: Any) -> None:
    """Install sinks as another package does: by entry points."""
    points = [SimpleNamespace(name=name, load=partial(id_of, one)) for name, one in sinks.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points * (group == registry.GROUP))


def id_of(one: Any) -> Any:
    return one


def run_through(directory: Path) -> None:
    shutil.copytree(GOLDEN / "records", directory / "records")
    loop = CompanionLoop(
        companion_settings(directory, wandb=AutoSwitch.OFF, tensorboard=AutoSwitch.OFF)
    )
    for step in range(WINDOW_END + 2):
        event = {
            "event": "step", "step": step, "time_s": 0.15, "is_hooked": False, "flags": [],
            "window": 0, "is_after_window": step >= WINDOW_END, "unix_s": 1000.0 + step,
        }  # fmt: skip
        loop.handle(event, 1000.0)
    loop.handle({"event": "window_closed", "window": 0, "last_step": WINDOW_END - 1}, 1000.0)
    loop.poll(1001.0)
    loop.finish(1002.0)


def test_the_csv_sink_of_the_page_gets_every_step_and_the_summary(
    csv_sink: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f'    SINKS: dict[str, str] = {{\n        "W&B": "{registry.SINKS["W&B"]}",\n' in PAGE
    with_sinks(monkeypatch, CSV=csv_sink)
    run_through(tmp_path)
    with (tmp_path / "values.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    steps = [int(row["step"]) for row in rows if row["name"] == "step_time_s"]
    assert steps == list(range(1, WINDOW_END + 3))
    ends = {row["name"] for row in rows if not row["step"]}
    assert {"num_scored_steps", "interval_coverage_frac"} <= ends
    assert ends <= RUN_VALUES.keys() | SUMMARY_VALUES.keys(), "each says what it is"
    assert f"W&B: off · CSV: {tmp_path}/values.csv" in capsys.readouterr().out


def test_a_sink_that_fails_is_said_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(Sink):
        def step(self, step: int, values: Any) -> None:
            raise OSError("no space left")

    def broken(settings: Any) -> Any:
        raise ValueError("no such server")

    with_sinks(monkeypatch, CSV=lambda _: Full(), elsewhere=broken)
    run_through(tmp_path)
    output = capsys.readouterr().out
    assert output.count("[forerun] CSV is off: no space left") == 1
    assert output.count("[forerun] elsewhere is off: no such server") == 1
    assert (tmp_path / "latest" / "decision.json").exists() and (
        tmp_path / "latest" / "score.json"
    ).exists()
