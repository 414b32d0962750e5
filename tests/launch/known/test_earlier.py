"""A resumed run in the directory of an earlier one: samples join where the layout is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.importers.canonical_steps import canonical_frame
from forerun.calib.records.step_rows import StepRow
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.steps.model import fit_steps
from forerun.launch.known.machines import open_machine
from forerun.launch.known.runs import EarlierRuns
from forerun.launch.known.table_files import import_table

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


def copy_as(home: Path, name: str, later_s: float, change: Callable[[Any], None]) -> None:
    """The recorded run under another name, later, with its description changed."""
    shutil.copytree(GOLDEN / "records" / "golden-run", home / "records" / name)
    for path in (home / "records" / name).glob("rank-*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows[0]["run_id"] = name
        rows[0]["started_unix_s"] += later_s
        for row in rows:
            if "config" in row:
                change(row["config"])
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")


def joined(home: Path) -> tuple[SampleTable, SampleTable]:
    resumed = build_table(read_run(home, "resumed"))
    return resumed, EarlierRuns(home).join(resumed)


def nothing(config: Any) -> None:
    """No change."""


def more_layers(config: Any) -> None:
    config["model"]["num_layers"] *= 2


def longer(config: Any) -> None:
    config["cadence"]["train_iters"] += 100


@pytest.mark.parametrize(("change", "times"), [(nothing, 2), (longer, 2), (more_layers, 1)])
def test_samples_of_the_same_layout_join(
    tmp_path: Path, change: Callable[[Any], None], times: int
) -> None:
    copy_as(tmp_path, "first", 0.0, change)
    copy_as(tmp_path, "resumed", 1000.0, nothing)
    resumed, table = joined(tmp_path)
    assert len(table.samples) == times * len(resumed.samples)
    assert table.run_id == "resumed" and table.steps.equals(resumed.steps)


def two_stages(config: Any) -> None:
    config["parallelism"] |= {"dp": 1, "pp": 2}


def another_device(config: Any) -> None:
    config["device"] = "NVIDIA A100-SXM4-80GB"


def another_release(config: Any) -> None:
    config["framework"] = "Megatron-LM core_v0.12.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "site"),
    [(two_stages, [""]), (another_device, []), (another_release, ["Megatron-LM core_v0.12.0"])],
)
def test_steps_of_earlier_layouts_are_evidence(
    tmp_path: Path, change: Callable[[Any], None], site: list[str]
) -> None:
    copy_as(tmp_path, "first", 0.0, change)
    copy_as(tmp_path, "resumed", 1000.0, nothing)
    resumed = build_table(read_run(tmp_path, "resumed"))
    known_steps, measured = EarlierRuns(tmp_path).steps(resumed), Measurements(table=resumed)
    assert [one.site for one in known_steps] == site
    for one in known_steps:
        assert one.time_s == pytest.approx(measured.step_s)
        assert one.sigma_log > measured.step_sigma_log


def test_a_resume_in_another_layout_teaches_what_the_first_one_took(tmp_path: Path) -> None:
    """Whatever the model had thought of two stages: their step was measured before."""
    copy_as(tmp_path, "first", 0.0, two_stages)
    copy_as(tmp_path, "resumed", 1000.0, nothing)
    machine = open_machine(tmp_path)
    stages = next(one for one in machine.steps.known if one.config.parallelism.pp == 2)
    blind = fit_steps(machine.steps.base, [o for o in machine.steps.known if o is not stages])
    before, after = blind.estimate(stages.config), machine.steps.estimate(stages.config)
    # The other session tells as much as two sessions of a CPU are alike.
    assert stages.time_s < after.time_s < before.time_s
    assert after.low_s < stages.time_s
    estimate = machine.steps.estimate(machine.running)
    assert estimate.time_s == pytest.approx(machine.steps.measured_s(machine.running), rel=0.05)
    # Not only that layout: another one of two stages moves the same way.
    more = replace(stages.config, batch=replace(stages.config.batch, micro_batch_size=4))
    moved = machine.steps.estimate(more).time_s - blind.estimate(more).time_s
    assert moved * (stages.time_s - before.time_s) > 0


@pytest.mark.slow
def test_runs_of_another_directory_count_where_they_are_asked_for(tmp_path: Path) -> None:
    copy_as(tmp_path / "there", "first", 0.0, two_stages)
    copy_as(tmp_path / "here", "second", 1000.0, nothing)
    alone = open_machine(tmp_path / "here")
    both = open_machine(tmp_path / "here", also=[tmp_path / "there"])
    assert (len(alone.steps.known), len(both.steps.known)) == (1, 2)


def test_what_was_imported_beside_a_run_counts_for_all_who_ask(tmp_path: Path) -> None:
    copy_as(tmp_path, "resumed", 0.0, nothing)
    table = build_table(read_run(tmp_path, "resumed"))
    row = StepRow(
        table="t", row_id="1", config=table.config(), measured_s=0.5, machine="there", group="g"
    )
    canonical_frame([row]).to_csv(tmp_path / "rows.csv", index=False)
    import_table(tmp_path / "rows.csv", tmp_path)
    (imported_step,) = EarlierRuns(tmp_path).steps(table)
    assert (imported_step.site, imported_step.time_s) == ("there", 0.5)
    assert imported_step in open_machine(tmp_path).steps.known


def test_later_and_damaged_runs_are_left_out(tmp_path: Path) -> None:
    copy_as(tmp_path, "resumed", 1000.0, nothing)
    copy_as(tmp_path, "later", 2000.0, nothing)
    (tmp_path / "records" / "broken").mkdir()
    (tmp_path / "records" / "broken" / "rank-00000.jsonl").write_text("{", encoding="utf-8")
    resumed, table = joined(tmp_path)
    assert table.samples.equals(resumed.samples)
