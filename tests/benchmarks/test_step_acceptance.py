"""The acceptance table over a planted folder: who is left out, who is better, in any process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "steps.py"
GOLDEN = ROOT / "tests" / "golden" / "steps" / "e2e_small_tables.csv"
SCALES = (8, 16, 32, 64)


def planted(folder: Path) -> None:
    """A series that scales without loss, one of two scales, and rows that cannot be used."""
    one = pd.read_csv(GOLDEN).iloc[[0]].astype(object)
    one = one.assign(fsdp=None, recompute="none", micro_batch_size=2.0, step_time_s=4.0)
    grown = [
        one.assign(model="Llama-3.1-8B", gpus=gpus, dp=gpus, global_batch_size=4 * gpus)
        for gpus in SCALES
    ]
    short = [frame.assign(source="Another 2024") for frame in grown[:2]]
    bad = [
        grown[0].assign(**cells)
        for cells in ({"note": "under ZeRO-3"}, {"tp": None}, {"recompute": ""})
    ]
    table = pd.concat([*grown, *short, *bad], ignore_index=True)
    table.to_csv(folder / "e2e_small_tables.csv", index=False)


def run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    out = folder / "found.json"
    command = [sys.executable, str(SCRIPT), str(folder), "--only", "small tables", *options]
    command += ["--protocol", "scale_out", "--json", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(out.read_text(encoding="utf-8")), done.stdout


def test_the_table_is_the_same_in_two_processes_and_counts_who_is_left_out(tmp_path: Path) -> None:
    planted(tmp_path)
    alone, text = run(tmp_path)
    (line,) = alone["results"]
    assert line["ours"]["n"] == len(SCALES) - 1 == line["coverage"]["num_rows"]
    assert line["rows"] == len(SCALES) + 5
    assert line["left_out"] == {
        "tp not stated": 1,
        "a series of fewer than 3 numbers of GPUs": 2,
        "ZeRO as DeepSpeed and InternEvo run it is not modelled": 1,
        "the recompute is not stated": 1,
    }
    # As it was planted: perfect scaling errs nowhere, and nobody is better than that.
    assert line["baselines"]["perfect scaling"]["mape_frac"] == pytest.approx(0, abs=1e-6)
    assert not line["better_than"]["perfect scaling"]["is_better"]
    assert not line["better_than"]["perfect scaling"]["are_series"]
    for expected in (
        "| small tables | scale_out | 3 |",
        "| perfect scaling | 3 |",
        "tp not stated (1)",
    ):
        assert expected in text
    both, _ = run(tmp_path, "--jobs", "2")
    for result in (alone, both):
        result.pop("jobs")
        result["results"][0].pop("seconds")
    assert both == alone
