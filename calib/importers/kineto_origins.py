"""Origins of the kernels of a trace: the operator, phase and transfer of each.

A kernel belongs to the host's operation around its launch.  Inside an autograd node it is backward,
unless it runs there with gradients enabled: then it is the recomputed forward pass of a checkpoint.
A node and the operation that it differentiates share a number, which each thread counts separately.

``TraceShares`` has how much of a trace's kernel time is attributed by operator, phase and
transfer.  Each share that is not has a cause: one without would hide that a reader is wrong.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pandas as pd

from ..records.kineto_trace import (
    CPU_OP,
    KERNEL,
    MESSAGE_OP,
    RUNTIME,
    SHAPES,
    USER_RANGE,
    Launches,
    Nesting,
    TraceEvent,
    collective_named,
    group_named,
    kernel_collective,
)
from ..units import NS_PER_S, format_frac, format_time
from ..workload.collectives import Collective
from ..workload.operators import Phase

NODE = "autograd::engine::evaluate_function: "
SEQUENCE = "Sequence number"
_FORWARD_THREAD = "Fwd thread id"
_HOST = frozenset({CPU_OP, USER_RANGE})
ACCUMULATION = "torch::autograd::AccumulateGrad"
"""Autograd node that adds to a parameter's gradient; it has no operation of the forward pass."""
_OPTIMIZER = re.compile(r"^Optimizer\.|\boptimizer\b|\bzero_grad\b", re.IGNORECASE)
_FORWARD = re.compile(r"\bforward\b", re.IGNORECASE)
_LISTS_OUTPUT = "c10d::"
"""Prefix of operations whose arguments list outputs first; all others list the input first."""
_TRANSFER_RANGE = re.compile(r"^(nccl|rccl|gloo|mpi|ucc):(?!wait)")
_TRANSFER_OP = re.compile(r"^(c10d::|symm_mem::)(?!wait|barrier)(?=.*(all|reduce|broad|send|recv))")


class Missing(Enum):
    """Reason why the operator that launched a kernel is unknown."""

    BEFORE = "launched before the trace began"
    LAUNCH = "its launch is not in the trace"
    OPERATOR = "launched outside every operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrigin:
    """Origin of one kernel.

    ``operator`` is that of the forward pass if a node names one, "" if there is none.  ``details``
    are those of the transfer around the launch; ``group`` has the description and name of its
    group, "" if unknown.
    """

    kernel: TraceEvent
    operator: str = ""
    phase: Phase | None = None
    missing: Missing | None = None
    collective: Collective | None = None
    group: str = ""
    details: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Attributes of everything that runs inside one event of the host."""

    phase: Phase | None = None
    operator: str = ""
    node: TraceEvent | None = None
    transfer: tuple[TraceEvent, ...] = ()


_NOWHERE = _Place()


class HostEvents:
    """Autograd nodes of the host, each with its forward operation, and the place of each event."""

    def __init__(self, nesting: Nesting) -> None:
        threads = nesting.threads
        self.nodes = [e for inside in threads.values() for e in inside if is_node(e)]
        self.forwards = forward_operations(threads)
        self._places: dict[int, _Place] = {}
        for thread, inside in threads.items():
            for event, parent in zip(inside, nesting.parents[thread], strict=True):
                around = self.place(inside[parent] if parent >= 0 else None)
                self._places[id(event)] = _place(
                    event, around, self.forwards, is_forward_only=not self.nodes
                )

    def place(self, event: TraceEvent | None) -> _Place:
        """Return the place of what runs inside an event; that of nothing for None."""
        return _NOWHERE if event is None else self._places[id(event)]


def is_node(event: TraceEvent) -> bool:
    """True for an autograd node as the engine runs it."""
    return event.name.startswith(NODE)


def is_recomputed_operation(event: TraceEvent, node: TraceEvent | None) -> bool:
    """True for an operation of a checkpoint's forward pass that runs again inside ``node``.

    Only operations with gradients enabled have a number of their own, and no forward thread.

    >>> node = TraceEvent(name=f"{NODE}ReluBackward0", category=CPU_OP, start_ns=0, duration_ns=9)
    >>> inner = {"category": CPU_OP, "start_ns": 1, "duration_ns": 2}
    >>> conv = TraceEvent(name="aten::conv2d", details={SEQUENCE: 7, _FORWARD_THREAD: 0}, **inner)
    >>> mul = TraceEvent(name="aten::mul", **inner)
    >>> is_recomputed_operation(conv, node), is_recomputed_operation(mul, node)
    (True, False)
    """
    if node is None or event.category != CPU_OP or _applies(event):
        return False
    return SEQUENCE in event.details and not event.details.get(_FORWARD_THREAD)


def _applies(event: TraceEvent) -> bool:
    """True for a node and for the function that it calls."""
    return is_node(event) or bool(event.details.get(_FORWARD_THREAD))


def forward_operations(threads: Mapping[int, list[TraceEvent]]) -> dict[int, TraceEvent]:
    """Return the operation that each node differentiates, by ``id`` of the node.

    It is the last outermost one with the node's number on its forward thread: earlier ones took the
    number and made no node.  Nodes number forward threads in their own way; each such number stands
    for the thread that has most of the nodes' sequence numbers.
    """
    made: dict[tuple[int, int], TraceEvent] = {}
    nodes: dict[int, list[TraceEvent]] = {}
    for thread, inside in threads.items():
        ends: dict[int, int] = {}
        for event in inside:
            number = event.details.get(SEQUENCE)
            if number is None:
                continue
            if is_node(event):
                nodes.setdefault(int(event.details.get(_FORWARD_THREAD) or 0), []).append(event)
            elif not _applies(event) and event.start_ns >= ends.get(number, event.start_ns):
                ends[number] = event.end_ns
                made[thread, number] = event
    operation_by_node = {}
    for alike in nodes.values():
        hits = Counter(t for t in threads for e in alike if (t, e.details[SEQUENCE]) in made)
        for thread, _ in hits.most_common(1):
            for node in alike:
                event = made.get((thread, node.details[SEQUENCE]))
                if event is not None and event.start_ns < node.start_ns:
                    operation_by_node[id(node)] = event
    return operation_by_node


def _place(
    event: TraceEvent,
    around: _Place,
    forwards: dict[int, TraceEvent],
    *,
    is_forward_only: bool,
) -> _Place:
    if event.category == USER_RANGE:
        phase = around.phase or _phase_of_range(event.name)
        # A fused optimizer launches its kernels itself, under no operation of the framework.
        is_optimizer = phase is Phase.STEP and not around.operator
        return _Place(
            phase=phase,
            operator=event.name if is_optimizer else around.operator,
            node=around.node,
            transfer=_transfer(event, around),
        )
    if is_node(event):
        forward = forwards.get(id(event))
        name = forward.name if forward is not None else event.name.removeprefix(NODE)
        return _Place(phase=Phase.BACKWARD, operator=name, node=event)
    if is_recomputed_operation(event, around.node) and around.phase is Phase.BACKWARD:
        return _Place(Phase.RECOMPUTE, event.name, around.node, _transfer(event, around))
    phase = around.phase
    if phase is None and (is_forward_only or SEQUENCE in event.details):
        phase = Phase.FORWARD
    if _applies(event):
        phase = phase or Phase.BACKWARD
    return _Place(phase, around.operator or event.name, around.node, _transfer(event, around))


def _phase_of_range(name: str) -> Phase | None:
    if _OPTIMIZER.search(name):
        return Phase.STEP
    return Phase.FORWARD if _FORWARD.search(name) else None


def _transfer(event: TraceEvent, around: _Place) -> tuple[TraceEvent, ...]:
    """Return the events that describe one transfer, outermost first."""
    is_one = event.name == MESSAGE_OP or (
        _TRANSFER_RANGE if event.category == USER_RANGE else _TRANSFER_OP
    ).search(event.name)
    return (*around.transfer, event) if is_one else around.transfer


def origins(events: Sequence[TraceEvent]) -> tuple[list[KernelOrigin], HostEvents]:
    """Return the origin of each kernel, in event order, and the host's side of the trace."""
    launches = Launches(events, _HOST)
    host = HostEvents(launches.nesting)
    first = min(launches.by_correlation, default=0)
    begin_ns = min((e.start_ns for e in events if e.category in (CPU_OP, *RUNTIME)), default=0)
    kernel_origins = []
    for kernel in events:
        if kernel.category != KERNEL:
            continue
        launch, call = launches.of(kernel)
        is_before = kernel.correlation < first if kernel.correlation else False
        if launch is None and (is_before or kernel.start_ns < begin_ns):
            missing = Missing.BEFORE
        else:
            missing = Missing.LAUNCH if launch is None else Missing.OPERATOR
        kernel_origins.append(_origin(kernel, host.place(call), missing))
    return kernel_origins, host


