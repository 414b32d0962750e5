"""Two real ranks with planted memory: rows of the live plan fit as by a closed form.

Words of a live companion beside two ranks are there in a real launch alone.
"""

from __future__ import annotations

import json
import math
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
RUNNING = RunConfig(
    model=replace(SMALL, num_layers=2, ffn_hidden_size=256, seq_length=512),
    parallelism=Parallelism(dp=2),
    batch=Batch(micro_batch_size=1, global_batch_size=16),
    recompute=Recompute.FULL,
)
WORDS = "--num-layers 2 --hidden-size 64 --seq-length 512 --micro-batch-size 1 --mock-data"
WORDS += " --recompute-granularity full --train-iters 12 --calibrate --calibrate-steps=6"
WORDS += " --calibrate-wandb=off"


def more_nbytes(micro: int) -> int:
    """Return bytes that ``micro`` samples at once need beyond the running layout, no recompute."""
    batch = Batch(micro_batch_size=micro, global_batch_size=16)
    other = replace(RUNNING, batch=batch, recompute=Recompute.NONE)
    return memory(other).total_nbytes - memory(RUNNING).total_nbytes


def capacity_nbytes(more: int) -> float:
    """Return the memory in which so many more bytes than the measured peak fit nine of ten times.

    The allocator's reserve is 3 %, and so is the error of a peak; that of the increase is as large
    as it, since the peak is many times what the model alone takes.
    """
    needed = PEAK_NBYTES + more
    return 1.03 * needed + 1.2816 * math.hypot(0.03 * needed, more)


def test_rows_of_the_plan_are_what_the_memory_of_a_run_has_room_for(tmp_path: Path) -> None:
    """Room for four samples with nothing computed again, and for a part of what eight take."""
    four, eight = more_nbytes(4), more_nbytes(8)
    planted = round((capacity_nbytes(four) + capacity_nbytes(eight)) / 2)
    done = torchrun(
        tmp_path,
        *(planted_memory.__file__, *WORDS.split(), f"--calibrate-dir={tmp_path / 'out'}"),
        PLANTED_NBYTES=str(planted),
        PLANTED_PEAK_NBYTES=str(PEAK_NBYTES),
    )
    answer = json.loads((tmp_path / "out" / "latest" / "answer.json").read_text())
    rows = [one for one in answer["plan"]["candidates"] if one["label"].startswith("DP2 mbs")]
    verdicts = {r["micro_batch_size"]: r["verdict"] for r in rows if r["recompute"] == "none"}
    assert verdicts == {1: "fits", 2: "fits", 4: "fits", 8: "tight"}
    (line,) = [one for one in answer["decision"]["transcript"] if "faster" in one]
    assert line in done.stdout
    assert line in (tmp_path / "out" / "latest" / "report.html").read_text()
