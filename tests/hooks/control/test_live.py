"""Output of the process: the companion's arguments, and metrics in the host's own W&B run."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.calib.workload.config_json import encode
from forerun.hooks.control.companion_link import SETTINGS_FD
from forerun.hooks.control.live import Live, companion_settings
from forerun.hooks.process.host_wandb import (
    HOST_TABLES,
    HOST_VALUES,
    CompanionFiles,
    HostWandb,
    host_run,
)
from forerun.hooks.process.launch_identity import launch_folder
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.recording.window import StepPlan

LAUNCH = "launch-1"


def write_values(directory: Path, values: dict[str, object], **more: object) -> Path:
    path = launch_folder(directory, LAUNCH) / HOST_VALUES
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"launch_id": LAUNCH, "summary": {}, "alerts": [], "num_tables": 0, "values": values}
    path.write_text(json.dumps({**whole, **more}))
    return path


class HostRun:
    """W&B's rule for steps: a step below the last is refused."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.defined: list[tuple[str, dict[str, object]]] = []

    def define_metric(self, name: str, **how: object) -> None:
        self.defined.append((name, how))

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step, f"step {step} is less than current step {self.step}"
        self.step = step
        self.rows.append((step, values))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> HostRun:
    run = HostRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    return run


def settings(directory: Path, *, rank: int = 1, command: tuple[str, ...] = ()) -> Settings:
    info = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, run_id="r")
    return Settings(rank=info, directory=directory, companion_command=command)


def test_without_a_host_run_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert host_run() is None
    assert "wandb" not in sys.modules


def test_steps_are_logged_under_the_number_that_the_host_uses(run: HostRun, tmp_path: Path) -> None:
    wandb = HostWandb(CompanionFiles(tmp_path, lambda: LAUNCH))
    for step in range(3):
        wandb.log(step=step, time_s=1.0, is_after_window=False)
        run.log({"lm loss": 2.0}, step=step + 1)
    assert [row[0] for row in run.rows] == [1, 1, 2, 2, 3, 3]


def test_in_a_resumed_host_the_numbers_follow_the_hosts(run: HostRun, tmp_path: Path) -> None:
    wandb = HostWandb(CompanionFiles(tmp_path, lambda: LAUNCH))
    wandb.log(step=0, time_s=1.0, is_after_window=False)
    run.log({"lm loss": 2.0}, step=101)
    wandb.log(step=1, time_s=1.0, is_after_window=False)
    run.log({"lm loss": 2.0}, step=102)
    assert [row[0] for row in run.rows] == [1, 101, 102, 102]


def test_the_median_of_bare_steps_stands_in_until_there_is_an_answer(
    run: HostRun, tmp_path: Path
) -> None:
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    wandb = HostWandb(files)
    for time_s in (1.0, 2.0, 9.0):
        wandb.note_bare(time_s)
    files.poll()
    wandb.log(step=4, time_s=4.0, is_after_window=True)
    write_values(
        tmp_path,
        {
            "step_time_predicted_s": 3.0, "step_time_modelled_s": 3.5, "level_s": 3.0,
            "finish_p50_unix_s": 7.0, "overhead_frac": "damaged", "num_steps": 60,
        },
    )  # fmt: skip
    files.poll()
    wandb.log(step=5, time_s=4.0, is_after_window=True)
    wandb.log(step=6, time_s=4.0, is_after_window=False)
    assert run.rows[0][1] == {
        "calib/iteration": 5,
        "calib/step_time_s": 4.0,
        "calib/step_time_predicted_s": 2.0,
        "calib/step_time_error_frac": -0.5,
    }
    assert run.rows[1][1] == {
        "calib/iteration": 6,
        "calib/step_time_s": 4.0,
        "calib/step_time_predicted_s": 3.0,
        "calib/step_time_modelled_s": 3.5,
        "calib/step_time_error_frac": -0.25,
        "calib/level_s": 3.0,
        "calib/finish_p50_unix_s": 7.0,
        "calib/num_steps": 60.0,
        "calib/progress_frac": 0.1,
    }
    assert run.rows[2][1].keys() == {
        "calib/iteration", "calib/step_time_s", "calib/level_s", "calib/progress_frac",
    }  # fmt: skip


def test_rates_of_the_newest_step_become_those_of_the_step(run: HostRun, tmp_path: Path) -> None:
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    wandb = HostWandb(files)
    write_values(tmp_path, {"step_time_s": 3.0, "tokens_per_s": 800.0, "mfu_frac": 0.4})
    files.poll()
    wandb.log(step=5, time_s=4.0, is_after_window=True)
    wandb.log(step=6, time_s=0.0, is_after_window=False)
    assert run.rows[0][1]["calib/tokens_per_s"] == pytest.approx(600.0)
    assert run.rows[0][1]["calib/mfu_frac"] == pytest.approx(0.3)
    assert "calib/tokens_per_s_per_gpu" not in run.rows[0][1]
    assert run.rows[1][1] == {"calib/iteration": 7, "calib/step_time_s": 0.0}


