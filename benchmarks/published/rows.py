"""Convert columns of a published table to canonical rows of operators or of collectives.

Columns may be absent; flags, type names and joined names are read as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from forerun.calib.importers import canonical_tables
from forerun.calib.importers.canonical_tables import (
    COLLECTIVES,
    MICROSECOND_S,
    OPERATOR_COLUMNS,
    degrees,
)
from forerun.calib.workload.operators import OperatorKind, Phase

Operators = Mapping[str, tuple[OperatorKind, str]]
"""Kind and sizes of each published name; sizes are blank-separated columns of a table's terms
(tokens, hidden size, ...)."""
_NOT_SET = frozenset({"", "false", "0", "0.0", "nan", "none", "no", "<na>"})
_SET = frozenset({"true", "1", "1.0", "yes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFamily:
    """Tables that one reader understands, identified by their columns."""

    name: str
    columns: frozenset[str]
    """Required columns."""
    read: Callable[[pd.DataFrame, str], Any]
    """Converts the published frame, given the table's name, to the canonical frame, or to rows for
    step times."""


def family(name: str, columns: str, read: Callable[[pd.DataFrame], pd.DataFrame]) -> TableFamily:
    """Return a family of operators or collectives, with its columns as one text."""
    return TableFamily(
        name=name, columns=frozenset(columns.split()), read=lambda frame, _: read(frame)
    )


def numbers(frame: pd.DataFrame, *names: str) -> pd.Series:
    """Return a column as floats, the first of ``names`` with a value; NaN if there is none."""
    out = pd.Series(np.nan, index=frame.index)
    for name in names:
        if name in frame.columns:
            out = out.fillna(pd.to_numeric(frame[name], errors="coerce").astype(float))
    return out


def texts(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return a column as text; "" if the column or a value is missing."""
    if name not in frame.columns:
        return pd.Series("", index=frame.index, dtype=object)
    values = frame[name]
    return values.astype(object).where(values.notna(), "").astype(str)


def joined(frame: pd.DataFrame, *names: str) -> pd.Series:
    """Return the non-empty texts of several columns, joined by a blank."""
    out = pd.Series("", index=frame.index, dtype=object)
    for name in names:
        out = (out + " " + texts(frame, name)).str.strip()
    return out


def flags(frame: pd.DataFrame, *, skip: str = "") -> pd.Series:
    """Return why a row is not usable, "" if it is.

    Uses every column whose name marks bad rows: ``flag``, ``*_flag``, ``EXCLUDE*``, ``*mismatch*``
    and ``same_*`` (a copy of other rows).  A boolean value gives the column's name.
    """
    out = pd.Series("", index=frame.index, dtype=object)
    for name in (str(c) for c in frame.columns if c != skip and _is_mark(str(c).lower())):
        text = texts(frame, name).str.strip()
        low = text.str.lower()
        text = text.where(~low.isin(_SET), name)
        out = out.where(low.isin(_NOT_SET), out.where(out == "", out + "; ") + text)
    return out


def element_nbytes(frame: pd.DataFrame, name: str = "dtype", default: int = 2) -> pd.Series:
    """Return bytes of one element (at least 1), from a column of type names."""
    sizes = texts(frame, name).map(lambda text: canonical_tables.element_nbytes(text, default))
    return sizes.astype(np.int64)


