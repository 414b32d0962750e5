"""Where the work of the device comes from: operator, phase and transfer of each kernel of a trace.

A kernel belongs to the operation of the host around its launch.  Inside a node of autograd it is
backward, but for what runs there with gradients enabled: that is a forward pass again, of a
checkpoint.  A node and the operation that it differentiates share a number, which each thread
counts for itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..workload.collectives import Collective
from ..workload.operators import Phase
from .kineto_trace import (
    CPU_OP,
    KERNEL,
    MESSAGE_OP,
    RUNTIME,
    SHAPES,
    USER_RANGE,
    Nesting,
    TraceEvent,
    collective_named,
    kernel_collective,
    operations_by_thread,
)

NODE = "autograd::engine::evaluate_function: "
SEQUENCE = "Sequence number"
_FORWARD_THREAD = "Fwd thread id"
_HOST = frozenset({CPU_OP, USER_RANGE})
ACCUMULATION = "torch::autograd::AccumulateGrad"
"""The node that adds to a parameter's gradient; no operation of the forward pass is its own."""
_OPTIMIZER = re.compile(r"^Optimizer\.|\boptimizer\b|\bzero_grad\b", re.IGNORECASE)
_FORWARD = re.compile(r"\bforward\b", re.IGNORECASE)
_LISTS_OUTPUT = "c10d::"
"""Its operations name what they write before what they read; all others the input first."""
_TRANSFER_RANGE = re.compile(r"^(nccl|rccl|gloo|mpi|ucc):(?!wait)")
_TRANSFER_OP = re.compile(r"^(c10d::|symm_mem::)(?!wait|barrier)(?=.*(all|reduce|broad|send|recv))")


class Missing(Enum):
    """Why nothing is known of who launched a kernel."""

    BEFORE = "launched before the trace began"
    LAUNCH = "its launch is not in the trace"
    OPERATOR = "launched outside every operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrigin:
    """One kernel's.  ``operator`` is that of the forward pass where a node names one, "" if none.

    ``details`` are those of the transfer around the launch; ``group`` its description and name, ""
    where the trace does not tell.
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
    """What holds for all that runs inside one event of the host."""

    phase: Phase | None = None
    operator: str = ""
    node: TraceEvent | None = None
    transfer: tuple[TraceEvent, ...] = ()


_NOWHERE = _Place()


class HostEvents:
    """Operations and ranges of the host: which runs in which, and which forward a node is of."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        self._nesting = Nesting(operations_by_thread(events, _HOST))
        threads = self._nesting.threads
        self.nodes = [e for inside in threads.values() for e in inside if is_node(e)]
        self.forwards = forward_operations(threads)
        self._places = {thread: self._all_places(thread) for thread in threads}
        self._numbers = {
            event.number: (thread, position)
            for thread, inside in threads.items()
            for position, event in enumerate(inside)
            if event.number and event.category == CPU_OP
        }

    def _all_places(self, thread: int) -> list[_Place]:
        places: list[_Place] = []
        inside, parents = self._nesting.threads[thread], self._nesting.parents[thread]
        for event, parent in zip(inside, parents, strict=True):
            around = places[parent] if parent >= 0 else _NOWHERE
            places.append(_place(event, around, self.forwards, is_forward_only=not self.nodes))
        return places

    def at_number(self, number: int) -> _Place | None:
        """The place of the operation with that number."""
        found = self._numbers.get(number)
        return self._places[found[0]][found[1]] if found else None

    def at_launch(self, launch: TraceEvent) -> _Place | None:
        """That of the innermost event around a launch, by thread and time."""
        at = self._nesting.around(launch)
        return None if at is None else self._places[launch.thread][at]


def is_node(event: TraceEvent) -> bool:
    """True for a node of autograd as the engine runs it."""
    return event.name.startswith(NODE)


