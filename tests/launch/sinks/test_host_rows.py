"""Rows of the host's own W&B run, offline and in this process, with our values in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from wandb_file import await_end, history

from forerun.hooks.process.host_wandb import HOST_TABLES, HOST_VALUES, CompanionFiles, HostWandb
from forerun.hooks.process.launch_identity import launch_folder

wandb = pytest.importorskip("wandb")

LAUNCH = "launch-1"


@pytest.mark.slow
def test_no_row_of_a_host_of_unknown_numbering_is_ours_alone(tmp_path: Path) -> None:
    """The host numbers the rows of its runs itself, and the second run's begin late."""
    home = launch_folder(tmp_path, LAUNCH)
    home.mkdir(parents=True)
    output = {"values": {}, "summary": {"is_ours": 1.0}, "alerts": [], "num_tables": 1}
    (home / HOST_VALUES).write_text(json.dumps({"launch_id": LAUNCH, **output}))
    table = {"number": 1, "table": "operators", "row": {"kind": "norm"}}
    (home / HOST_TABLES).write_text(json.dumps(table) + "\n")
    host = HostWandb(CompanionFiles(tmp_path, lambda: LAUNCH), is_stepped=False)
    settings, rows = wandb.Settings(silent=True), []
    for number, first in enumerate((0, 260)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with wandb.init(mode="offline", dir=folder, settings=settings) as run:
            for step in range(first, first + 50, 10):
                host.log(step=step, time_s=1.0, is_after_window=False)
                host.poll()
                run.log({"loss": 1.0}, step=step)
                host.poll()
        await_end(folder)
        rows.append(history(folder))
    assert [[step for step, _ in one] for one in rows] == [
        [0, 10, 20, 30, 40],
        [260, 270, 280, 290, 300],
    ]
    assert all("loss" in row for one in rows for _, row in one)
    assert all(any("calib/step_time_s" in row for _, row in one) for one in rows)
    assert any("calib/operators.nrows" in row for row in dict(rows[0]).values())
