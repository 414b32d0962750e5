"""The recipe under torchrun, with two real ranks: records, losses, and nothing left behind.

Only a real launch has Megatron's own calls, pipelines and exits to be seen in.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from launched import torchrun

from forerun.calib.arguments.taken_options import (
    TRANSFORMER_ENGINE,
    absent_options,
    options_in,
)
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    StepRecord,
    WindowRecord,
)
from forerun.calib.records.run_values import NAME, Launch
from forerun.calib.samples.store import read_run
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, Phase

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS, TRAIN_ITERS, WARMUP = 4, 8, 3
SMALL = (
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--seq-length",
    "32",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--train-iters",
    str(TRAIN_ITERS),
    "--log-interval",
    "1",
)
PROBE = """
import atexit, gc, runpy, sys
import torch
from torch._C._distributed_c10d import ProcessGroup, Work

def report():
    replaced = [n for n, v in vars(ProcessGroup).items() if type(v).__name__ == "function"]
    replaced += ["wait"] if type(vars(Work)["wait"]).__name__ == "function" else []
    hooked = 0
    for chunk in chunks:
        hooked += sum(bool(m._forward_hooks or m._forward_pre_hooks) for m in chunk.modules())
        hooked += sum('forward' in vars(m) for m in chunk.modules())
        hooked += chunk.config.timers is not None
    ours = [c for c in gc.callbacks if "forerun" in str(getattr(c, "__module__", ""))]
    print("LEFT", len(replaced), hooked, len(ours), flush=True)

chunks = []
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
import gpt_model
build = gpt_model.build
def noted(args):
    built = build(args)
    chunks.extend(built[0])
    return built
gpt_model.build = noted
atexit.register(report)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch(directory: Path, *arguments: str) -> str:
    probe = directory / "probe.py"
    probe.write_text(PROBE)
    recipe = ROOT / "recipes" / "pretrain_gpt.py"
    return torchrun(directory, str(probe), str(recipe), *SMALL, *arguments).stdout


def losses(output: str) -> list[str]:
    return re.findall(r"loss bits (0x[0-9a-f]+)", output)


@cache
def calibrated(directory: Path, *arguments: str) -> tuple[str, RunRecords]:
    output = launch(
        directory,
        *arguments,
        "--calibrate",
        f"--calibrate-steps={STEPS}",
        f"--calibrate-dir={directory / 'out'}",
        "--calibrate-wandb=off",
    )
    return output, read_run(directory / "out")


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunRecords]:
    directory = tmp_path_factory.mktemp("tp2")
    return calibrated(directory, "--tensor-model-parallel-size", "2")


