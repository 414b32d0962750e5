"""A calibration goes over to another device, and back from what was kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from forerun.calib.answers.measured_steps import run_steps
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.fit.calibration import calibrate, combine_with_other
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.operators import Operator, OperatorKind, Phase
from forerun.launch.known.machines import open_machine

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def copy_as(home: Path, name: str, device: str) -> None:
    """The recorded run under another name, as if on another device."""
    shutil.copytree(GOLDEN / "records" / "golden-run", home / "records" / name)
    for path in (home / "records" / name).glob("rank-*.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows[0]["run_id"] = name
        for row in rows:
            if "config" in row:
                row["config"]["device"] = device
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_another_device_is_named_and_wider(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", A100)
    machine = open_machine(tmp_path)
    moved = open_machine(tmp_path, device=H100)
    assert moved.running.device == H100 and not moved.steps.known
    here, there = machine.steps.estimate(machine.running), moved.steps.estimate(moved.running)
    assert there.high_s / there.low_s > 1.2 * here.high_s / here.low_s
    repeated = open_machine(tmp_path, device=H100).steps.estimate(moved.running)
    assert repeated.time_s == pytest.approx(there.time_s, rel=1e-9)
    assert open_machine(tmp_path).running.device == A100


@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    ["AMD Instinct MI325X", "AMD Instinct MI355X", "NVIDIA B300", "NVIDIA H20", "NVIDIA L40S"],
)
def test_a_card_of_a_data_sheet_alone_gets_a_step(device: str, tmp_path: Path) -> None:
    copy_as(tmp_path, "run", A100)
    moved = open_machine(tmp_path, device=device)
    step = moved.steps.estimate(moved.running)
    assert moved.running.device == device
    assert 0 < step.low_s < step.time_s < step.high_s < 1e3


def test_an_unknown_device_is_wide_all_the_way_to_the_step(tmp_path: Path) -> None:
    """Rates off by a factor of 4.5: a 90 % interval of a decade or more."""
    copy_as(tmp_path, "run", A100)
    known, unknown = (open_machine(tmp_path, device=d) for d in (H100, "Accelerator 9"))
    wide = unknown.steps.estimate(unknown.running)
    narrow = known.steps.estimate(known.running)
    assert np.log(wide.high_s / wide.low_s) > 1.5 * np.log(narrow.high_s / narrow.low_s)


def test_what_few_samples_are_of_comes_from_the_other_machine(tmp_path: Path) -> None:
    copy_as(tmp_path, "run", "cpu")
    table = build_table(read_run(tmp_path, "run"))
    calibrated = calibrate(table, device="cpu")
    both = combine_with_other(calibrated, calibrated)
    measured = next(one for one in calibrated.measured if one.kind.is_linear)
    assert both.operators([measured]).time_s == calibrated.operators([measured]).time_s
    shape = tuple(2 * size for size in measured.shape)
    operator = Operator(kind=measured.kind, phase=measured.phase, shape=shape, element_nbytes=4)
    # Carried to itself it says about the same.
    alone, carried = calibrated.operators([operator]), both.operators([operator])
    assert carried.time_s == pytest.approx(alone.time_s, rel=0.5)
    here = Measurements(table=table)
    assert run_steps(here, like=here).estimate(table.config()).time_s > 0
    host = Operator(kind=OperatorKind.HOST_STEP, phase=Phase.STEP, shape=(), element_nbytes=1)
    assert both.operators([host]).time_s == calibrated.operators([host]).time_s
