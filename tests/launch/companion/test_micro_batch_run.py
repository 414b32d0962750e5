"""Two real ranks with planted memory: the advice is said live, and is that of a closed form.

Words of a live companion beside two ranks are there in a real launch alone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import planted_memory
import pytest
from launched import torchrun
from tiny_shape import SMALL

from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Batch, Parallelism, Recompute, RunConfig

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow
PEAK_NBYTES = 10**9
ALLOWED = 1.03 + 1.2816 * 0.03
"""Capacity over what nine of ten times fits in it: the allocator's reserve, and an error of 3 %."""
RUNNING = RunConfig(
    model=replace(SMALL, num_layers=2, ffn_hidden_size=256, seq_length=512),
    parallelism=Parallelism(dp=2),
    batch=Batch(micro_batch_size=1, global_batch_size=16),
    recompute=Recompute.FULL,
)
WORDS = "--num-layers 2 --hidden-size 64 --seq-length 512 --micro-batch-size 1 --mock-data"
WORDS += " --recompute-granularity full --train-iters 12 --calibrate --calibrate-steps=6"
WORDS += " --calibrate-micro-batch=advise --calibrate-wandb=off"


def more_nbytes(micro: int) -> int:
    """Return bytes that ``micro`` samples at once need beyond the running layout, no recompute."""
    batch = Batch(micro_batch_size=micro, global_batch_size=16)
    other = replace(RUNNING, batch=batch, recompute=Recompute.NONE)
    return memory(other).total_nbytes - memory(RUNNING).total_nbytes


def test_the_advice_of_a_run_is_what_its_memory_has_room_for(tmp_path: Path) -> None:
    """Room for four samples with nothing computed again, and for a part of what eight take."""
    budget_nbytes = PEAK_NBYTES + (more_nbytes(4) + more_nbytes(8)) // 2
    done = torchrun(
        tmp_path,
        *(planted_memory.__file__, *WORDS.split(), f"--calibrate-dir={tmp_path / 'out'}"),
        PLANTED_NBYTES=str(round(ALLOWED * budget_nbytes)),
        PLANTED_PEAK_NBYTES=str(PEAK_NBYTES),
    )
    decision = json.loads((tmp_path / "out" / "decision.json").read_text())
    advice = decision["micro_batch"]
    recompute_by_size = {one["micro_batch_size"]: one["recompute"] for one in advice["choices"]}
    assert [*recompute_by_size] == [1, 2, 4, 8]
    assert (
        recompute_by_size[1] == recompute_by_size[2] == recompute_by_size[4] == "none"
        and recompute_by_size[8] != "none"
    )
    assert max(one["memory_nbytes"] for one in advice["choices"]) <= budget_nbytes
    (line,) = [line for line in decision["transcript"] if "micro-batch: " in line]
    assert line in done.stdout
    assert line in (tmp_path / "out" / "report.md").read_text()