def is_again(event: TraceEvent, node: TraceEvent | None) -> bool:
    """True for an operation of a forward pass that runs inside ``node``: a checkpoint's.

    Only what runs with gradients enabled has a number of its own, and no thread of a forward.

    >>> node = TraceEvent(name=f"{NODE}ReluBackward0", category=CPU_OP, start_ns=0, duration_ns=9)
    >>> inner = {"category": CPU_OP, "start_ns": 1, "duration_ns": 2}
    >>> conv = TraceEvent(name="aten::conv2d", details={SEQUENCE: 7, _FORWARD_THREAD: 0}, **inner)
    >>> is_again(conv, node), is_again(TraceEvent(name="aten::mul", **inner), node)
    (True, False)
    """
    if node is None or event.category != CPU_OP or _applies(event):
        return False
    return SEQUENCE in event.details and not event.details.get(_FORWARD_THREAD)


def _applies(event: TraceEvent) -> bool:
    """True for a node, and for the function that it calls."""
    return is_node(event) or bool(event.details.get(_FORWARD_THREAD))


def forward_operations(threads: Mapping[int, list[TraceEvent]]) -> dict[int, TraceEvent]:
    """The operation that each node differentiates, by ``id`` of the node.

    Of all with its number on its forward thread the last outermost one: those before it have asked
    for the number and made no node.  A node counts forward threads by numbers of its own; the
    thread that knows most of their sequence numbers is meant.
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
    found = {}
    for alike in nodes.values():
        hits = Counter(t for t in threads for e in alike if (t, e.details[SEQUENCE]) in made)
        for thread, _ in hits.most_common(1):
            for node in alike:
                event = made.get((thread, node.details[SEQUENCE]))
                if event is not None and event.start_ns < node.start_ns:
                    found[id(node)] = event
    return found


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
    if is_again(event, around.node) and around.phase is Phase.BACKWARD:
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
    """Events that describe one transfer, from the outside in."""
    is_one = event.name == MESSAGE_OP or (
        _TRANSFER_RANGE if event.category == USER_RANGE else _TRANSFER_OP
    ).search(event.name)
    return (*around.transfer, event) if is_one else around.transfer


def origins(events: Sequence[TraceEvent]) -> tuple[list[KernelOrigin], HostEvents]:
    """Of every kernel, in the order of the events; and the host's side of the trace."""
    host = HostEvents(events)
    launches = {e.correlation: e for e in events if e.category in RUNTIME and e.correlation}
    first = min(launches, default=0)
    begin_ns = min((e.start_ns for e in events if e.category in (CPU_OP, *RUNTIME)), default=0)
    found = []
    for kernel in events:
        if kernel.category != KERNEL:
            continue
        launch = launches.get(kernel.correlation)
        place = host.at_number(kernel.link)
        if place is None and launch is not None:
            place = host.at_number(launch.link) or host.at_launch(launch)
        is_before = kernel.correlation < first if kernel.correlation else False
        if launch is None and (is_before or kernel.start_ns < begin_ns):
            missing = Missing.BEFORE
        else:
            missing = Missing.LAUNCH if launch is None else Missing.OPERATOR
        found.append(_origin(kernel, place, missing))
    return found, host


def _origin(kernel: TraceEvent, place: _Place | None, missing: Missing) -> KernelOrigin:
    known = place or _NOWHERE
    told = kernel_collective(kernel.name)
    details = _message(kernel, known.transfer) if told is not None else {}
    name = str(details.get("Collective name", ""))
    collective = collective_named(name) if name and told is not None else told
    return KernelOrigin(
        kernel=kernel,
        operator=known.operator,
        phase=known.phase,
        missing=None if known.operator else missing,
        collective=told if collective is Collective.OTHER else collective,
        group=_group(details),
        details=details if told is not None else None,
    )


def _message(kernel: TraceEvent, around: tuple[TraceEvent, ...]) -> dict[str, Any]:
    """What is told of a transfer: by its kernel, else by the events around its launch."""
    if "Collective name" in kernel.details:
        return dict(kernel.details)
    found: dict[str, Any] = {}
    for event in around:
        inner = dict(event.details)
        if event.name.startswith(_LISTS_OUTPUT):
            inner.pop(SHAPES, None)
        if event.name != MESSAGE_OP:
            inner.setdefault("Collective name", event.name.rpartition(":")[2])
        found |= inner
    return found


def _group(details: dict[str, Any]) -> str:
    if "Process Group Name" not in details:
        return ""
    return f"{details.get('Process Group Description', '')}#{details['Process Group Name']}"
