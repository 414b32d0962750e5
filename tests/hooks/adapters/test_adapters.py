"""Frameworks other than Megatron, for real: two ranks over gloo, watched without an edit.

Each launch trains watched and unwatched; what is recorded is held against what the script did.
Only real launches show that gloo's results, and so the losses, are the same to the last bit.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import adapter_runs as script
import pytest
import wandb_file
from launched import Launch

from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    StepFlag,
    StepRecord,
)
from forerun.calib.samples.store import read_run
from forerun.calib.workload.collectives import Collective
from forerun.calib.workload.operators import OperatorKind, Phase

SCRIPT = Path(script.__file__)
WINDOW = 8
NUM_WEIGHTS = 3 * (32 * 32 + 32)
_SEPARATE_PRODUCTS = {OperatorKind.LINEAR_QKV, OperatorKind.LINEAR_FC1, OperatorKind.LINEAR}
_NOT_MODULES = {OperatorKind.HOST_MICROBATCH, OperatorKind.POSITION, OperatorKind.LOSS}


def launch(kind: str, directory: Path, *arguments: str) -> str:
    words = ("--standalone", "--nproc-per-node", 2, SCRIPT, kind, directory, *arguments)
    return Launch(directory, *words, num_workers=2, WANDB_MODE="offline").end_well().stdout


@cache
def launch_hooked(kind: str, directory: Path) -> str:
    flags = ("--calibrate", f"--calibrate-steps={WINDOW}", f"--calibrate-dir={directory / 'out'}")
    return launch(kind, directory, *flags)


def losses(output: str) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for name, bits in re.findall(r"LOSSES (\S+) (\S+)", output):
        result.setdefault(name, set()).add(bits)
    return result


def of(run: RunRecords, kind: type) -> list:
    return [r for r in run.records[0] if isinstance(r, kind)]


def flagged(run: RunRecords, flag: StepFlag) -> list[int]:
    return [s.step for s in of(run, StepRecord) if flag in s.flags]


def check_steps(run: RunRecords, first: int) -> None:
    """The window follows three warm-up steps; every step has its passes and one optimizer step."""
    assert run.problems == () and sorted(run.records) == [0, 1]
    steps = of(run, StepRecord)
    assert [s.step for s in steps] == list(range(first, first + 3 + WINDOW))
    hooked = [s.step for s in steps if s.is_hooked]
    assert hooked == [first + 3 + i for i in (0, 3, 4, 7)]
    phases = Counter((p.step, p.name) for p in of(run, PhaseRecord))
    for step in hooked:
        assert phases[step, "forward-compute"] == script.ACCUMULATED
        assert phases[step, "backward-compute"] == script.ACCUMULATED
        assert phases[step, "optimizer"] == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    directory = tmp_path_factory.mktemp("plain")
    return launch_hooked("plain", directory), directory


def test_plain_loops_lose_no_bit(plain: tuple[str, Path], tmp_path: Path) -> None:
    bare = losses(launch("plain", tmp_path))
    assert sorted(bare) == ["ddp", "fsdp1", "fsdp2"]
    assert all(len(bits) == 2 for bits in bare.values())
    assert losses(plain[0]) == bare


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
def test_plain_loops_are_recorded(plain: tuple[str, Path], kind: str) -> None:
    """The first step shows the loop, so that the second, number 1, is the first on record."""
    directory = plain[1] / ("out" if kind == "ddp" else kind)
    run = read_run(directory)
    check_steps(run, first=1)
    assert flagged(run, StepFlag.EVALUATED) == [script.EVALUATED + 1]
    assert flagged(run, StepFlag.SAVED) == [script.SAVED + 1]
    shape = {o.shape for o in of(run, OperatorRecord) if o.kind is OperatorKind.OPTIMIZER}
    assert shape == {(NUM_WEIGHTS if kind == "ddp" else NUM_WEIGHTS // 2,)}


def test_only_the_hooks_of_the_framework_are_left(plain: tuple[str, Path]) -> None:
    match = re.search(r"OWN (\d+)", plain[0])
    assert match is not None
    hook_counts = re.findall(r"LEFT (.+)", plain[0])
    assert Counter(hook_counts) == {"0 0 0 0": 4, f"{match[1]} 0 0 0": 2}


def test_gathers_of_shards_and_buckets_of_ddp_are_seen(
    plain: tuple[str, Path],
) -> None:
    """FSDP1 gathers everything once a pass, both ways of reshard; FSDP2 each of its layers."""
    for kind, nbytes in (("fsdp1", NUM_WEIGHTS * 4), ("fsdp2", NUM_WEIGHTS * 4 // 3)):
        calls = Counter(
            (c.step, c.collective, c.nbytes)
            for c in of(read_run(plain[1] / kind), CollectiveRecord)
        )
        steps = {step for step, _, _ in calls}
        per_pass = NUM_WEIGHTS * 4 // nbytes
        for step in steps:
            assert calls[step, Collective.REDUCE_SCATTER, nbytes] == 2 * per_pass
            assert calls[step, Collective.ALL_GATHER, nbytes] >= 2 * per_pass
    ddp = read_run(plain[1] / "out")
    names = {c.name: c.fired for c in of(ddp, CoverageRecord)}
    assert names["collectives inside DistributedDataParallel"] == 1
    reduced = Counter((c.step, c.collective, c.nbytes) for c in of(ddp, CollectiveRecord))
    assert set(reduced.values()) == {script.ACCUMULATED}
    assert {(kind, nbytes) for _, kind, nbytes in reduced} == {
        (Collective.ALL_REDUCE, NUM_WEIGHTS * 4)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    directory = tmp_path_factory.mktemp("hugging_face")
    return launch_hooked("hugging_face", directory), directory


@pytest.mark.slow
def test_a_trainer_is_recorded_and_loses_no_bit(trained: tuple[str, Path]) -> None:
    output, directory = trained
    result = losses(output)
    assert result["watched"] == result["bare"]
    run = read_run(directory / "out")
    check_steps(run, first=0)
    assert script.EVALUATED in flagged(run, StepFlag.EVALUATED)
    assert script.SAVED in flagged(run, StepFlag.SAVED)
    assert set(re.findall(r"LEFT (.+)", output)) == {"0 0 0 0"}


@pytest.mark.slow
def test_a_trainers_operators_are_those_of_its_layout(trained: tuple[str, Path]) -> None:
    """Kinds and shapes are generated from the configuration that the model carries."""
    run = read_run(trained[1] / "out")
    config = run.configs[0]
    assert (config.batch.micro_batch_size, config.num_microbatches) == (2, script.ACCUMULATED)
    assert (config.parallelism.dp, config.model.seq_length) == (2, 16)
    assert config.cadence.train_iters == script.STEPS
    for phase, work in (
        (Phase.FORWARD, stage_operators(config, 0).forward),
        (Phase.BACKWARD, stage_operators(config, 0).backward),
    ):
        seen = Counter((o.kind, o.shape) for o in of(run, OperatorRecord) if o.phase is phase)
        passes = seen[OperatorKind.LOGITS, (32, 32, 64)]
        assert passes > 0
        skipped = _SEPARATE_PRODUCTS | _NOT_MODULES
        assert {k: n for k, n in seen.items() if k[0] not in skipped} == {
            (o.kind, o.shape): count * passes for o, count in work if o.kind not in skipped
        }
        wide = sum(n * s[2] for (k, s), n in seen.items() if k in _SEPARATE_PRODUCTS)
        assert wide == passes * sum(
            count * o.shape[2] for o, count in work if o.kind in _SEPARATE_PRODUCTS
        )


@pytest.mark.slow
def test_metrics_join_the_rows_of_the_trainers_own_run(trained: tuple[str, Path]) -> None:
    rows = [row for _, row in wandb_file.history(trained[1])]
    logged = [row for row in rows if "train/loss" in row]
    assert [row["train/global_step"] for row in logged] == list(range(1, script.STEPS + 1))
    # Ours begin once the host has begun a row of its own.
    assert all(row["calib/step_time_s"] > 0 for row in logged[1:])


@pytest.mark.slow
def test_lightning_is_recorded_and_loses_no_bit(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    output = launch_hooked("lightning", tmp_path)
    result = losses(output)
    assert result["watched"] == result["bare"]
    run = read_run(tmp_path / "out")
    check_steps(run, first=0)
    assert script.EVALUATED in flagged(run, StepFlag.EVALUATED)
    assert script.SAVED in flagged(run, StepFlag.SAVED)
    hook_counts = set(re.findall(r"LEFT (.+)", output))
    # Lightning's redirection leaves a forward on the module; without us it does so, too.
    assert hook_counts == {"0 1 0 0"}