def test_the_band_of_a_step_stands_beside_it(run: HostRun, tmp_path: Path) -> None:
    """By the keys of our own run, and judged only where both of its ends are there."""
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    wandb = HostWandb(files)
    low = {"step_time_predicted_s": 3.0, "step_time_predicted_low_s": 2.5}
    write_values(tmp_path, {**low})
    files.poll()
    wandb.log(step=5, time_s=4.0, is_after_window=True)
    write_values(tmp_path, {**low, "step_time_predicted_high_s": 3.5})
    files.poll()
    wandb.log(step=6, time_s=4.0, is_after_window=True)
    wandb.log(step=7, time_s=3.4, is_after_window=True)
    first, second, third = (row for _, row in run.rows)
    assert "calib/is_in_interval" not in first
    ends = [second[f"calib/step_time_predicted_{end}_s"] for end in ("low", "high")]
    assert ends == [2.5, 3.5]
    assert [row["calib/is_in_interval"] for row in (second, third)] == [0.0, 1.0]


def test_what_is_defined_in_the_hosts_run_is_ours_alone(run: HostRun, tmp_path: Path) -> None:
    wandb = HostWandb(CompanionFiles(tmp_path, lambda: LAUNCH))
    for step in range(3):
        wandb.log(step=step, time_s=1.0, is_after_window=False)
    assert [name for name, _ in run.defined] == ["calib/iteration", "calib/*"]
    assert run.defined[1][1] == {"step_metric": "calib/iteration"}


def test_a_constant_is_logged_once_and_the_end_counts_down(run: HostRun, tmp_path: Path) -> None:
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    wandb = HostWandb(files)
    values = {"step_time_predicted_s": 2.0, "finish_p50_unix_s": 9000.0, "overhead_frac": 0.01}
    write_values(tmp_path, {**values})
    files.poll()
    for step in range(3):
        wandb.log(step=step, time_s=2.0, is_after_window=True, unix_s=1800.0 * (step + 1))
    rows = [row for _, row in run.rows]
    assert [row.get("calib/overhead_frac") for row in rows] == [0.01, None, None]
    assert [row["calib/eta_h"] for row in rows] == [2.0, 1.5, 1.0]


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    path = write_values(tmp_path, {"step_time_s": 3.0})
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    files.poll()
    for text in ("{", "[1]", "[" * 200_000, "x" * (1 << 21), "{}"):
        path.write_text(text)
        files.poll()
    write_values(tmp_path, {}, summary=3)
    files.poll()
    write_values(tmp_path, {}, alerts=["x", 1])
    files.poll()
    assert files.output.values == {"step_time_s": 3.0}
    write_values(tmp_path, {"step_time_s": 10**400})
    files.poll()
    assert files.output.values == {"step_time_s": 3.0}
    write_values(tmp_path, {"step_time_s": None, "level_s": "x", "overhead_frac": 0.5})
    files.poll()
    assert files.output.values == {"overhead_frac": 0.5}
    rows = [{"number": 1, "table": "t", "row": {"a": 1}}, {"number": 2, "table": "t", "row": [3]}]
    lines = ["{", "[]", *map(json.dumps, rows), json.dumps({**rows[0], "number": 2})]
    path.with_name(HOST_TABLES).write_text("\n".join(lines))
    assert files.tables(1) == {"t": [{"a": 1}]}


def test_values_of_another_launch_are_none(tmp_path: Path) -> None:
    files = CompanionFiles(tmp_path, lambda: LAUNCH)
    write_values(tmp_path, {"step_time_s": 3.0}, launch_id="another")
    files.poll()
    text = json.dumps({"values": {"step_time_s": 3.0}, "launch_id": LAUNCH})
    (tmp_path / HOST_VALUES).write_text(text)
    files.poll()
    assert files.output.values == {}


def test_the_companion_is_told_what_it_needs_over_a_descriptor(tmp_path: Path) -> None:
    from forerun.launch.companion.program import _read_settings

    companion = companion_settings(settings(tmp_path), has_host_wandb=True)
    path = tmp_path / "told"
    path.write_text(json.dumps(encode(replace(companion, launch_id=LAUNCH))))
    result = _read_settings([SETTINGS_FD, str(os.open(path, os.O_RDONLY))])
    assert result == replace(companion, launch_id=LAUNCH)
    assert result.settings.directory == tmp_path and result.has_host_wandb


ECHO = "import sys; open(sys.argv[1] + '/events', 'w').write(sys.stdin.read())"


@pytest.mark.slow
def test_only_the_last_rank_starts_a_companion_and_tells_it_every_step(tmp_path: Path) -> None:
    command = (sys.executable, "-c", ECHO, str(tmp_path))
    for rank in (0, 1):
        live = Live(settings(tmp_path, rank=rank, command=command))
        live.start()
        live.step(0, StepPlan(window=0, is_hooked=False, is_last=True), 2 * 10**9, 10**9, ())
        live.send_event("window_closed", window=0, last_step=0)
        live.step(1, StepPlan(window=None, is_hooked=False), 10**9, 0, ())
        live.send_event("end", step=1, unix_s=2.0)
        live.settle()
        live.close()
        if rank == 0:
            assert not (tmp_path / "events").exists()
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [e["event"] for e in events] == ["step", "window_closed", "step", "end"]
    assert [e["is_after_window"] for e in events if e["event"] == "step"] == [False, True]
    assert (events[0]["time_s"], events[0]["gap_s"]) == (3.0, 1.0)
