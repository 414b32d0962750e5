"""Readers of NeuSight: fp32 products, element-wise operators, traces of training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from json import loads

import pandas as pd

from forerun.benchmarks.published.rows import (
    element_nbytes,
    family,
    numbers,
    operator_rows,
    texts,
    together,
)
from forerun.calib.importers.element_types import MICROSECOND_S
from forerun.calib.workload.operators import OperatorKind, Phase

_VECTOR_KINDS = {
    "ln": OperatorKind.NORM,
    "layernorm": OperatorKind.NORM,
    "layer_norm": OperatorKind.NORM,
    "softmax": OperatorKind.SOFTMAX,
}
"""What is not here reads and writes each element once: ``ELEMENTWISE``."""


def read_gemm(frame: pd.DataFrame) -> pd.DataFrame:
    """Batched products, and linears (``batch`` times ``m`` tokens); true fp32 without TF32."""
    batch = numbers(frame, "batch").fillna(1)
    frame = frame.assign(batch=batch, _tokens=batch * numbers(frame, "m"))
    return together(
        [
            _rows(frame, "linear", OperatorKind.LINEAR, ("_tokens", "k", "n")),
            _rows(frame, "bmm", OperatorKind.BATCHED_PRODUCT, ("batch", "m", "k", "n")),
        ]
    )


def read_vector(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory-bound operators on a matrix; each name is a group."""
    names = dict.fromkeys(texts(frame, "op"))
    kinds = {name: _VECTOR_KINDS.get(name, OperatorKind.ELEMENTWISE) for name in names}
    return together([_rows(frame, name, kind, ("rows", "cols")) for name, kind in kinds.items()])


