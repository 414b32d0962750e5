"""A CPU's times never price a GPU, nor a GPU's a CPU: data sheets and published rates alone do.

Truth are steps that NVIDIA published of H100 clusters, and that no factor on what was measured
changes an answer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from forerun.calib.errors import CalibrationError
from forerun.calib.fit.calibration import calibrate, calibration_for_device, combine_with_other
from forerun.calib.importers.canonical_steps import read_steps
from forerun.calib.records.cluster import StatedNodes
from forerun.calib.records.step_rows import StepRow
from forerun.calib.samples.store import read_run, write_table
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import RunConfig
from forerun.launch.known.machine_fits import device_machine
from forerun.launch.known.machines import Machine, open_machine
from tests.launch.known.test_carried_over import A100, GOLDEN, H100, copy_as

pytestmark = pytest.mark.slow

PUBLISHED = GOLDEN.parents[2] / "recipes" / "published" / "steps_dgxc_scaling.csv.gz"
NINE_IN_TEN = 0.9


@cache
def published() -> tuple[StepRow, ...]:
    table = read_steps(pd.read_csv(PUBLISHED), PUBLISHED.name)
    return tuple(replace(row, config=replace(row.config, device=H100)) for row in table.usable)


def with_scaled_times(table: SampleTable, factor: float) -> SampleTable:
    """The table of a machine that takes so many times as long."""
    frames = {
        name: frame.assign(time_s=factor * frame["time_s"])
        for name in ("samples", "steps")
        if "time_s" in (frame := getattr(table, name))
    }
    assert set(frames) == {"samples", "steps"}
    return replace(table, **frames)


def opened(home: Path, table: SampleTable, device: str) -> Machine:
    home.mkdir()
    write_table(home / "samples.parquet", table)
    return open_machine(home, device=device)


def span(machine: Machine, config: RunConfig) -> tuple[float, float, float]:
    """Ends and median of a step, asked for beside that of the running layout as every verb does."""
    _, step = machine.steps.estimates([machine.running, config])
    return step.low_s, step.time_s, step.high_s


def test_published_steps_lie_in_the_interval_that_a_cpu_run_answers_with(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", "cpu")
    machine = open_machine(tmp_path, device=H100)
    predictions = machine.steps.predict([row.config for row in published()])
    measured_s = np.array([row.measured_s for row in published()])
    is_inside = (predictions.low_s <= measured_s) & (measured_s <= predictions.high_s)
    assert is_inside.mean() >= NINE_IN_TEN
    first = published()[0]
    assert (first.measured_s, first.config.parallelism.num_ranks) == (14.72, 64)
    assert is_inside[0] and predictions.high_s[0] < 2 * predictions.low_s[0]


def test_the_answer_is_that_of_the_data_sheet_alone(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", "cpu")
    machine = open_machine(tmp_path, device=H100)
    for row in published()[::25]:
        assert span(machine, row.config) == span(device_machine(row.config), row.config)
    assert machine.budget.offset_nbytes is None
    assert any(H100 in problem and "cpu does not count" in problem for problem in machine.problems)
    # Ranks per node are those usual for the device, not the CPU run's two processes.
    assert machine.running.parallelism.ranks_per_node == 8
    stated_machine = open_machine(tmp_path, device=H100, stated=StatedNodes(num_gpus=4))
    assert stated_machine.running.parallelism.ranks_per_node == 4


@pytest.mark.parametrize(
    ("here", "there"), [("cpu", H100), ("cpu", "Accelerator 9"), (A100, "cpu")]
)
def test_no_factor_on_what_was_measured_changes_the_answer(
    here: str, there: str, tmp_path: Path
) -> None:
    copy_as(tmp_path, "run", here)
    table = build_table(read_run(tmp_path, "run"))
    results = []
    for factor in (0.01, 1.0, 100.0):
        machine = opened(tmp_path / str(factor), with_scaled_times(table, factor), there)
        results.append((*span(machine, machine.running), machine.budget.offset_nbytes))
    assert results[0] == results[1] == results[2]


def test_a_gpu_run_still_carries_over_to_another(tmp_path: Path) -> None:
    """The same factor goes along between devices of one kind."""
    copy_as(tmp_path, "run", A100)
    table = build_table(read_run(tmp_path, "run"))
    slow, usual = (
        opened(tmp_path / str(factor), with_scaled_times(table, factor), H100)
        for factor in (3.0, 1.0)
    )
    assert span(slow, slow.running)[1] > 1.5 * span(usual, usual.running)[1]


def test_no_way_takes_a_cpus_times_to_a_gpu(tmp_path: Path) -> None:
    copy_as(tmp_path / "gpu", "run", A100)
    copy_as(tmp_path / "cpu", "other", "cpu")
    on_cpu = calibrate(build_table(read_run(tmp_path / "cpu", "other")), device="cpu")
    on_gpu = calibrate(build_table(read_run(tmp_path / "gpu", "run")), device=A100)
    for carry in (
        lambda: calibration_for_device(on_cpu, H100),
        lambda: calibration_for_device(on_gpu, "cpu"),
        lambda: combine_with_other(on_gpu, on_cpu),
        lambda: combine_with_other(on_cpu, on_gpu),
        lambda: open_machine(tmp_path / "gpu", like=tmp_path / "cpu"),
    ):
        with pytest.raises(CalibrationError, match="do not apply to"):
            carry()
    alone = open_machine(tmp_path / "gpu")
    combined = open_machine(tmp_path / "gpu", also=[tmp_path / "cpu"])
    assert span(alone, alone.running) == span(combined, combined.running)
    assert any("does not count" in problem for problem in combined.problems)
