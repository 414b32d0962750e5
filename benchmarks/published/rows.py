"""From the columns of a published table to canonical rows of operators or of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from forerun.benchmarks.published.columns import element_nbytes, flags, numbers, texts
from forerun.calib.importers.element_types import MICROSECOND_S
from forerun.calib.importers.own_format import COLLECTIVES, OPERATOR_COLUMNS, degrees
from forerun.calib.workload.operators import OperatorKind, Phase

Sizes = Callable[[pd.DataFrame], Sequence[pd.Series]]
"""From the terms of some rows (tokens, hidden size, ...) to the sizes of their operator."""
Operators = Mapping[str, tuple[OperatorKind, Sizes]]
"""What each published name computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFamily:
    """Tables that one reader understands, known by their columns."""

    name: str
    columns: frozenset[str]
    """All of these have to be there."""
    read: Callable[[pd.DataFrame], pd.DataFrame]
    """From the published frame to the canonical one."""


def family(name: str, columns: str, read: Callable[[pd.DataFrame], pd.DataFrame]) -> TableFamily:
    """A family by its columns, as one text."""
    return TableFamily(name=name, columns=frozenset(columns.split()), read=read)


def together(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Parts made by ``operator_rows`` as one table."""
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
) -> Iterator[pd.DataFrame]:
    """Rows of each known operator in turn, phase by phase; ``names`` says which each row is of."""
    for name, (kind, sizes) in operators.items():
        rows = frame[names == name]
        for phase, column in times_us.items() if len(rows) else ():
            yield operator_rows(
                rows,
                kind=kind,
                phase=phase,
                group=name if group is None else group.loc[rows.index],
                sizes=sizes(terms.loc[rows.index]),
                time_s=numbers(rows, column) * MICROSECOND_S,
                tp=numbers(rows, "tp"),
            )


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
    """Canonical operator rows, one for each row of ``frame`` (all series have its index).

    ``device`` and ``sizes`` may name columns; elements are those of ``dtype`` and times those of
    ``time_us`` where nothing else is given.  A row that lacks a size or a time, or whose sizes are
    not whole numbers (heads that ``tp`` does not divide), stays with a flag that says so.
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
    """Canonical collective rows, one for each row of ``frame``; a row without payload, time or
    ``ranks`` stays with a flag.  Without ``nodes`` the ranks per node tell them, else it is one."""
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