def test_rank_0_notes_what_the_recipe_s_own_parser_lacks(
    tensor_parallel: tuple[str, RunRecords], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = runpy.run_path(str(ROOT / "recipes" / "gpt_arguments.py"))
    taken = options_in(vars(recipe["parse_args"]([])))
    assert "--recompute-modules" in absent_options(taken)
    has_engine = importlib.util.find_spec(TRANSFORMER_ENGINE) is not None
    wanted = (*absent_options(taken), *(() if has_engine else (TRANSFORMER_ENGINE,)))
    run_id = tensor_parallel[1].run_id
    (path,) = tmp_path_factory.getbasetemp().glob(f"tp20/out/records/{run_id}/{NAME}")
    assert Launch.from_json(json.loads(path.read_text())).absent == wanted


def of(run: RunRecords, rank: int, kind: type) -> list:
    return [r for r in run.records[rank] if isinstance(r, kind)]


def test_losses_are_bitwise_those_of_a_run_without_us(
    tensor_parallel: tuple[str, RunRecords], tmp_path: Path
) -> None:
    bare = losses(launch(tmp_path, "--tensor-model-parallel-size", "2"))
    assert len(bare) == TRAIN_ITERS
    assert losses(tensor_parallel[0]) == bare


def test_nothing_of_ours_is_left_after_the_window(
    tensor_parallel: tuple[str, RunRecords],
) -> None:
    assert re.findall(r"LEFT (.*)", tensor_parallel[0]) == ["0 0 0"] * 2


def test_the_window_is_whole_and_every_hook_fired(
    tensor_parallel: tuple[str, RunRecords],
) -> None:
    run = tensor_parallel[1]
    assert run.problems == () and sorted(run.records) == [0, 1]
    for rank in run.records:
        hooked = [s.step for s in of(run, rank, StepRecord) if s.is_hooked]
        assert hooked == [WARMUP, WARMUP + 3]
        window = of(run, rank, WindowRecord)[0]
        assert (window.num_faults, window.num_dropped) == (0, 0)
        assert all(c.fired == c.installed for c in of(run, rank, CoverageRecord))


def test_operators_are_those_that_the_layout_generates(
    tensor_parallel: tuple[str, RunRecords],
) -> None:
    run = tensor_parallel[1]
    for rank, config in run.configs.items():
        expected = stage_operators(config, run.headers[rank].stage)
        operators = of(run, rank, OperatorRecord)
        for phase, wanted in (
            (Phase.FORWARD, expected.forward),
            (Phase.BACKWARD, expected.backward),
        ):
            seen = [o for o in operators if o.phase is phase]
            passes = len({(o.step, o.microbatch) for o in seen})
            assert passes >= 2
            assert Counter((o.kind, o.shape, o.element_nbytes) for o in seen) == {
                (o.kind, o.shape, o.element_nbytes): count * passes
                for o, count in wanted
                if o.kind is not OperatorKind.HOST_MICROBATCH
            }


def test_collectives_are_megatrons(tensor_parallel: tuple[str, RunRecords]) -> None:
    """Per micro-batch: embedding, two per layer each way, the logits, three of the loss."""
    run = tensor_parallel[1]
    config = run.configs[0]
    tokens = config.batch.micro_batch_size * config.model.seq_length
    passes = config.num_microbatches * STEPS // 2
    sizes = Counter(
        c.nbytes
        for c in of(run, 0, CollectiveRecord)
        if c.collective is Collective.ALL_REDUCE and c.role is GroupRole.TP
    )
    layers = config.model.num_layers
    assert sizes == {
        tokens * config.model.hidden_size * 4: (2 + 4 * layers) * passes,
        tokens * 4: 3 * passes,
    }


def test_both_ranks_number_a_transfer_alike(tensor_parallel: tuple[str, RunRecords]) -> None:
    run = tensor_parallel[1]
    keys = [
        [
            (c.step, c.group, c.collective, c.sequence, c.nbytes)
            for c in of(run, rank, CollectiveRecord)
            if c.role is GroupRole.TP
        ]
        for rank in (0, 1)
    ]
    assert keys[0] == keys[1] and len(set(keys[0])) == len(keys[0])


def test_operators_and_waits_explain_the_compute_phases(
    tensor_parallel: tuple[str, RunRecords],
) -> None:
    run = tensor_parallel[1]
    for rank in run.records:
        operators = of(run, rank, OperatorRecord)
        for name, kinds in (
            ("forward-compute", {Phase.FORWARD}),
            ("backward-compute", {Phase.BACKWARD, Phase.RECOMPUTE}),
        ):
            timed = {(o.step, o.microbatch) for o in operators if o.phase in kinds}
            phases = [
                p
                for p in of(run, rank, PhaseRecord)
                if p.name == name and (p.step, p.microbatch) in timed
            ]
            whole = sum(p.duration_ns for p in phases)
            taken = sum(p.wait_ns for p in phases) + sum(
                o.duration_ns for o in operators if o.phase in kinds
            )
            assert 0.5 * whole < taken <= whole


def test_stages_record_their_own_share_and_point_to_point_on_both_ends(tmp_path: Path) -> None:
    _, run = calibrated(tmp_path, "--pipeline-model-parallel-size", "2")
    assert [run.headers[rank].stage for rank in (0, 1)] == [0, 1]
    kinds = [{o.kind for o in of(run, rank, OperatorRecord)} for rank in (0, 1)]
    assert OperatorKind.EMBEDDING in kinds[0] - kinds[1]
    assert {OperatorKind.LOGITS, OperatorKind.LOSS} <= kinds[1] - kinds[0]
    ends = [
        Counter(
            (c.step, c.sequence, c.nbytes)
            for c in of(run, rank, CollectiveRecord)
            if c.collective is collective
        )
        for rank, collective in ((0, Collective.SEND), (1, Collective.RECV))
    ]
    assert ends[0] == ends[1] and sum(ends[0].values()) == 4 * STEPS // 2
