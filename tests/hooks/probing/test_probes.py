"""Probes in a real run of two gloo ranks: the losses stay, the budget holds, nothing is left.

Only real ranks show that probes of one never leave another alone in a collective.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.fit.calibration import calibrate
from forerun.calib.fit.estimates import Source
from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    StepFlag,
    StepRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.collectives import Collective, GroupRole

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[3] / "recipes" / "pretrain_gpt.py"
TRAIN_ITERS, STEPS, FIRST_AFTER = 70, 4, 7
BUDGET_S = 20.0
"""Far more than the short list of so small a model takes, also on a busy machine."""
ARGUMENTS = (
    f"--num-layers 1 --hidden-size 32 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    f"--train-iters {TRAIN_ITERS} --log-interval 1 --hidden-dropout 0.1 --attention-dropout 0.1"
).split()


def train(directory: Path, *arguments: str, code: str = "") -> str:
    """The losses depend on every random number: dropout is on."""
    script = directory / "train.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.argv = [{str(RECIPE)!r}, *sys.argv[1:]]\n"
        f"sys.path[0] = {str(RECIPE.parent)!r}\n{code}\n"
        f"runpy.run_path({str(RECIPE)!r}, run_name='__main__')\n"
    )
    done = torchrun(directory, str(script), *ARGUMENTS, *arguments)
    return done.stdout + done.stderr


def losses(output: str) -> list[str]:
    return re.findall(r"loss bits (0x[0-9a-f]+)", output)


def flags(directory: Path, seconds: float) -> list[str]:
    return [
        "--calibrate",
        f"--calibrate-steps={STEPS}",
        f"--calibrate-dir={directory / 'out'}",
        "--calibrate-wandb=off",
        f"--calibrate-probe-seconds={seconds}",
    ]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return losses(train(tmp_path_factory.mktemp("bare")))


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunRecords]:
    directory = tmp_path_factory.mktemp("probed")
    output = train(directory, *flags(directory, BUDGET_S))
    return output, read_run(directory / "out")


def of(run: RunRecords, rank: int, kind: type) -> list:
    return [r for r in run.records[rank] if isinstance(r, kind)]


def probes(run: RunRecords, rank: int, kind: type) -> list:
    return [r for r in of(run, rank, kind) if r.is_probe]


def test_the_losses_are_those_of_a_run_without_us(
    bare: list[str], probed: tuple[str, RunRecords]
) -> None:
    assert len(bare) == TRAIN_ITERS
    assert losses(probed[0]) == bare
    assert "fault" not in probed[0] and "Warning" not in probed[0]


def test_both_ranks_probe_shapes_and_transfers_of_other_layouts(
    probed: tuple[str, RunRecords],
) -> None:
    run = probed[1]
    assert run.problems == ()
    for rank in (0, 1):
        assert len({r.shape for r in probes(run, rank, OperatorRecord)}) > 5
    transfers = [probes(run, rank, CollectiveRecord) for rank in (0, 1)]
    keys = [[(r.role, r.nbytes, r.sequence, r.step) for r in results] for results in transfers]
    assert keys[0] == keys[1] and len(keys[0]) > 5
    roles = {r.role for r in transfers[0]}
    assert GroupRole.TP in roles
    max_run_nbytes = max(r.nbytes for r in of(run, 0, CollectiveRecord) if not r.is_probe)
    controls = [r.nbytes for r in transfers[0] if r.role is GroupRole.DP]
    assert set(controls) <= {max_run_nbytes}, "of what the run has only a control"
    apart = Counter((r.role, r.collective, r.nbytes, r.step) for r in transfers[0])
    assert max(apart.values()) == 1, "repeats lie in steps of their own"
    ends = [{r.sequence for r in f if r.collective is Collective.SEND} for f in transfers]
    assert not ends[0] & ends[1], "of two ranks one sends and one receives"


def test_probes_lie_in_brackets_after_the_window_within_the_budget(
    probed: tuple[str, RunRecords],
) -> None:
    run = probed[1]
    for rank in (0, 1):
        brackets = [p for p in of(run, rank, PhaseRecord) if p.name == "probe"]
        assert brackets and min(p.step for p in brackets) == FIRST_AFTER - 1
        longest = max(p.duration_ns for p in brackets)
        assert sum(p.duration_ns for p in brackets) <= BUDGET_S * 1e9 + 2 * longest
        assert all(r.step >= FIRST_AFTER - 1 for r in probes(run, rank, OperatorRecord))
        inside = [s for s in of(run, rank, StepRecord) if StepFlag.PROBED in s.flags]
        assert not inside, "no step of the window stands after a probe"


def test_probes_are_near_what_hooks_measure_for_the_same_shapes(
    probed: tuple[str, RunRecords],
) -> None:
    """Without any correction, by an order of magnitude: live steps share this machine with other
    tests, and probes need not."""
    run = probed[1]
    ratios = []
    for key in {(r.kind, r.phase, r.shape) for r in probes(run, 0, OperatorRecord)}:
        live, alone = (
            [
                r.duration_ns
                for rank in (0, 1)
                for r in of(run, rank, OperatorRecord)
                if (r.kind, r.phase, r.shape) == key and r.is_probe == is_probe
            ]
            for is_probe in (False, True)
        )
        if live and key[0].is_linear:
            ratios.append(min(live) / min(alone))
    assert len(ratios) >= 4
    assert 0.1 < statistics.median(ratios) < 10.0


def test_a_layout_of_tensor_parallel_ranks_rests_on_probes(
    probed: tuple[str, RunRecords],
) -> None:
    table = build_table(probed[1])
    config = table.config()
    other = apply_options(config, ["--tensor-model-parallel-size", "2"])
    calibration = calibrate(table, device="cpu")
    calls = [call for call, _ in step_collectives(other, stage=0) if call.role is GroupRole.TP]
    sources = calibration.collectives(calls).sources
    assert sources.count(Source.PROBED) >= len(calls) / 2
    assert Source.PRIOR not in sources
    wanted = [o for o, _ in stage_operators(other, 0).forward if o.shape]
    assert Source.PRIOR not in calibration.operators(wanted).sources


FAILS_ON_ONE_RANK = """
import os, forerun.hooks.probing.probes as probes
if os.environ["RANK"] == "1":
    def broken(*arguments, **options):
        raise RuntimeError("planted")
    probes.Probing._run_operators = broken
