"""Operators and collectives out of a trace of PyTorch's profiler, recorded with shapes.

On a device the time of an operator is that of the kernels which it launched; in a trace without
kernels it is the operator's own.  The backward of an operator is the node of autograd with its
sequence number, all of it.  A kernel of NCCL runs from when its own rank arrives, so that its time
includes waiting for the others: the shortest over the ranks' traces is nearest to the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from typing import Any

import pandas as pd

from ..errors import RecordError
from ..records.kineto_trace import (
    KERNEL,
    MESSAGE_OP,
    SHAPES,
    TraceEvent,
    collective_named,
    device_work,
    from_chrome,
    operations_by_thread,
)
from ..workload.collectives import Collective
from ..workload.operators import OperatorKind, Phase
from .own_format import COLLECTIVE_COLUMNS, MICROSECOND_S, OPERATOR_COLUMNS, element_nbytes

Dims = Sequence[Sequence[int]]
Sizes = Callable[[Dims], tuple[int, ...]]

_NODE = "autograd::engine::evaluate_function: "
_COUNTS_OUTPUT = frozenset({Collective.ALL_GATHER, Collective.RECV})
_NS_PER_US = 1000


def _rows(dims: Dims) -> tuple[int, ...]:
    return (math.prod(dims[0][:-1]), dims[0][-1])


def _attention(dims: Dims) -> tuple[int, ...]:
    (batch, heads, seq, channels), (_, groups, _, _), value = dims[0], dims[1], dims[2]
    return (batch, heads, groups, seq, channels, value[-1])


@dataclass(frozen=True, slots=True)
class _Known:
    """An operator of ATen that is one of ours."""

    kind: OperatorKind
    node: str
    """How the name of its node of autograd begins."""
    sizes: Sizes = _rows
    tensor: int = 0
    """Which input tells the element type."""
    causal: int | None = None
    """Which input says whether attention is causal."""


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
    """One operator or one node of autograd as it ran, and the numbers of all that ran inside."""

    event: TraceEvent
    numbers: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of an operator, as ``_KNOWN`` has it."""
        return self.event.name.removeprefix("aten::")

    @property
    def is_node(self) -> bool:
        """True for a node of autograd."""
        return self.event.name.startswith(_NODE)

    @property
    def sequence(self) -> int | None:
        """What forward and backward of one operator share."""
        return self.event.details.get("Sequence number")


def kineto_operators(trace: Mapping[str, Any], name: str) -> pd.DataFrame:
    """An operator table in our own format, one row for each call, forward and backward.

    ``RecordError`` where the file is no trace, or was recorded without shapes.
    """
    events = _events(trace, name)
    calls = [call for thread in operations_by_thread(events).values() for call in _calls(thread)]
    if not any(SHAPES in call.event.details for call in calls):
        raise RecordError(
            f"{name} holds no operator with shapes; record the trace with record_shapes=True"
        )
    kernels, device = _kernel_times_us(events), _device_name(trace)
    rows, forward = [], {}
    for call in calls:
        row = None if call.is_node else _operator_row(call, device)
        if row is None:
            continue
        if call.sequence is not None:
            forward[call.sequence] = (call, row)
        rows.append(row | {"phase": Phase.FORWARD.value, "time_s": _time_s(call, kernels)})
    for node in (call for call in calls if call.is_node and call.sequence in forward):
        call, row = forward[node.sequence]
        if node.event.name.removeprefix(_NODE).startswith(_KNOWN[call.name].node):
            rows.append(row | {"phase": Phase.BACKWARD.value, "time_s": _time_s(node, kernels)})
    frame = pd.DataFrame(rows, columns=list(OPERATOR_COLUMNS))
    frame["tp"] = frame["tp"].astype("Int64")
    return frame[frame["time_s"] > 0].reset_index(drop=True)


