"""Operators out of a trace of PyTorch's profiler (Kineto, Chrome format, recorded with shapes).

On a device the time of an operator is that of the kernels which it launched; in a trace without
kernels it is the operator's own.  The backward of an operator is the node of autograd with its
sequence number, all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ..errors import RecordError
from ..workload.operators import OperatorKind, Phase
from .element_types import MICROSECOND_S, element_nbytes
from .own_format import OPERATOR_COLUMNS

Event = Mapping[str, Any]
Dims = Sequence[Sequence[int]]

_NODE = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An operator of ATen that is one of ours."""

    kind: OperatorKind
    sizes: Callable[[Dims], tuple[int, ...]]
    node: str
    """How the name of its node of autograd begins."""
    tensor: int = 0
    """Which input tells the element type."""
    causal: int | None = None
    """Which input says whether attention is causal."""


def _rows(dims: Dims) -> tuple[int, ...]:
    return (math.prod(dims[0][:-1]), dims[0][-1])


def _attention(dims: Dims) -> tuple[int, ...]:
    (batch, heads, seq, channels), (_, groups, _, _), value = dims[0], dims[1], dims[2]
    return (batch, heads, groups, seq, channels, value[-1])


_KNOWN = {
    "mm": _Known(kind=OperatorKind.LINEAR, sizes=lambda d: (*d[0], d[1][1]), node="MmBackward"),
    "addmm": _Known(
        kind=OperatorKind.LINEAR, sizes=lambda d: (*d[1], d[2][1]), node="AddmmBackward", tensor=1
    ),
    "bmm": _Known(
        kind=OperatorKind.BATCHED_PRODUCT, sizes=lambda d: (*d[0], d[1][2]), node="BmmBackward"
    ),
    "baddbmm": _Known(
        kind=OperatorKind.BATCHED_PRODUCT,
        sizes=lambda d: (*d[1], d[2][2]),
        node="BaddbmmBackward",
        tensor=1,
    ),
    "native_layer_norm": _Known(
        kind=OperatorKind.NORM, sizes=_rows, node="NativeLayerNormBackward"
    ),
    "_fused_rms_norm": _Known(kind=OperatorKind.NORM, sizes=_rows, node="FusedRmsNormBackward"),
    "_softmax": _Known(kind=OperatorKind.SOFTMAX, sizes=_rows, node="SoftmaxBackward"),
    "gelu": _Known(kind=OperatorKind.ELEMENTWISE, sizes=_rows, node="GeluBackward"),
    "silu": _Known(kind=OperatorKind.ELEMENTWISE, sizes=_rows, node="SiluBackward"),
    "native_dropout": _Known(
        kind=OperatorKind.ELEMENTWISE, sizes=_rows, node="NativeDropoutBackward"
    ),
    "embedding": _Known(
        kind=OperatorKind.EMBEDDING,
        sizes=lambda d: (math.prod(d[1]), d[0][1], d[0][0]),
        node="EmbeddingBackward",
    ),
    **{
        name: _Known(
            kind=OperatorKind.FLASH_ATTENTION,
            sizes=_attention,
            node="ScaledDotProduct",
            causal=causal,
        )
        for name, causal in (
            ("_scaled_dot_product_flash_attention", 4),
            ("_scaled_dot_product_flash_attention_for_cpu", 4),
            ("_scaled_dot_product_efficient_attention", 6),
            ("_scaled_dot_product_cudnn_attention", 6),
        )
    },
}


@dataclass(slots=True, kw_only=True)
class _Call:
    """One operator or one node of autograd as it ran, and what it launched."""

    name: str
    event: Event
    external_ids: list[int] = field(default_factory=list)

    @property
    def sequence(self) -> int | None:
        """What forward and backward of one operator share."""
        return self.event.get("args", {}).get("Sequence number")

    @property
    def is_node(self) -> bool:
        """True for a node of autograd."""
        return self.name.startswith(_NODE)