def _origin(kernel: TraceEvent, known: _Place, missing: Missing) -> KernelOrigin:
    named_collective = kernel_collective(kernel.name)
    details = _message(kernel, known.transfer) if named_collective is not None else {}
    name = str(details.get("Collective name", ""))
    collective = (
        collective_named(name) if name and named_collective is not None else named_collective
    )
    return KernelOrigin(
        kernel=kernel,
        operator=known.operator,
        phase=known.phase,
        missing=None if known.operator else missing,
        collective=named_collective if collective is Collective.OTHER else collective,
        group=group_named(details),
        details=details if named_collective is not None else None,
    )


def _message(kernel: TraceEvent, around: tuple[TraceEvent, ...]) -> dict[str, Any]:
    """Return the details of a transfer, from its kernel, else from the events around its launch."""
    if "Collective name" in kernel.details:
        return dict(kernel.details)
    details: dict[str, Any] = {}
    for event in around:
        inner = dict(event.details)
        if event.name.startswith(_LISTS_OUTPUT):
            inner.pop(SHAPES, None)
        if event.name != MESSAGE_OP:
            inner.setdefault("Collective name", event.name.rpartition(":")[2])
        details |= inner
    return details


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
_LEAST_SHOWN_FRAC = 0.0005
"""Least share that is printed; a smaller one would read as 0.0 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShares:
    """Shares of the time of all kernels, as fractions of 1.

    ``outside_frac`` has an operator but no phase: input that is made or exchanged.
    ``missing_fracs`` are by cause.  ``num_linked`` of ``num_nodes`` autograd nodes have their
    operation of the forward pass; ``num_accumulating`` have none, as they add gradients up.
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
        """Kernel time with an operator, over that of kernels launched while the trace ran."""
        inside = 1.0 - self.missing_fracs.get(Missing.BEFORE.value, 0.0)
        return self.operator_frac / inside if inside > 0 else 0.0

    def text(self) -> str:
        """Return the shares as one line.

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
        if self.outside_frac >= _LEAST_SHOWN_FRAC:
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
        summary = f"{self.num_kernels} kernels, {format_time(self.kernel_time_s)}"
        return f"{self.name}: {summary}: {'; '.join(parts)}"


def trace_shares(
    name: str, origins: Sequence[KernelOrigin], host: HostEvents, num_sized_transfers: int
) -> TraceShares | None:
    """Return the shares of a trace's kernel time; None if it has no kernels."""
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
    """Return kernels summed by phase, operator and transfer, longest time first; a cause replaces
    an unknown operator."""
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
