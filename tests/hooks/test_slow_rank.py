"""A rank that is throttled in a real run over gloo is named, and with what it costs.

Only a real rank that is late makes the other wait inside gloo's own calls.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.drift.stragglers import Straggler, StragglerKind
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NUM_LAYERS, NUM_MICROBATCHES, BURN_S = 2, 4, 0.03
PLANTED_S = NUM_LAYERS * NUM_MICROBATCHES * BURN_S
NOBODY = -1
NUM_PAIRS = 3


def train(directory: Path, throttled: int) -> SampleTable:
    torchrun(
        directory,
        str(ROOT / "tests" / "support" / "throttled_rank.py"),
        *(str(ROOT / "recipes" / "pretrain_gpt.py"), "--num-layers", str(NUM_LAYERS)),
        *("--global-batch-size", str(2 * NUM_MICROBATCHES), "--micro-batch-size", "1"),
        *("--hidden-size", "32", "--seq-length", "32", "--mock-data", "--train-iters", "24"),
        *("--calibrate", "--calibrate-steps=20", "--calibrate-wandb=off"),
        f"--calibrate-dir={directory}",
        THROTTLED_RANK=str(throttled),
        THROTTLED_S=str(BURN_S),
    )
    return build_table(read_run(directory))


def test_the_throttled_rank_is_named_and_costs_what_the_step_loses(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # The step's loss is a difference of two runs.  A neighbour that is busy during one of them
    # moves it by as much as was planted, and one beside the other rank hides a part of the cost:
    # such a pair is measured again, and so is one in which no rank could be named.
    misses = [math.inf]
    for _ in range(NUM_PAIRS):
        bare = train(tmp_path_factory.mktemp("bare"), NOBODY)
        slow = train(tmp_path_factory.mktemp("slow"), throttled=1)
        if not Measurements(table=slow).waiting.slow.slow:
            continue
        straggler = named(slow)
        lost_s = Measurements(table=slow).step_s - Measurements(table=bare).step_s
        slack_s = (straggler.high_s - straggler.low_s) / 2 + 0.3 * PLANTED_S
        # The burnt time is known; beyond it the busy core slows the rank's own work down.
        least_s = 0.8 * PLANTED_S
        misses.append(max(abs(straggler.cost_s - lost_s) - slack_s, least_s - straggler.cost_s))
        if misses[-1] <= 0:
            break
    assert misses[-1] <= 0, misses
    assert bare.clocks["is_shared"].all()


def named(slow: SampleTable) -> Straggler:
    """The only one that is named: the throttled rank."""
    report = Measurements(table=slow).waiting
    (straggler,) = report.slow.slow
    assert (straggler.ranks, straggler.stage, straggler.kind) == ((1,), 0, StragglerKind.COMPUTE)
    assert report.line.startswith("slow: rank 1 (stage 0) · each step ")
    assert report.last_frac[1] > report.last_frac[0]
    assert report.clocks == ()
    return straggler