def kineto_collectives(
    trace: Mapping[str, Any], name: str, *, fabric: str, ranks_per_node: int
) -> pd.DataFrame:
    """A collective table in our own format, one row for each kernel of NCCL.

    ``ranks_per_node`` tells which ranks of a group share a node.  A kernel whose payload or group
    the trace does not say is left out.
    """
    events = _events(trace, name)
    calls = {e.number or e.link: e.details for e in events if e.name == MESSAGE_OP and e.details}
    place = {"device": _device_name(trace), "fabric": fabric, "flag": ""}
    rows = []
    for event in events:
        if event.category != KERNEL or not event.name.startswith("nccl"):
            continue
        is_told = "Collective name" in event.details
        details = event.details if is_told else calls.get(event.link, {})
        if row := _collective_row(details, ranks_per_node):
            time_s = event.duration_ns / _NS_PER_US * MICROSECOND_S
            rows.append(row | place | {"time_s": time_s})
    return pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS))


def _events(trace: Mapping[str, Any], name: str) -> list[TraceEvent]:
    found = from_chrome(trace.get("traceEvents") or ()) if isinstance(trace, Mapping) else []
    if not found:
        raise RecordError(f"{name} is not a Chrome trace with events; export it with the profiler")
    return found


def _device_name(trace: Mapping[str, Any]) -> str:
    """The first device of the trace, "cpu" where there is none."""
    properties = trace.get("deviceProperties") or [{}]
    return str(properties[0].get("name", "cpu"))


def _calls(thread: Sequence[TraceEvent]) -> list[_Call]:
    """Known operators and nodes of autograd; what runs inside one belongs to it."""
    found: list[_Call] = []
    for event in thread:
        if not found or event.start_ns >= found[-1].event.end_ns:
            call = _Call(event=event)
            if not call.is_node and call.name not in _KNOWN:
                continue
            found.append(call)
        if event.number:
            found[-1].numbers.append(event.number)
    return found


def _kernel_times_us(events: Sequence[TraceEvent]) -> dict[int, float] | None:
    """Time of kernels by the number of the operator that launched them; None without a device."""
    if not any(event.category == KERNEL for event in events):
        return None
    times: dict[int, float] = {}
    for work in device_work(events, frozenset({KERNEL})):
        times[work.call] = times.get(work.call, 0.0) + work.duration_ns / _NS_PER_US
    return times


def _time_s(call: _Call, kernels_us: Mapping[int, float] | None) -> float:
    if kernels_us is None:
        return call.event.duration_ns / _NS_PER_US * MICROSECOND_S
    return sum(kernels_us.get(number, 0.0) for number in call.numbers) * MICROSECOND_S


def _operator_row(call: _Call, device: str) -> dict[str, Any] | None:
    """What both phases of a call share; None where its shapes were not recorded."""
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
    """True where it is no attention, or a causal one; a trace that does not say is believed."""
    concrete = details.get("Concrete Inputs")
    if known.causal is None or not concrete or known.causal >= len(concrete):
        return True
    return str(concrete[known.causal]).lower() != "false"


def _collective_row(details: Mapping[str, Any], ranks_per_node: int) -> dict[str, Any] | None:
    collective = collective_named(str(details.get("Collective name", "")))
    num_ranks = int(details.get("Group size", 0))
    if collective is Collective.OTHER or num_ranks < 1:
        return None
    side = "Out msg nelems" if collective in _COUNTS_OUTPUT else "In msg nelems"
    nbytes = int(details.get(side, 0)) * element_nbytes(str(details.get("dtype", "")), default=4)
    if nbytes < 1:
        return None
    return {
        "collective": collective.value,
        "num_ranks": num_ranks,
        "num_nodes": _num_nodes(details, num_ranks, ranks_per_node),
        "nbytes": nbytes,
    }


def _num_nodes(details: Mapping[str, Any], num_ranks: int, ranks_per_node: int) -> int:
    """Nodes of the listed ranks; of a block of ranks where the list is missing or cut short."""
    try:
        ranks = loads(str(details.get("Process Group Ranks", "")))
    except ValueError:
        ranks = []
    if not isinstance(ranks, list) or len(ranks) != num_ranks:
        return -(-num_ranks // ranks_per_node)
    return len({int(rank) // ranks_per_node for rank in ranks})
