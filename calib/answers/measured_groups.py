"""The groups of ranks of a run, and what was measured of their transfers."""

from __future__ import annotations

from dataclasses import dataclass

from ..records.record_kinds import LoopRecord
from ..samples.table import SampleTable
from ..units import format_bytes, format_time
from ..workload.collectives import GroupRole

_UNMEASURED = (
    "its transfers are not measured: DistributedDataParallel issues them in C++, where only "
    "PyTorch's flight recorder sees them, and it recorded nothing here; set "
    "TORCH_FR_BUFFER_SIZE=2000 to switch it on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroup:
    """One kind of transfer among ranks of one role, per step of a rank."""

    role: str
    num_ranks: int
    collective: str = ""
    calls: float = 0.0
    nbytes: float = 0.0
    time_s: float = 0.0
    is_bound: bool = False
    """``time_s`` is an upper bound: the end of some was not seen."""
    note: str = ""
    """What is not measured, and why; empty where all is."""

    def line(self, step_s: float) -> str:
        """The transfers of a step; a bound above the step itself says nothing of their time."""
        what = f"group {self.role}, {self.num_ranks} ranks"
        if self.note:
            return f"{what}: {self.note}"
        times = f"{self.calls:.3g} per step, {format_bytes(self.nbytes)}"
        if self.is_bound and self.time_s > step_s:
            return f"{what}: {self.collective} {times}, whose end is not seen"
        bound = "at most " if self.is_bound else ""
        return f"{what}: {self.collective} {times}, {bound}{format_time(self.time_s)} of transfers"


def measured_groups(table: SampleTable, loop: LoopRecord) -> tuple[MeasuredGroup, ...]:
    """Of the newest window; a group that only the model's wrapper tells of has a note."""
    rows = table.collectives
    rows = rows[(rows["run_id"] == table.run_id) & ~rows["is_probe"]]
    rows = rows[rows["window"] == rows["window"].max()]
    # A transfer counts once, for all of its ranks that were seen; one size may be seen on one rank,
    # and in one step, alone.
    here = rows[["num_ranks", "num_seen"]].min(axis=1)
    seen = rows.groupby(["role", "num_ranks", "kind"])["num_seen"].transform("max")
    calls = rows["count"] * here / (rows["num_steps"].max() * seen).clip(lower=1)
    rows = rows.assign(calls=calls, nbytes=rows["nbytes"] * calls, time_s=rows["time_s"] * calls)
    found = [
        MeasuredGroup(
            role=str(role),
            num_ranks=int(num_ranks),
            collective=str(kind),
            calls=float(part["calls"].sum()),
            nbytes=float(part["nbytes"].sum()),
            time_s=float(part["time_s"].sum()),
            is_bound=bool(part["is_bound"].any()),
        )
        for (role, num_ranks, kind), part in rows.groupby(["role", "num_ranks", "kind"], sort=True)
    ]
    if loop.num_replicas > 1 and not found:
        size = format_bytes(loop.grad_nbytes)
        note = f"gradients of {size} are averaged in every step; {_UNMEASURED}"
        found.append(MeasuredGroup(role=GroupRole.DP.value, num_ranks=loop.num_replicas, note=note))
    return tuple(found)