def _rows(
    frame: pd.DataFrame, name: str, kind: OperatorKind, sizes: tuple[str, ...]
) -> pd.DataFrame:
    """The rows of one operator, forward."""
    rows = frame[texts(frame, "op") == name]
    nbytes = element_nbytes(rows, default=4)
    return operator_rows(rows, kind=kind, group=name, sizes=sizes, nbytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One traced call that is an operator of ours."""

    kind: OperatorKind
    group: str
    sizes: tuple[int, ...]
    has_backward: bool = True


def read_traces(frame: pd.DataFrame) -> pd.DataFrame:
    """Operators of traced models with a shape: products, norms, softmax, element-wise work.

    The device is the first part of ``trace``.  Views, scalars, host calls and embeddings (whose
    vocabulary is not in the table) are left out, as are dropouts without a backward, whose rate is
    0, and the backward of an addition, which only passes the gradient on.  The backward of a linear
    layer is both of its products, without the accumulation of the gradient, which has a column of
    its own.
    """
    calls = [
        _call(target, inputs, output) if dtype.startswith("torch.float") else None
        for target, inputs, output, dtype in zip(
            texts(frame, "target"),
            texts(frame, "input_shapes"),
            texts(frame, "output_shape"),
            texts(frame, "dtype"),
            strict=True,
        )
    ]
    is_idle = (numbers(frame, "bwd_time_us") <= 0).tolist()
    calls = [
        None if call and call.group == _DROPOUT and idle else call
        for call, idle in zip(calls, is_idle, strict=True)
    ]
    forward = _traced(frame, calls, Phase.FORWARD)
    with_gradient = [call if call and call.has_backward else None for call in calls]
    return together([*forward, *_traced(frame, with_gradient, Phase.BACKWARD)])


def _traced(
    frame: pd.DataFrame, calls: Sequence[_Call | None], phase: Phase
) -> Iterator[pd.DataFrame]:
    """The rows of one phase, operator by operator, those with a time."""
    times = numbers(frame, "fwd_time_us" if phase is Phase.FORWARD else "bwd_time_us")
    chosen: dict[tuple[OperatorKind, str], list[tuple[int, _Call]]] = {}
    for row, (call, time_us) in enumerate(zip(calls, times, strict=True)):
        if call and time_us > 0:
            chosen.setdefault((call.kind, call.group), []).append((row, call))
    for (kind, group), members in chosen.items():
        positions = [row for row, _ in members]
        rows = frame.iloc[positions]
        sizes = pd.DataFrame([call.sizes for _, call in members], index=rows.index)
        yield operator_rows(
            rows,
            kind=kind,
            phase=phase,
            group=group,
            device=texts(rows, "trace").str.split("/").str[0],
            sizes=[sizes[c] for c in sizes],
            nbytes=element_nbytes(rows, default=4),
            time_s=times.iloc[positions] * MICROSECOND_S,
        )


_DROPOUT = "dropout"
_ELEMENTWISE = ("gelu", "tanh", "relu", "pow", "mul", "truediv", "sub", "add", "dropout")


def _call(target: str, inputs: str, output: str) -> _Call | None:
    """The operator of a call, None where it is none of ours."""
    shapes, out = _shapes(inputs), _shape(output)
    if not shapes or math.prod(out) <= 1:
        return None
    rows, last = math.prod(out[:-1]), out[-1]
    name = _function_name(target)
    if name is not None:
        return _function(name, shapes, rows, last)
    leaf = target.rsplit(".", 1)[-1].lower()
    if any(part in target.lower() for part in ("embed", "wte", "wpe")) and "norm" not in leaf:
        return _dropout(rows, last) if "drop" in leaf else None
    if "norm" in leaf or leaf.startswith("ln_"):
        return _Call(kind=OperatorKind.NORM, group="layer_norm", sizes=(rows, last))
    if "drop" in leaf:
        return _dropout(rows, last)
    if leaf.startswith("act") or leaf.endswith("act_fn"):
        return _Call(kind=OperatorKind.ELEMENTWISE, group="activation", sizes=(rows, last))
    if "." not in target and leaf != "lm_head":
        return None  # a method of a tensor: size, view, to, ...
    return _Call(kind=OperatorKind.LINEAR, group="linear", sizes=(rows, shapes[0][-1], last))


def _function(name: str, shapes: list[tuple[int, ...]], rows: int, last: int) -> _Call | None:
    if name == "addmm" and len(shapes) == 3:
        return _Call(kind=OperatorKind.LINEAR, group="linear", sizes=(*shapes[1], shapes[2][-1]))
    if name in ("bmm", "matmul") and len(shapes) == 2 and len(shapes[0]) > 2:
        batch, (m, k) = math.prod(shapes[0][:-2]), shapes[0][-2:]
        sizes = (batch, m, k, shapes[1][-1])
        return _Call(kind=OperatorKind.BATCHED_PRODUCT, group="bmm", sizes=sizes)
    if name == "softmax":
        return _Call(kind=OperatorKind.SOFTMAX, group="softmax", sizes=(rows, last))
    if name == "dropout":
        return _dropout(rows, last)
    if name in _ELEMENTWISE:
        return _Call(
            kind=OperatorKind.ELEMENTWISE,
            group=name,
            sizes=(rows, last),
            has_backward=name not in ("add", "sub"),
        )
    return None


def _dropout(rows: int, last: int) -> _Call:
    return _Call(kind=OperatorKind.ELEMENTWISE, group=_DROPOUT, sizes=(rows, last))


def _function_name(target: str) -> str | None:
    """``softmax`` of ``<function softmax at 0x1>``; None for modules and methods."""
    if not target.startswith("<"):
        return None
    words = target.strip("<>").split()
    return next((after for word, after in pairwise(words) if word in _CALLABLES), "")


_CALLABLES = ("function", "method")


def _shapes(text: str) -> list[tuple[int, ...]]:
    try:
        return [tuple(shape) for shape in loads(text)] if text else []
    except (ValueError, TypeError):
        return []


def _shape(text: str) -> tuple[int, ...]:
    inside = text.strip("()[] ,")
    parts = inside.split(",") if inside else []
    return tuple(int(p) for p in parts) if all(p.strip().isdigit() for p in parts) else ()


FAMILIES = (
    family("NeuSight GEMM", "op gpu batch m n k time_us", read_gemm),
    family("NeuSight vector operators", "op gpu rows cols time_us", read_vector),
    family("NeuSight traces", "trace target input_shapes output_shape fwd_time_us", read_traces),
)
