"""A run with known times, written as its ranks would write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from forerun.calib.records.record_kinds import (
    SCHEMA,
    CollectiveRecord,
    CoverageRecord,
    Header,
    OperatorRecord,
    PhaseRecord,
    Record,
    RunRecord,
    StepFlag,
    StepRecord,
    WindowRecord,
    to_dict,
)
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig
from forerun.calib.workload.operators import OperatorKind, Phase

US = 1_000
MS = 1_000_000
LINEAR_NS = 300 * US
HOST_NS = 50 * US
BETWEEN_NS = 30 * US
HOOK_NS = 20 * US
INSTALL_NS = 100 * US
TRANSFER_NS = 200 * US
LATE_NS = 70 * US
OPTIMIZER_NS = 2 * MS
STEP_REST_NS = 400 * US
NUM_STEPS = 10
FLAGGED_STEP = 7
WriteRun = Callable[..., Path]


@pytest.fixture
def config() -> RunConfig:
    model = ModelShape(
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=1024,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=64,
        seq_length=128,
        vocab_size=1024,
    )
    return RunConfig(
        model=model,
        parallelism=Parallelism(tp=2),
        batch=Batch(micro_batch_size=2, global_batch_size=8),
    )


def header(rank: int, *, run_id: str = "run-a", world_size: int = 2, **changes: object) -> Header:
    values = {
        "schema": SCHEMA,
        "run_id": run_id,
        "rank": rank,
        "world_size": world_size,
        "created_by": "forerun test",
        "device": "cpu",
        "started_unix_s": 100.0,
        **changes,
    }
    return Header(**values)  # type: ignore[arg-type]


def step_records(rank: int, step: int) -> list[Record]:
    """Two micro-batches of one linear and one all-reduce, for which rank 0 comes early.

    In hooked steps our hooks take their time too: within each pass, and around the step.
    """
    start = step * 100 * MS
    is_hooked = step % 2 == 0
    slow = 40 if step == FLAGGED_STEP else 1
    late = LATE_NS if rank == 0 else 0
    wait = TRANSFER_NS + late
    hook = HOOK_NS if is_hooked else 0
    install = INSTALL_NS if is_hooked else 0
    records: list[Record] = []
    at = start
    for microbatch in range(2):
        length = LINEAR_NS * slow + wait + HOST_NS + hook
        records.append(
            PhaseRecord(
                step=step,
                window=0,
                name="forward-compute",
                start_ns=at,
                microbatch=microbatch,
                duration_ns=length,
                wait_ns=wait,
                hook_ns=hook,
            )
        )
        if is_hooked:
            records.append(
                OperatorRecord(
                    step=step,
                    window=0,
                    microbatch=microbatch,
                    kind=OperatorKind.LINEAR_FC1,
                    phase=Phase.FORWARD,
                    shape=(256, 256, 512),
                    element_nbytes=4,
                    layer=0,
                    start_ns=at + 10,
                    duration_ns=LINEAR_NS * slow,
                )
            )
            records.append(
                CollectiveRecord(
                    step=step,
                    window=0,
                    collective=Collective.ALL_REDUCE,
                    role=GroupRole.TP,
                    group="TENSOR_MODEL_PARALLEL_GROUP",
                    ranks=(0, 1),
                    nbytes=262_144,
                    sequence=microbatch,
                    peer=-1,
                    is_async=False,
                    is_bound=False,
                    issue_ns=at + LINEAR_NS,
                    duration_ns=wait,
                    exposed_ns=wait,
                )
            )
        at += length + BETWEEN_NS
    records.append(
        PhaseRecord(
            step=step,
            window=0,
            name="forward-backward",
            microbatch=0,
            start_ns=start,
            duration_ns=at - start,
            wait_ns=2 * wait,
            hook_ns=2 * hook,
        )
    )
    records.append(
        PhaseRecord(
            step=step,
            window=0,
            name="optimizer",
            microbatch=0,
            start_ns=at,
            duration_ns=OPTIMIZER_NS,
        )
    )
    flags = (StepFlag.COLLECTED,) if step == FLAGGED_STEP and rank == 0 else ()
    records.append(
        StepRecord(
            step=step,
            window=0,
            start_ns=start,
            gap_ns=STEP_REST_NS // 4,
            duration_ns=at + OPTIMIZER_NS + STEP_REST_NS * 3 // 4 - start + install,
            is_hooked=is_hooked,
            flags=flags,
            hook_ns=install,
        )
    )
    return records


def rank_records(rank: int) -> list[Record]:
    records = [r for step in range(NUM_STEPS) for r in step_records(rank, step)]
    records.append(CoverageRecord(window=0, name="linear_fc1", installed=4, fired=4))
    records.append(
        WindowRecord(
            window=0,
            first_step=0,
            last_step=NUM_STEPS - 1,
            num_faults=0,
            num_dropped=rank,
            memory_peak_nbytes=1000 + rank,
        )
    )
    return records


@pytest.fixture
def write_run(tmp_path: Path, config: RunConfig) -> WriteRun:
    def write(
        *,
        run_id: str = "run-a",
        ranks: Iterable[int] = (0, 1),
        folder: str | None = None,
        **changes: object,
    ) -> Path:
        home = tmp_path / "records" / (folder or run_id)
        home.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            records = [
                header(rank, run_id=run_id, **changes),
                RunRecord(config=config.to_json()),
                *rank_records(rank),
            ]
            lines = [json.dumps(to_dict(record)) + "\n" for record in records]
            (home / f"rank-{rank:05d}.jsonl").write_text("".join(lines))
        return tmp_path

    return write
