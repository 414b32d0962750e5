"""Readers of NeuSight: fp32 products, element-wise operators, traces of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from forerun.calib.importers.canonical_tables import MICROSECOND_S
from forerun.calib.workload.operators import OperatorKind, Phase

_KINDS = {
    "linear": OperatorKind.LINEAR,
    "bmm": OperatorKind.BATCHED_PRODUCT,
    "ln": OperatorKind.NORM,
    "layernorm": OperatorKind.NORM,
    "layer_norm": OperatorKind.NORM,
    "softmax": OperatorKind.SOFTMAX,
}
"""Kinds by name; other operators read and write each element once: ``ELEMENTWISE``."""


def read_gemm(frame: pd.DataFrame) -> pd.DataFrame:
    """Read batched products, and linears (``batch`` times ``m`` tokens); true fp32 without TF32."""
    batch = numbers(frame, "batch").fillna(1)
    frame = frame.assign(batch=batch, _tokens=batch * numbers(frame, "m"))
    return together(
        [
            _rows(frame, "linear", ("_tokens", "k", "n")),
            _rows(frame, "bmm", ("batch", "m", "k", "n")),
        ]
    )


def read_vector(frame: pd.DataFrame) -> pd.DataFrame:
    """Read memory-bound operators on a matrix; each name is a group."""
    names = dict.fromkeys(texts(frame, "op"))
    return together([_rows(frame, name, ("rows", "cols")) for name in names])


def _rows(frame: pd.DataFrame, name: str, sizes: tuple[str, ...]) -> pd.DataFrame:
    """Return the rows of one operator, forward."""
    rows = frame[texts(frame, "op") == name]
    kind = _KINDS.get(name, OperatorKind.ELEMENTWISE)
    nbytes = element_nbytes(rows, default=4)
    return operator_rows(rows, kind=kind, group=name, sizes=sizes, nbytes=nbytes)


def read_traces(frame: pd.DataFrame) -> pd.DataFrame:
    """Read operators of traced models with a shape: products, norms, softmax, element-wise work.

    The device is the first part of ``trace``.  Skipped are views, scalars, host calls and
    embeddings (whose vocabulary is not in the table), as well as dropouts without a backward, whose
    rate is 0, and the backward of an addition, which only passes the gradient on.  The backward of
    a linear layer is both of its products, without the accumulation of the gradient, which has a
    column of its own.
    """
    columns = [texts(frame, name) for name in ("target", "input_shapes", "output_shape", "dtype")]
    calls = [
        _call(target, inputs, output) if dtype.startswith("torch.float") else ("", ())
        for target, inputs, output, dtype in zip(*columns, strict=True)
    ]
    traced_calls = pd.DataFrame(calls, columns=["group", "sizes"], index=frame.index)
    is_idle = (traced_calls["group"] == _DROPOUT) & (numbers(frame, "bwd_time_us") <= 0)
    traced_calls = traced_calls[(traced_calls["group"] != "") & ~is_idle]
    with_gradient = traced_calls[~traced_calls["group"].isin(_PASSED_ON)]
    forward = _traced(frame, traced_calls, Phase.FORWARD, "fwd_time_us")
    return together([*forward, *_traced(frame, with_gradient, Phase.BACKWARD, "bwd_time_us")])


def _traced(
    frame: pd.DataFrame, traced_calls: pd.DataFrame, phase: Phase, column: str
) -> Iterator[pd.DataFrame]:
    """Yield the rows of one phase with a time, operator by operator."""
    times = numbers(frame, column)
    for group, calls in traced_calls[times[traced_calls.index] > 0].groupby("group", sort=False):
        rows = frame.loc[calls.index]
        sizes = pd.DataFrame(calls["sizes"].tolist(), index=rows.index)
        yield operator_rows(
            rows,
            kind=_KINDS.get(str(group), OperatorKind.ELEMENTWISE),
            phase=phase,
            group=str(group),
            device=texts(rows, "trace").str.split("/").str[0],
            sizes=[sizes[c] for c in sizes],
            nbytes=element_nbytes(rows, default=4),
            time_s=times.loc[rows.index] * MICROSECOND_S,
        )


_DROPOUT = "dropout"
_ELEMENTWISE = ("gelu", "tanh", "relu", "pow", "mul", "truediv", "sub", "add", _DROPOUT)
_PASSED_ON = ("add", "sub")
"""Operators whose backward only passes the gradient on."""
_Call = tuple[str, tuple[int, ...]]
"""Group and sizes of a traced call; the group is "" if it is not one of our operators."""


def _call(target: str, inputs: str, output: str) -> _Call:
    shapes, out = _shapes(inputs), _shape(output)
    if not shapes or math.prod(out) <= 1:
        return "", ()
    matrix = (math.prod(out[:-1]), out[-1])
    name = _function_name(target)
    if name is not None:
        return _function(name, shapes, matrix)
    leaf = target.rsplit(".", 1)[-1].lower()
    if any(part in target.lower() for part in ("embed", "wte", "wpe")) and "norm" not in leaf:
        return (_DROPOUT, matrix) if "drop" in leaf else ("", ())
    if "norm" in leaf or leaf.startswith("ln_"):
        return "layer_norm", matrix
    if "drop" in leaf:
        return _DROPOUT, matrix
    if leaf.startswith("act") or leaf.endswith("act_fn"):
        return "activation", matrix
    if "." not in target and leaf != "lm_head":
        return "", ()  # a method of a tensor: size, view, to, ...
    return "linear", (matrix[0], shapes[0][-1], matrix[1])


def _function(name: str, shapes: list[tuple[int, ...]], matrix: tuple[int, int]) -> _Call:
    if name == "addmm" and len(shapes) == 3:
        return "linear", (*shapes[1], shapes[2][-1])
    if name in ("bmm", "matmul") and len(shapes) == 2 and len(shapes[0]) > 2:
        return "bmm", (math.prod(shapes[0][:-2]), *shapes[0][-2:], shapes[1][-1])
    return (name, matrix) if name == "softmax" or name in _ELEMENTWISE else ("", ())


def _function_name(target: str) -> str | None:
    """Return ``softmax`` of ``<function softmax at 0x1>``; None for modules and methods."""
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
