"""A short soak: what a run with many windows holds is counted; times are for the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.calib.samples.recent import NUM_WINDOWS
from forerun.calib.samples.store import read_run, read_table
from forerun.launch.store.forecast_log import read_forecasts

ROOT = Path(__file__).parents[2]
NUM_STEPS, EVERY = 1100, 100

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc"),
]


def test_files_threads_and_rows_do_not_grow_with_the_windows(tmp_path: Path) -> None:
    home, verdicts_path = tmp_path / "run", tmp_path / "told.json"
    command = [
        *(sys.executable, str(ROOT / "benchmarks" / "soak.py"), f"--steps={NUM_STEPS}"),
        *(f"--every={EVERY}", "--sleep-ms=2", f"--keep={home}", f"--json={verdicts_path}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert verdicts_path.exists(), done.stdout + done.stderr
    verdicts = {row["claim"]: row for row in json.loads(verdicts_path.read_text())["verdicts"]}
    for claim in ("training: threads", "training: open files"):
        assert verdicts[claim]["holds"], verdicts[claim]
    assert any(claim.startswith("companion: gone") for claim in verdicts)
    run, table = read_run(home), read_table(home / "latest" / "samples.parquet")
    assert run.problems == ()
    # Besides those of the clock some that drifts have asked for.
    num_windows = len({getattr(r, "window", 0) for r in run.records[0]})
    assert num_windows >= NUM_STEPS // EVERY
    assert table.steps["window"].nunique() <= NUM_WINDOWS + 1
    answer = json.loads((home / "latest" / "answer.json").read_text(encoding="utf-8"))
    calibration = answer["calibration"]
    assert abs(calibration["error_frac"]) < 1.0 and abs(calibration["first_error_frac"]) < 1.0
    track = read_forecasts(home).track(run.run_id)
    assert track is not None and track.is_complete and track.errors
    assert (
        json.loads((home / "latest" / "decision.json").read_text(encoding="utf-8"))["run_id"]
        == run.run_id
    )