"""


def test_a_fault_on_one_rank_ends_probes_and_hangs_nobody(bare: list[str], tmp_path: Path) -> None:
    output = train(tmp_path, *flags(tmp_path, BUDGET_S), code=FAILS_ON_ONE_RANK)
    assert losses(output) == bare
    assert output.count("planted") == 1
    run = read_run(tmp_path / "out")
    assert probes(run, 0, OperatorRecord) and not probes(run, 1, OperatorRecord)
    counts = [len(probes(run, rank, CollectiveRecord)) for rank in (0, 1)]
    assert counts[0] == counts[1]


def test_forerun_probe_measures_a_machine_that_then_answers(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [
            *launcher,
            *("--nproc-per-node", "2", "-m", "forerun", "probe", "--out", str(tmp_path)),
            *("--seconds", "1.5", "--json", "--", "train.py", "--num-layers", "2"),
            *("--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
            *("--max-position-embeddings", "32", "--padded-vocab-size", "64"),
            *("--micro-batch-size", "1", "--global-batch-size", "8"),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    result = json.loads(done.stdout)
    for row in result["collectives"]:
        factor = 1.0 if row["collective"] in ("all_reduce", "send") else 0.5
        assert row["bus_bytes_per_s"] == pytest.approx(factor * row["nbytes"] / row["time_s"])
    assert {row["collective"] for row in result["collectives"]} >= {"all_reduce", "send"}
    assert {row["kind"] for row in result["operators"]} >= {"embedding", "norm", "linear_qkv"}
    from forerun.launch.cli import ExitCode, main

    assert main(["plan", str(tmp_path), "--json"]) == ExitCode.ANSWER
    assert main(["predict", str(tmp_path), "--tensor-model-parallel-size", "2"]) == ExitCode.ANSWER
    table = build_table(read_run(tmp_path))
    assert table.samples["is_probe"].all() and table.steps.empty
