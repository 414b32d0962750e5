"""Records of Megatron-LM on an H200, whose headers were written before the model was seen.

``benchmarks/gpu/measured/h200-2026-11-28-megatron.tar.gz``: each header says ``cpu``, the
description says ``NVIDIA H200``.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.differences._settings import settings_of
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table

MEASURED = Path(__file__).parents[3] / "benchmarks" / "gpu" / "measured"


@pytest.fixture
def recorded(tmp_path: Path) -> RunRecords:
    with tarfile.open(MEASURED / "h200-2026-11-28-megatron.tar.gz") as file:
        file.extractall(tmp_path, filter="data")
    shutil.move(tmp_path / "megatron" / "b2-records", tmp_path / "run" / "records")
    return read_run(tmp_path / "run")


def test_the_description_names_the_device_of_a_run(recorded: RunRecords) -> None:
    assert {header.device for header in recorded.headers.values()} == {"cpu"}
    assert recorded.device == "NVIDIA H200"
    table = build_table(recorded)
    assert set(table.runs["device"]) == {"NVIDIA H200"}
    assert settings_of(Measurements(table=table))[("device",)] == "NVIDIA H200"


def test_time_that_hooks_add_beside_a_device_is_counted(recorded: RunRecords) -> None:
    """Launches of recorded operators wait for the device: a CPU's table has no such time."""
    steps = build_table(recorded).steps
    assert steps.loc[steps["is_hooked"], "hook_s"].gt(0).all()
    assert "added_s" in steps
