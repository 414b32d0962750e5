"""The measured step beside the simulated one: spans of one hooked step, by the same names."""

from __future__ import annotations

from dataclasses import dataclass

from ..records.record_kinds import PhaseRecord, StepRecord
from ..records.run_records import RunRecords
from ..units import NS_PER_S
from ..workload.config import RunConfig
from ..workload.ranks import position
from .programs import TaskKind

_KINDS = {
    "forward-compute": TaskKind.FORWARD,
    "backward-compute": TaskKind.BACKWARD,
    "all-grads-sync": TaskKind.REDUCE,
    "optimizer": TaskKind.OPTIMIZER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """Something that was measured, in seconds from the start of its step."""

    rank: int
    stage: int
    """0 where no layout is known."""
    kind: TaskKind
    microbatch: int
    """How many of its kind came before it in the step."""
    start_s: float
    end_s: float


def measured_spans(run: RunRecords) -> tuple[MeasuredSpan, ...]:
    """Phases of the last unflagged hooked step of each rank, seconds from that step's start."""
    out: list[MeasuredSpan] = []
    for rank, records in run.records.items():
        steps = [r for r in records if isinstance(r, StepRecord) and r.is_hooked and not r.flags]
        if not steps:
            continue
        last, stage = steps[-1], _stage(run.configs.get(rank), rank)
        for record in records:
            if not isinstance(record, PhaseRecord) or record.step != last.step:
                continue
            if (kind := _KINDS.get(record.name)) is not None:
                start_s = (record.start_ns - last.start_ns) / NS_PER_S
                out.append(
                    MeasuredSpan(
                        rank=rank,
                        stage=stage,
                        kind=kind,
                        microbatch=record.microbatch,
                        start_s=start_s,
                        end_s=start_s + record.duration_ns / NS_PER_S,
                    )
                )
    return tuple(out)


def _stage(config: RunConfig | None, rank: int) -> int:
    if config is None or rank >= config.parallelism.num_ranks:
        return 0
    return position(config.parallelism, rank).stage
