"""A resumed run in the directory of an earlier one: samples join where the layout is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.launch.earlier import Earlier

GOLDEN = Path(__file__).parent.parent / "golden" / "cpu_dp2"


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
    own = build_table(read_run(home, "resumed"))
    return own, Earlier(home).join(own)


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
    own, found = joined(tmp_path)
    assert len(found.samples) == times * len(own.samples)
    assert found.run_id == "resumed" and found.steps.equals(own.steps)


def test_later_and_damaged_runs_are_left_out(tmp_path: Path) -> None:
    copy_as(tmp_path, "resumed", 1000.0, nothing)
    copy_as(tmp_path, "later", 2000.0, nothing)
    (tmp_path / "records" / "broken").mkdir()
    (tmp_path / "records" / "broken" / "rank-00000.jsonl").write_text("{", encoding="utf-8")
    own, found = joined(tmp_path)
    assert found.samples.equals(own.samples)