def together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return parts made by ``operator_rows`` as one table."""
    filled = [part for part in parts if len(part)]
    if not filled:
        return pd.DataFrame(columns=list(OPERATOR_COLUMNS))
    return pd.concat(filled, ignore_index=True)


def named_rows(
    frame: pd.DataFrame,
    operators: Operators,
    terms: pd.DataFrame,
    *,
    names: pd.Series,
    times_us: Mapping[Phase, str],
    group: pd.Series | None = None,
) -> pd.DataFrame:
    """Return rows of each known operator in turn, by phase; ``names`` has each row's operator.

    If ``gemm_m``, ``gemm_k`` and ``gemm_n`` are published, they precede a product's terms.
    """
    parts = []
    for name, (kind, columns) in operators.items():
        rows = frame[names == name]
        sizes = [terms.loc[rows.index, column] for column in columns.split()]
        if kind.is_linear:
            published = [numbers(rows, f"gemm_{side}") for side in "mkn"]
            sizes = [one.fillna(size) for one, size in zip(published, sizes, strict=True)]
        for phase, column in times_us.items() if len(rows) else ():
            part = operator_rows(
                rows,
                kind=kind,
                phase=phase,
                group=name if group is None else group.loc[rows.index],
                sizes=sizes,
                time_s=numbers(rows, column) * MICROSECOND_S,
                tp=numbers(rows, "tp"),
            )
            parts.append(part)
    return together(parts)


def operator_rows(
    frame: pd.DataFrame,
    *,
    kind: OperatorKind,
    phase: Phase = Phase.FORWARD,
    group: pd.Series | str,
    device: pd.Series | str = "gpu",
    sizes: Sequence[pd.Series | str],
    nbytes: pd.Series | int | None = None,
    time_s: pd.Series | None = None,
    tp: pd.Series | None = None,
) -> pd.DataFrame:
    """Return canonical operator rows, one for each row of ``frame`` (all series have its index).

    ``device`` and ``sizes`` may name columns; the defaults are elements of ``dtype`` and times of
    ``time_us``.  A row that lacks a size or a time, or whose sizes are not whole numbers (heads
    that ``tp`` does not divide), is kept with a flag that says so.
    """
    columns = [numbers(frame, size) if isinstance(size, str) else size for size in sizes]
    values = np.column_stack([size.to_numpy(dtype=np.float64) for size in columns])
    is_good = np.isfinite(values) & (values > 0) & (np.round(values) == values)
    is_whole = np.asarray(is_good.all(axis=1))
    shapes = ["x".join(map(str, row)) for row in np.where(is_whole[:, None], values, 0).astype(int)]
    places = texts(frame, device) if isinstance(device, str) else device
    out = pd.DataFrame(
        {
            "device": places.replace("", "unknown"),
            "group": group,
            "kind": kind.value,
            "phase": phase.value,
            "shape": shapes,
            "element_nbytes": element_nbytes(frame) if nbytes is None else nbytes,
            "time_s": numbers(frame, "time_us") * MICROSECOND_S if time_s is None else time_s,
            "tp": degrees(tp if tp is not None else pd.Series(np.nan, index=frame.index)),
            "flag": flags(frame, skip="bwd_flag" if phase is Phase.FORWARD else ""),
        },
        index=frame.index,
    )
    add_flag(out, ~is_whole, "sizes are missing or not whole")
    return _without_bad_times(out)


def collective_rows(
    frame: pd.DataFrame,
    *,
    device: str = "gpu",
    fabric: pd.Series,
    collective: pd.Series,
    nbytes: pd.Series,
    time_s: pd.Series,
) -> pd.DataFrame:
    """Return canonical collective rows, one for each row of ``frame``; a row without payload, time
    or ``ranks`` is kept with a flag.  Without ``nodes`` it follows from the ranks per node, else it
    is one."""
    ranks, per_node = numbers(frame, "ranks"), numbers(frame, "ranks_per_node")
    nodes = numbers(frame, "nodes").fillna(np.ceil(ranks / per_node.where(per_node > 0))).fillna(1)
    counts = {"num_ranks": ranks, "num_nodes": nodes, "nbytes": nbytes.astype(float)}
    is_known = np.logical_and.reduce([np.isfinite(s) & (s > 0) for s in counts.values()])
    out = pd.DataFrame(
        {
            "device": texts(frame, device).replace("", "unknown"),
            "fabric": fabric.replace("", "unknown"),
            "collective": collective,
            **{name: s.where(is_known, 0).round().astype(np.int64) for name, s in counts.items()},
            "time_s": time_s,
            "flag": flags(frame),
        },
        index=frame.index,
    )
    add_flag(out, ~is_known, "payload or ranks are missing or 0")
    add_flag(out, ~out["collective"].isin(COLLECTIVES), "not a collective we model")
    return _without_bad_times(out).reset_index(drop=True)


def add_flag(frame: pd.DataFrame, is_bad: np.ndarray | pd.Series, text: str) -> None:
    """Append ``text`` to the flag of the rows of a mask, in place."""
    rows = np.asarray(is_bad, dtype=bool)
    old = frame.loc[rows, "flag"]
    frame.loc[rows, "flag"] = old.where(old == "", old + "; ") + text


def _without_bad_times(out: pd.DataFrame) -> pd.DataFrame:
    out["time_s"] = pd.to_numeric(out["time_s"], errors="coerce").astype(float)
    is_bad = ~(np.isfinite(out["time_s"]) & (out["time_s"] > 0))
    add_flag(out, is_bad, "no time")
    return out


def _is_mark(low: str) -> bool:
    return (
        low in ("flag", "flags")
        or low.endswith(("_flag", "_flags"))
        or low.startswith(("exclude", "same_"))
        or "mismatch" in low
    )
