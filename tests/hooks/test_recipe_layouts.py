"""Records of real ranks under torchrun over gloo, against what the layout generates.

Only Megatron on real ranks shows what it calls in a layout.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launched import torchrun

from forerun.calib.layers.stage_work import stage_operators, step_collectives
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, StepRecord
from forerun.calib.samples.store import read_run
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind

pytest.importorskip("megatron")
pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_gpt.py"
SMALL = "--hidden-size 32 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 --mock-data "
SMALL += "--train-iters 8 --log-interval 1"
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
LLAMA += "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "tp2 pp2, sequence parallel": (
        4,
        "--num-layers 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--sequence-parallel {LLAMA}",
    ),
    "pp2 dp2, interleaved, distributed and overlapped": (
        4,
        "--num-layers 4 --pipeline-model-parallel-size 2 "
        f"--num-layers-per-virtual-pipeline-stage 1 {DISTRIBUTED}",
    ),
    "dp2, bf16, full recompute, small buckets": (
        2,
        f"--num-layers 2 --bf16 --recompute-granularity full {DISTRIBUTED} --ddp-bucket-size 20000",
    ),
    "tp2, selective recompute": (
        2,
        f"--num-layers 2 --tensor-model-parallel-size 2 --recompute-granularity selective {LLAMA}",
    ),
}
CONTROL_NBYTES = 64
"""Norms, flags and losses are at most this long, and are left out by design."""


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    num_ranks, arguments = LAYOUTS[request.param]
    directory = tmp_path_factory.mktemp("run")
    flags = ("--calibrate", "--calibrate-steps=4", "--calibrate-wandb=off")
    torchrun(
        directory,
        *(str(RECIPE), *SMALL.split(), *arguments.split(), *flags),
        f"--calibrate-dir={directory / 'out'}",
        num_ranks=num_ranks,
    )
    records = read_run(directory / "out")
    assert records.problems == () and len(records.records) == num_ranks
    return records


def of(run: RunRecords, rank: int, kind: type) -> list[Any]:
    return [record for record in run.records[rank] if isinstance(record, kind)]


def test_operators_are_those_that_the_layout_generates(run: RunRecords) -> None:
    for rank, config in run.configs.items():
        work = stage_operators(config, run.headers[rank].stage)
        operators = [
            record
            for record in of(run, rank, OperatorRecord)
            if record.kind is not OperatorKind.OPTIMIZER
        ]
        seen = Counter((o.phase, o.kind, o.shape, o.element_nbytes) for o in operators)
        generated = {
            (o.phase, o.kind, o.shape, o.element_nbytes): count
            for o, count in (*work.forward, *work.backward, *work.recompute)
            if o.kind is not OperatorKind.HOST_MICROBATCH
        }
        assert seen.keys() == generated.keys()
        # Only some passes of a step are hooked in full; with one chunk they are all alike.
        if config.parallelism.vp == 1:
            passes = {seen[key] / count for key, count in generated.items()}
            assert len(passes) == 1 and passes.pop() >= 2


def test_collectives_are_those_that_the_layout_generates(run: RunRecords) -> None:
    for rank, config in run.configs.items():
        num_steps = sum(step.is_hooked for step in of(run, rank, StepRecord))
        generated = {
            (call.collective, call.role, call.num_ranks, call.nbytes): count * num_steps
            for call, count in step_collectives(config, stage=run.headers[rank].stage)
        }
        seen = Counter(key_of(record, config.parallelism.pp) for record in transfers(run, rank))
        assert generated == seen


def transfers(run: RunRecords, rank: int) -> list[CollectiveRecord]:
    ignored = (GroupRole.MODEL, GroupRole.OTHER)
    return [
        record
        for record in of(run, rank, CollectiveRecord)
        if record.nbytes > CONTROL_NBYTES and len(record.ranks) > 1 and record.role not in ignored
    ]


def key_of(record: CollectiveRecord, num_stages: int) -> tuple[Any, ...]:
    role, num_ranks = record.role, len(record.ranks)
    if record.collective in (Collective.SEND, Collective.RECV):
        # Between two stages, Megatron sends one way over the group of all ranks.
        role, num_ranks = GroupRole.PP, num_stages
    return record.collective, role, num_ranks, record.nbytes
