"""How much of a trace's kernel time is known: by operator, phase and transfer, and what is not.

What is not known has a cause; a share without one would hide that a reader is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from ..records.kineto_origins import ACCUMULATION, NODE, HostEvents, KernelOrigin, Missing
from ..units import NS_PER_S, format_frac, format_time

KERNEL_COLUMNS = (
    "trace",
    "device",
    "phase",
    "operator",
    "collective",
    "group",
    "num_kernels",
    "time_s",
)
_LEAST_TOLD = 0.0005
"""A smaller share reads as 0.0 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShares:
    """Shares of the time of all kernels, each of 1.

    ``outside_frac`` has an operator and no phase: input that is made or exchanged.  ``missing`` are
    causes.  Of ``num_nodes`` nodes of autograd ``num_linked`` have their operation
    of the forward pass, ``num_accumulating`` have none, for they add gradients up.
    """

    name: str
    num_kernels: int
    kernel_time_s: float
    operator_frac: float
    phase_fracs: dict[str, float]
    outside_frac: float
    transfer_frac: float
    missing_fracs: dict[str, float]
    num_transfers: int
    num_sized_transfers: int
    num_nodes: int
    num_linked: int
    num_accumulating: int

    @property
    def inside_frac(self) -> float:
        """Time by operator over that of kernels that were launched while the trace ran."""
        inside = 1.0 - self.missing_fracs.get(Missing.BEFORE.value, 0.0)
        return self.operator_frac / inside if inside > 0 else 0.0

    def text(self) -> str:
        """One line.

        >>> TraceShares(
        ...     name="t", num_kernels=4, kernel_time_s=0.002, operator_frac=0.75,
        ...     phase_fracs={"forward": 0.75}, outside_frac=0.0, transfer_frac=0.0,
        ...     missing_fracs={"late": 0.25},
        ...     num_transfers=0, num_sized_transfers=0, num_nodes=0, num_linked=0,
        ...     num_accumulating=0,
        ... ).text()
        't: 4 kernels, 2.00 ms: 75.0 % by operator (forward 75.0 %); 25.0 % late'
        """
        phases = ", ".join(f"{name} {format_frac(frac)}" for name, frac in self.phase_fracs.items())
        parts = [f"{format_frac(self.operator_frac)} by operator ({phases or 'no phase'})"]
        if self.outside_frac >= _LEAST_TOLD:
            parts.append(f"{format_frac(self.outside_frac)} outside every pass")
        parts += [f"{format_frac(frac)} {why}" for why, frac in self.missing_fracs.items()]
        if self.num_transfers:
            sized = f"{self.num_sized_transfers} with a size"
            parts.append(
                f"{format_frac(self.transfer_frac)} in {self.num_transfers} transfers, {sized}"
            )
        if self.num_nodes:
            parts.append(
                f"{self.num_linked} of {self.num_nodes} backward nodes have their operation, "
                f"{self.num_accumulating} add gradients up"
            )
        told = f"{self.num_kernels} kernels, {format_time(self.kernel_time_s)}"
        return f"{self.name}: {told}: {'; '.join(parts)}"


def shares(
    name: str, origins: Sequence[KernelOrigin], host: HostEvents, num_sized_transfers: int
) -> TraceShares | None:
    """What is known of the kernels of a trace; None where it has none."""
    total_ns = sum(origin.kernel.duration_ns for origin in origins)
    if not total_ns:
        return None

    def by(key: Callable[[KernelOrigin], str | None]) -> dict[str, float]:
        times: Counter[str] = Counter()
        for origin in origins:
            if (value := key(origin)) is not None:
                times[value] += origin.kernel.duration_ns
        return {value: time / total_ns for value, time in times.most_common()}

    return TraceShares(
        name=name,
        num_kernels=len(origins),
        kernel_time_s=total_ns / NS_PER_S,
        operator_frac=by(lambda o: "" if o.operator else None).get("", 0.0),
        phase_fracs=by(lambda o: o.phase.value if o.phase else None),
        outside_frac=by(lambda o: "" if o.operator and not o.phase else None).get("", 0.0),
        transfer_frac=by(lambda o: "" if o.collective else None).get("", 0.0),
        missing_fracs=by(lambda o: o.missing.value if o.missing else None),
        num_transfers=sum(origin.collective is not None for origin in origins),
        num_sized_transfers=num_sized_transfers,
        num_nodes=len(host.nodes),
        num_linked=len(host.forwards),
        num_accumulating=sum(node.name == f"{NODE}{ACCUMULATION}" for node in host.nodes),
    )


def kernel_frame(name: str, device: str, origins: Sequence[KernelOrigin]) -> pd.DataFrame:
    """Kernels by phase, operator and transfer, the longest time first; a cause in place of an
    operator that is not known."""
    rows = [
        {
            "trace": name,
            "device": device,
            "phase": o.phase.value if o.phase else "",
            "operator": o.operator or (f"({o.missing.value})" if o.missing else ""),
            "collective": o.collective.value if o.collective else "",
            "group": o.group,
            "num_kernels": 1,
            "time_s": o.kernel.duration_ns / NS_PER_S,
        }
        for o in origins
    ]
    frame = pd.DataFrame(rows, columns=list(KERNEL_COLUMNS))
    keys = list(KERNEL_COLUMNS[:-2])
    summed = frame.groupby(keys, sort=False, as_index=False).sum()
    return summed.sort_values("time_s", ascending=False, kind="stable").reset_index(drop=True)
