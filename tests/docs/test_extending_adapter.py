"""The adapter of the page is real: its loop is trained with it, and records come out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.calib.records.record_kinds import BACKWARD, FORWARD, PhaseRecord
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.hooks.session.session import SAVE

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending" / "adapter.md").read_text(encoding="utf-8")
TRAIN = """
import sys
from pathlib import Path

import torch
import toy_adapter
from forerun.hooks.process.settings import RankInfo, Settings
import forerun.hooks.start as begin

begin.ADAPTERS = (toy_adapter.wait_for, *begin.ADAPTERS)
rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="toy")
begin.start(Settings(rank=rank, steps=8, every=0, directory=Path(sys.argv[1])))

import toyloop

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
trainer = toyloop.Trainer(model, torch.optim.AdamW(model.parameters()), num_steps=16)
trainer.fit(torch.randn(4, 16) for _ in range(16))
print("saves like before:", toyloop.Trainer.save.__qualname__, vars(model[0]).get("forward"))
"""


def test_the_adapter_of_the_page_records_its_loop(tmp_path: Path) -> None:
    for name, code in re.findall(r"```python title=(\S+)\n(.+?)```", PAGE, flags=re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "out")],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "saves like before: Trainer.save None" in done.stdout
    assert "fault" not in done.stderr
    run = read_run(tmp_path / "out")
    table = build_table(run)
    assert sorted(set(table.steps["step"])) == list(range(11))  # three to warm up, eight to measure
    assert not run.problems
    phases = [one for one in run.records[0] if isinstance(one, PhaseRecord)]
    assert {FORWARD, BACKWARD, SAVE} <= {phase.name for phase in phases}