def kineto_operators(trace: Mapping[str, Any], name: str) -> pd.DataFrame:
    """An operator table in our own format, one row for each call, forward and backward.

    ``RecordError`` where the file is no trace, or was recorded without shapes.
    """
    events = trace_events(trace, name)
    calls = [call for thread in _threads(events) for call in _calls(thread)]
    if not any("Input Dims" in call.event.get("args", {}) for call in calls):
        raise RecordError(
            f"{name} holds no operator with shapes; record the trace with record_shapes=True"
        )
    kernels = _kernel_times(events)
    device = device_name(trace)
    rows, forward = [], {}
    for call in calls:
        if call.is_node:
            continue
        row = _row(call, device)
        if row is None:
            continue
        if call.sequence is not None:
            forward[call.sequence] = (call, row)
        rows.append(row | {"phase": Phase.FORWARD.value, "time_s": _time_s(call, kernels)})
    for node in calls:
        call, row = forward.get(node.sequence, (None, None)) if node.is_node else (None, None)
        if call is None or row is None or not _belongs(node, call):
            continue
        rows.append(row | {"phase": Phase.BACKWARD.value, "time_s": _time_s(node, kernels)})
    frame = pd.DataFrame(rows, columns=list(OPERATOR_COLUMNS))
    frame["tp"] = frame["tp"].astype("Int64")
    return frame[frame["time_s"] > 0].reset_index(drop=True)


def trace_events(trace: Mapping[str, Any], name: str) -> list[Event]:
    """The events with a duration; ``RecordError`` where the file has none."""
    events = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    found = [e for e in events or () if e.get("ph") == "X" and "dur" in e]
    if not found:
        raise RecordError(f"{name} is not a Chrome trace with events; export it with the profiler")
    return found


def device_name(trace: Mapping[str, Any]) -> str:
    """The first device of the trace, "cpu" where there is none."""
    properties = trace.get("deviceProperties") or [{}]
    return str(properties[0].get("name", "cpu"))


def external_id(event: Event) -> int | None:
    """What links a kernel to the operator that launched it."""
    args = event.get("args", {})
    return args.get("External id", args.get("external id"))


def _threads(events: Iterable[Event]) -> Iterable[list[Event]]:
    """Operators of each thread, parents before children."""
    threads: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for members in threads.values():
        yield sorted(members, key=lambda e: (e["ts"], -e["dur"]))


def _calls(thread: Sequence[Event]) -> list[_Call]:
    """Known operators and nodes of autograd; what runs inside one belongs to it."""
    found: list[_Call] = []
    current, end = None, -math.inf
    for event in thread:
        if event["ts"] >= end:
            current = None
        if current is None:
            name = str(event["name"])
            if not name.startswith(_NODE) and name.removeprefix("aten::") not in _KNOWN:
                continue
            current, end = _Call(name=name, event=event), event["ts"] + event["dur"]
            found.append(current)
        identity = external_id(event)
        if identity is not None:
            current.external_ids.append(identity)
    return found


def _kernel_times(events: Iterable[Event]) -> dict[int, float] | None:
    """Microseconds of kernels by the operator that launched them; None without a device."""
    launched_by = {
        event["args"]["correlation"]: external_id(event)
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "hip_runtime")
        and "correlation" in event.get("args", {})
    }
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        return None
    times: dict[int, float] = {}
    for kernel in kernels:
        identity = external_id(kernel)
        if identity is None:
            identity = launched_by.get(kernel.get("args", {}).get("correlation"))
        if identity is not None:
            times[identity] = times.get(identity, 0.0) + kernel["dur"]
    return times


def _time_s(call: _Call, kernels: Mapping[int, float] | None) -> float:
    if kernels is None:
        return call.event["dur"] * MICROSECOND_S
    return sum(kernels.get(identity, 0.0) for identity in call.external_ids) * MICROSECOND_S


def _row(call: _Call, device: str) -> dict[str, Any] | None:
    """What both phases of a call share; None where its shapes were not recorded."""
    name = call.name.removeprefix("aten::")
    known, args = _KNOWN[name], call.event.get("args", {})
    try:
        sizes = known.sizes(args["Input Dims"])
        dtype = str(args["Input type"][known.tensor])
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    return {
        "device": device,
        "group": name.lstrip("_"),
        "kind": known.kind.value,
        "shape": "x".join(map(str, sizes)),
        "element_nbytes": element_nbytes(dtype.removeprefix("c10::"), default=4),
        "tp": None,
        "flag": "" if _is_causal(known, args) else "attention without causal mask",
    }


def _is_causal(known: _Known, args: Mapping[str, Any]) -> bool:
    """True where it is no attention, or a causal one; a trace that does not say is believed."""
    concrete = args.get("Concrete Inputs")
    if known.causal is None or not concrete or known.causal >= len(concrete):
        return True
    return str(concrete[known.causal]).lower() != "false"


def _belongs(node: _Call, call: _Call) -> bool:
    known = _KNOWN[call.name.removeprefix("aten::")]
    return node.name.removeprefix(_NODE).startswith(known.node)
