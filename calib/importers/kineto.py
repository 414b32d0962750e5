"""Operators and collectives from a trace of PyTorch's profiler, recorded with shapes.

On a device the time of an operator is that in which any kernel that it launched ran, with kernels
of several streams at once counted once; on a CPU it is the operator's own.  A trace of a device
without its kernels has no operators, and rows of a device that is not named have a flag.  The
backward of an operator is the autograd node with its sequence number, except what a checkpoint
recomputes inside.

Each kernel that transfers is one row of the collectives, with its rank: an NCCL kernel runs from
the arrival of its own rank, so that its time includes waiting for the others, until the ranks'
traces are joined.  Releases before 2.3 record neither size nor group; then the size is that of the
tensors around the launch, and the row is flagged if the group had to be taken for the whole world.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from typing import Any

import pandas as pd

from ..errors import ConfigError, RecordError
from ..records.chrome_trace import from_chrome, whole_number
from ..records.kineto_trace import (
    KERNEL,
    SHAPES,
    TracedWork,
    TraceEvent,
    accelerator_kind,
    busy_ns,
    device_work,
    operations_by_thread,
)
from ..units import NS_PER_S
from ..workload.collectives import Collective
from ..workload.operators import OperatorKind, Phase
from .canonical_tables import COLLECTIVE_COLUMNS, OPERATOR_COLUMNS, RANK_COLUMNS, element_nbytes
from .kineto_origins import (
    NODE,
    SEQUENCE,
    HostEvents,
    KernelOrigin,
    TraceShares,
    is_node,
    is_recomputed_operation,
    kernel_frame,
    origins,
    trace_shares,
)

Dims = Sequence[Sequence[int]]
Sizes = Callable[[Dims], tuple[int, ...]]
WORLD_TAKEN = "group not in the trace; the world's size is taken"
UNNAMED = "device not named in the trace; name it with --device"
_CPU = "cpu"
_DEVICE_LIBRARY = re.compile(r"(n|r|h|x|one)ccl")
"""Communication libraries of accelerators, in the names of backends and of transfers."""
_COUNTS_OUTPUT = frozenset({Collective.ALL_GATHER, Collective.RECV})


def _rows(dims: Dims) -> tuple[int, ...]:
    return (math.prod(dims[0][:-1]), dims[0][-1])


def _attention(dims: Dims) -> tuple[int, ...]:
    (batch, heads, seq, channels), (_, groups, _, _), value = dims[0], dims[1], dims[2]
    return (batch, heads, groups, seq, channels, value[-1])


@dataclass(frozen=True, slots=True)
class _Known:
    """An ATen operator that is one of ours."""

    kind: OperatorKind
    node: str
    """Prefix of its autograd node's name."""
    sizes: Sizes = _rows
    tensor: int = 0
    """Index of the input that gives the element type."""
    causal: int | None = None
    """Index of the input that makes attention causal; None if there is none."""


_PRODUCT, _BATCHED = OperatorKind.LINEAR, OperatorKind.BATCHED_PRODUCT
_KNOWN = {
    "mm": _Known(_PRODUCT, "MmBackward", lambda d: (*d[0], d[1][1])),
    "addmm": _Known(_PRODUCT, "AddmmBackward", lambda d: (*d[1], d[2][1]), tensor=1),
    "bmm": _Known(_BATCHED, "BmmBackward", lambda d: (*d[0], d[1][2])),
    "baddbmm": _Known(_BATCHED, "BaddbmmBackward", lambda d: (*d[1], d[2][2]), tensor=1),
    "native_layer_norm": _Known(OperatorKind.NORM, "NativeLayerNormBackward"),
    "_fused_rms_norm": _Known(OperatorKind.NORM, "FusedRmsNormBackward"),
    "_softmax": _Known(OperatorKind.SOFTMAX, "SoftmaxBackward"),
    "gelu": _Known(OperatorKind.ELEMENTWISE, "GeluBackward"),
    "silu": _Known(OperatorKind.ELEMENTWISE, "SiluBackward"),
    "native_dropout": _Known(OperatorKind.ELEMENTWISE, "NativeDropoutBackward"),
    "embedding": _Known(
        OperatorKind.EMBEDDING,
        "EmbeddingBackward",
        lambda d: (math.prod(d[1]), d[0][1], d[0][0]),
    ),
    **{
        f"_scaled_dot_product_{name}": _Known(
            OperatorKind.FLASH_ATTENTION, "ScaledDotProduct", _attention, causal=causal
        )
        for name, causal in (
            ("flash_attention", 4),
            ("flash_attention_for_cpu", 4),
            ("efficient_attention", 6),
            ("cudnn_attention", 6),
        )
    },
}


