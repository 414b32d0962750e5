"""A run that never was: what is read back is what was planted, by the doors of real runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forerun.benchmarks.published.model_shapes import public_shape
from forerun.benchmarks.runs.synthetic_run import RUN_ID, Planted, write_synthetic_run
from forerun.calib.fit.estimates import Source
from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.samples.store import read_run
from forerun.calib.workload.config import Batch, Parallelism, Precision, RunConfig
from forerun.launch.cli import main
from forerun.launch.known.machines import open_machine

pytestmark = pytest.mark.slow

H100 = "NVIDIA H100 80GB HBM3"
CONFIG = RunConfig(
    model=public_shape("GPT3_175B", seq_length=512, num_layers=2),
    parallelism=Parallelism(
        tp=4, dp=2, is_sequence_parallel=True, is_optimizer_distributed=True, ranks_per_node=8
    ),
    batch=Batch(micro_batch_size=1, global_batch_size=4),
    precision=Precision.BF16,
    device=H100,
)
SEED = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("synthetic")
    return write_synthetic_run(home, CONFIG, num_windows=1, seed=SEED)


def test_every_rank_wrote_a_whole_run(directory: Path) -> None:
    run = read_run(directory)
    assert run.run_id == RUN_ID and run.problems == ()
    assert sorted(run.headers) == list(range(8))


def test_operators_and_transfers_are_those_that_were_planted(directory: Path) -> None:
    work = stage_operators(CONFIG, 0)
    calls = [call for call, _ in step_collectives(CONFIG, stage=0)]
    items = [*(one for part in (work.forward, work.backward) for one, _ in part), *calls]
    truth = Planted(device=H100, seed=SEED).times_s(items)
    estimates = open_machine(directory).steps.base.estimates(items)
    ratios = estimates.time_s / np.array([truth[item] for item in items])
    assert np.median(np.abs(np.log(ratios))) < 0.01
    measured = [source is Source.MEASURED for source in estimates.sources]
    assert np.abs(np.log(ratios[measured])).max() < 0.1


def test_the_step_is_the_sum_of_its_parts(directory: Path) -> None:
    machine = open_machine(directory)
    measured_s = machine.steps.measured_s(machine.running)
    work, total_s = stage_operators(CONFIG, 0), 0.0
    planted = Planted(device=H100, seed=SEED)
    per_microbatch = [*work.forward, *work.backward]
    calls = step_collectives(CONFIG, stage=0)
    truth = planted.times_s([item for item, _ in (*per_microbatch, *work.step, *calls)])
    for item, count in per_microbatch:
        total_s += CONFIG.num_microbatches * count * truth[item]
    total_s += sum(count * truth[item] for item, count in (*work.step, *calls))
    assert measured_s == pytest.approx(total_s, rel=0.01)


def test_the_same_seed_gives_the_same_files(tmp_path: Path, directory: Path) -> None:
    rewritten = write_synthetic_run(tmp_path, CONFIG, num_windows=1, seed=SEED)
    name = f"records/{RUN_ID}/rank-00003.jsonl"
    assert (rewritten / name).read_text() == (directory / name).read_text()


def test_a_plan_is_made_of_it_as_of_a_real_run(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(directory), "--gpus", "16", "--top", "3"]) == 0
    assert "TP4 DP2" in capsys.readouterr().out


def test_stages_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    layout = replace(CONFIG.parallelism, tp=2, pp=2)
    with pytest.raises(ValueError, match="one stage"):
        write_synthetic_run(tmp_path, replace(CONFIG, parallelism=layout))
