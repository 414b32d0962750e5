"""The measured step beside the simulated one: spans of one hooked step for the trace."""

from __future__ import annotations

from dataclasses import dataclass

from ..records.record_kinds import PhaseRecord, StepRecord
from ..records.run_records import RunRecords
from ..units import NS_PER_S

_SHOWN = ("forward-compute", "backward-compute", "optimizer", "all-grads-sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """Something that was measured, in seconds from the start of its step."""

    track: str
    name: str
    start_s: float
    end_s: float


def measured_spans(run: RunRecords) -> tuple[MeasuredSpan, ...]:
    """Phases of the last unflagged hooked step of each rank, seconds from that step's start."""
    out: list[MeasuredSpan] = []
    for rank, records in run.records.items():
        steps = [r for r in records if isinstance(r, StepRecord) and r.is_hooked and not r.flags]
        if not steps:
            continue
        last = steps[-1]
        for record in records:
            if not isinstance(record, PhaseRecord) or record.step != last.step:
                continue
            if record.name in _SHOWN:
                start_s = (record.start_ns - last.start_ns) / NS_PER_S
                out.append(
                    MeasuredSpan(
                        track=f"rank {rank}",
                        name=f"{record.name} {record.microbatch}",
                        start_s=start_s,
                        end_s=start_s + record.duration_ns / NS_PER_S,
                    )
                )
    return tuple(out)