@dataclass(slots=True, kw_only=True)
class _Call:
    """One run of an operator or an autograd node, and the numbers of all operations inside."""

    event: TraceEvent
    phase: Phase = Phase.FORWARD
    numbers: list[int] = field(default_factory=list)
    others_ns: int = 0
    """Time inside that is not its own: nodes of a checkpoint, a recomputed forward pass."""

    @property
    def name(self) -> str:
        """Name of an operator, as in ``_KNOWN``."""
        return self.event.name.removeprefix("aten::")

    @property
    def key(self) -> tuple[int, Any]:
        """Key by which an operator's node finds it: sequence numbers are per thread."""
        return self.event.thread, self.event.details.get(SEQUENCE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KinetoTables:
    """Tables of a trace in our own format, and how much of its kernel time is attributed.

    ``shares`` is None in a trace without kernels; ``refusal`` says why there are no rows, ``flag``
    why all rows have one.
    """

    operators: pd.DataFrame
    collectives: pd.DataFrame
    kernels: pd.DataFrame
    shares: TraceShares | None
    refusal: str = ""
    flag: str = ""


def kineto_tables(
    trace: Mapping[str, Any], name: str, *, fabric: str, ranks_per_node: int, device: str = ""
) -> KinetoTables:
    """Return operators by call (forward, backward, recomputed), transfers by kernel, and kernels.

    ``device`` replaces the name in the trace; ``ranks_per_node`` is as in ``transfer_frame``.
    Raise ``RecordError`` if the file is no trace, ``ConfigError`` if ``device`` cannot be its.
    """
    events = _events(trace, name)
    device, flag = _device(trace, events, name, device)
    kernel_origins, host = origins(events)
    operators = _operators(events if device else (), host, device)
    collectives = transfer_frame(
        kernel_origins, trace=trace, device=device, fabric=fabric, ranks_per_node=ranks_per_node
    )
    refusal = ""
    if not device:
        refusal = flag
    elif not len(operators) and not len(collectives):
        refusal = _refusal(events, kernel_origins, name)
    elif flag:
        for frame in (operators, collectives):
            frame["flag"] = [f"{other}; {flag}" if other else flag for other in frame["flag"]]
    return KinetoTables(
        operators=operators,
        collectives=collectives,
        kernels=kernel_frame(name, device, kernel_origins),
        shares=trace_shares(name, kernel_origins, host, len(collectives)),
        refusal=refusal,
        flag="" if refusal else flag,
    )


def _refusal(
    events: Sequence[TraceEvent], kernel_origins: Sequence[KernelOrigin], name: str
) -> str:
    if any(SHAPES in event.details for event in events):
        return f"{name} holds none of the operators that are modelled, and no transfer with a size"
    have = " and no transfer has a size" if any(o.collective for o in kernel_origins) else ""
    remedy = "record the trace with record_shapes=True"
    return f"{name} holds no operator with shapes{have}; {remedy}"


def _operators(events: Sequence[TraceEvent], host: HostEvents, device: str) -> pd.DataFrame:
    """Return the rows of all calls; ``forward`` has the last per number, which made the node."""
    calls = [call for thread in operations_by_thread(events).values() for call in _calls(thread)]
    kernels = _kernels_of_calls(events)
    rows: list[dict[str, Any]] = []
    forward: dict[tuple[int, Any], tuple[_Call, dict[str, Any]]] = {}
    for call in calls:
        row = None if is_node(call.event) else _operator_row(call, device)
        if row is not None:
            forward[call.key] = (call, row)
            rows.append(row | {"phase": call.phase.value, "time_s": _time_s(call, kernels)})
    for node in (call for call in calls if is_node(call.event)):
        event = host.forwards.get(id(node.event))
        key = (event.thread, event.details[SEQUENCE]) if event is not None else None
        if key not in forward:
            continue
        call, row = forward[key]
        if node.event.name.removeprefix(NODE).startswith(_KNOWN[call.name].node):
            rows.append(row | {"phase": Phase.BACKWARD.value, "time_s": _time_s(node, kernels)})
    frame = pd.DataFrame(rows, columns=list(OPERATOR_COLUMNS))
    frame["tp"] = frame["tp"].astype("Int64")
    return frame[frame["time_s"] > 0].reset_index(drop=True)


def _events(trace: Mapping[str, Any], name: str) -> list[TraceEvent]:
    trace_events = from_chrome(trace.get("traceEvents") or ()) if isinstance(trace, Mapping) else []
    if not trace_events:
        raise RecordError(
            f"{name} is not a Chrome trace with complete events (ph X), as PyTorch's profiler "
            "exports them; give one"
        )
    return trace_events


def _device(
    trace: Mapping[str, Any], events: Sequence[TraceEvent], name: str, chosen: str
) -> tuple[str, str]:
    """Return the device that ran the operators, and a flag for its rows, empty if it is named.

    Without a device the flag is the reason: the times would be those of the host.
    """
    listed, kind = _listed_device(trace, events), accelerator_kind(events)
    if any(event.category == KERNEL for event in events):
        if chosen.lower() == _CPU:
            remedy = "give the name of the device that ran them"
            raise ConfigError(f"--device {chosen} runs no kernels, and {name} has some; {remedy}")
        unnamed = "unknown device" if kind in (KERNEL, "gpu") else f"unknown {kind} device"
        return chosen or listed or unnamed, "" if chosen or listed else UNNAMED
    if chosen.lower() == _CPU:
        return _CPU, ""
    if listed or kind or _uses_device_library(trace, events):
        remedy = "record its activity too, or give --device cpu if the operators ran on the CPU"
        lacking = f"events of category kernel of its {listed or kind or 'accelerator'}"
        return "", f"{name} has no {lacking}; {remedy}"
    return chosen or _CPU, ""


def _listed_device(trace: Mapping[str, Any], events: Sequence[TraceEvent]) -> str:
    """Return the listed device that ran kernels, else the first; empty if none has a name."""
    listed = trace.get("deviceProperties")
    listed = listed if isinstance(listed, list) else []
    properties = [one for one in listed if isinstance(one, Mapping) and one.get("name")]
    numbers = [event.details.get("device") for event in events if event.category == KERNEL]
    used = [one for one in properties if one.get("id") in numbers]
    return str((used or properties)[0]["name"]) if properties else ""


def _uses_device_library(trace: Mapping[str, Any], events: Sequence[TraceEvent]) -> bool:
    distributed_info = trace.get("distributedInfo")
    is_mapping = isinstance(distributed_info, Mapping)
    backend = str(distributed_info.get("backend", "")) if is_mapping else ""
    return bool(_DEVICE_LIBRARY.search(backend)) or any(
        _DEVICE_LIBRARY.match(event.name) for event in events
    )


@dataclass(slots=True)
class _OpenEvent:
    """An open event, and the call that owns everything that runs in it."""

    event: TraceEvent
    owner: _Call | None = None
    node: TraceEvent | None = None
    is_recomputed: bool = False


def _calls(thread: Sequence[TraceEvent]) -> Iterator[_Call]:
    """Yield known operators and autograd nodes; all that runs inside one belongs to it, except
    nodes and what a checkpoint recomputes."""
    stack: list[_OpenEvent] = []
    for event in thread:
        while stack and event.start_ns >= stack[-1].event.end_ns:
            stack.pop()
        around = stack[-1] if stack else None
        inside = _open(event, around)
        stack.append(inside)
        owner = inside.owner
        if owner is not None and owner.event is event:
            yield owner
        if owner is not None and event.number:
            owner.numbers.append(event.number)


def _open(event: TraceEvent, around: _OpenEvent | None) -> _OpenEvent:
    owner = around.owner if around is not None else None
    node = around.node if around is not None else None
    is_recomputed = around.is_recomputed if around is not None else False
    starts_recompute = not is_recomputed and is_recomputed_operation(event, node)
    if owner is not None and (starts_recompute or is_node(event)):
        owner.others_ns += event.duration_ns
    if is_node(event):
        return _OpenEvent(event, _Call(event=event, phase=Phase.BACKWARD), event)
    if starts_recompute:
        owner, is_recomputed = None, True
    if owner is None and event.name.removeprefix("aten::") in _KNOWN:
        owner = _Call(event=event, phase=Phase.RECOMPUTE if is_recomputed else Phase.FORWARD)
    return _OpenEvent(event, owner, node, is_recomputed)


def _kernels_of_calls(events: Sequence[TraceEvent]) -> dict[int, list[TracedWork]] | None:
    """Group kernels by the number of the operator that launched them; None without a device."""
    if not any(event.category == KERNEL for event in events):
        return None
    kernels: dict[int, list[TracedWork]] = {}
    for work in device_work(events, frozenset({KERNEL})):
        kernels.setdefault(work.call, []).append(work)
    return kernels


def _time_s(call: _Call, kernels: Mapping[int, list[TracedWork]] | None) -> float:
    if kernels is None:
        return (call.event.duration_ns - call.others_ns) / NS_PER_S
    launched_work = (work for number in call.numbers for work in kernels.get(number, ()))
    return busy_ns(launched_work) / NS_PER_S


def _operator_row(call: _Call, device: str) -> dict[str, Any] | None:
    """Return the columns shared by both phases of a call; None if its shapes were not recorded."""
    known, details = _KNOWN[call.name], call.event.details
    try:
        sizes = known.sizes(details[SHAPES])
        dtype = str(details["Input type"][known.tensor])
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return {
        "device": device,
        "group": call.name.lstrip("_"),
        "kind": known.kind.value,
        "shape": "x".join(map(str, sizes)),
        "element_nbytes": element_nbytes(dtype.removeprefix("c10::"), default=4),
        "tp": None,
        "flag": "" if _is_causal(known, details) else "attention without causal mask",
    }


def _is_causal(known: _Known, details: Mapping[str, Any]) -> bool:
    """True if it is causal or no attention; causal is assumed if the trace does not say."""
    concrete = details.get("Concrete Inputs")
    if known.causal is None or not concrete or known.causal >= len(concrete):
        return True
    return str(concrete[known.causal]).lower() != "false"


def transfer_frame(
    origins: Sequence[KernelOrigin],
    *,
    trace: Mapping[str, Any],
    device: str,
    fabric: str,
    ranks_per_node: int,
) -> pd.DataFrame:
    """Return the transfers of the trace's rank in its order, as ``joined_ranks`` takes them.

    ``ranks_per_node`` determines which ranks of a group share a node.  A kernel is left out if the
    trace does not give its collective, payload or number of ranks.
    """
    info = trace.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    place = {"device": device, "fabric": fabric, "rank": whole_number(info.get("rank", -1))}
    rows = []
    for origin in origins:
        if row := transfer_row(origin, whole_number(info.get("world_size")), ranks_per_node):
            rows.append(row | place | {"time_s": origin.kernel.duration_ns / NS_PER_S})
    return pd.DataFrame(rows, columns=[*COLLECTIVE_COLUMNS, *RANK_COLUMNS])


def transfer_row(origin: KernelOrigin, world: int, ranks_per_node: int) -> dict[str, Any] | None:
    """Return one transfer without its time; None if the trace does not describe one."""
    details = origin.details or {}
    if origin.collective in (None, Collective.OTHER):
        return None
    group_size = whole_number(details.get("Group size"))
    num_ranks = group_size or world
    nbytes = _nbytes(details, origin.collective, num_ranks)
    if num_ranks < 1 or nbytes < 1:
        return None
    return {
        "collective": origin.collective.value,
        "num_ranks": num_ranks,
        "num_nodes": _num_nodes(details, num_ranks, ranks_per_node),
        "nbytes": nbytes,
        "flag": "" if group_size else WORLD_TAKEN,
        "communicator": f"{origin.group} {details.get('Process Group Ranks')}",
        "number": str(details.get("Seq")),
        "world": num_ranks,
    }


def _nbytes(details: Mapping[str, Any], collective: Collective, num_ranks: int) -> int:
    """Return the bytes as nccl-tests counts them; 0 if unknown."""
    side = "Out msg nelems" if collective in _COUNTS_OUTPUT else "In msg nelems"
    if side in details:
        size = element_nbytes(str(details.get("dtype", "")), default=4)
        return whole_number(details[side]) * size
    dims, types = details.get(SHAPES), details.get("Input type")
    if not dims or not types:
        return 0
    nbytes = _num_elements(dims[0]) * element_nbytes(str(types[0]).removeprefix("c10::"), default=0)
    return nbytes * num_ranks if collective is Collective.ALL_GATHER else nbytes


def _num_elements(dims: Any) -> int:
    """Return the size of a tensor, or of all in a list of tensors; 0 if none is recorded.

    >>> _num_elements([2, 3]), _num_elements([[2, 3], [4]]), _num_elements([])
    (6, 10, 0)
    """
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(map(_num_elements, dims))


def _num_nodes(details: Mapping[str, Any], num_ranks: int, ranks_per_node: int) -> int:
    """Return the nodes of the listed ranks; of a block of ranks if that list is incomplete."""
    try:
        ranks = loads(str(details.get("Process Group Ranks", "")))
    except ValueError:
        ranks = []
    if not isinstance(ranks, list) or len(ranks) != num_ranks:
        return -(-num_ranks // ranks_per_node)
    return len({int(rank) // ranks_per_node for rank in ranks})
