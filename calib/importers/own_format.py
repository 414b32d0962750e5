"""The two canonical tables, operators and collectives, and the checks of tables written in them.

``recipes/published/FORMAT.md`` is their description for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..errors import ConfigError
from ..fit.operator_kinds import KINDS
from ..workload.collectives import Collective
from ..workload.operators import OperatorKind, Phase

OPERATOR_COLUMNS = (
    "device",
    "group",
    "kind",
    "phase",
    "shape",
    "element_nbytes",
    "time_s",
    "tp",
    "flag",
)
COLLECTIVE_COLUMNS = (
    "device",
    "fabric",
    "collective",
    "num_ranks",
    "num_nodes",
    "nbytes",
    "time_s",
    "flag",
)
OPTIONAL_COLUMNS = frozenset({"tp", "flag"})

_PHASES = frozenset(phase.value for phase in Phase)
_COLLECTIVES = frozenset(c.value for c in Collective if c is not Collective.OTHER)


def operator_table(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of an operator table in our own format, checked and in canonical types.

    ``ConfigError`` names the first row that breaks a rule, by its line in the file (the header is
    line 1).
    """
    out = _with_columns(frame, OPERATOR_COLUMNS, name)
    _check_texts(out, ("device", "group"), name)
    kinds = {kind.value: law.num_sizes for kind, law in KINDS.items() if law.num_sizes}
    _check_choice(out["kind"], frozenset(kinds), name)
    _check_choice(out["phase"], _PHASES, name)
    _check_shapes(out, kinds, name)
    _check(
        out["kind"] == out.groupby(["device", "group"])["kind"].transform("first"),
        out["kind"],
        "is not the kind of earlier rows of its group; a group is one operator",
        name,
    )
    out["element_nbytes"] = _whole_numbers(out["element_nbytes"], "a whole number above 0", name)
    out["time_s"] = _times(out["time_s"], name)
    out["tp"] = _degrees(out["tp"])
    return out


def collective_table(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of a collective table in our own format; errors as in ``operator_table``."""
    out = _with_columns(frame, COLLECTIVE_COLUMNS, name)
    _check_texts(out, ("device", "fabric"), name)
    _check_choice(out["collective"], _COLLECTIVES, name)
    for column in ("num_ranks", "num_nodes", "nbytes"):
        out[column] = _whole_numbers(out[column], "a whole number above 0", name)
    _check(
        out["num_nodes"] <= out["num_ranks"],
        out["num_nodes"],
        "must not exceed num_ranks; count a node once for all its ranks",
        name,
    )
    out["time_s"] = _times(out["time_s"], name)
    return out


def shape_sizes(shapes: pd.Series) -> np.ndarray:
    """The sizes of shape texts of one kind, ``(rows, sizes)`` float.

    >>> shape_sizes(pd.Series(["2x3", "4x5"])).tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    if not len(shapes):
        return np.empty((0, 0))
    return np.array([text.split("x") for text in shapes], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFamily:
    """Tables that one reader understands, known by their columns."""

    name: str
    columns: frozenset[str]
    """All of these have to be there."""
    read: Callable[[pd.DataFrame], pd.DataFrame]
    """From the published frame to the canonical one."""


def canonical_operators(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Parts made by ``operator_rows`` as one table."""
    if not parts:
        return pd.DataFrame(columns=list(OPERATOR_COLUMNS))
    return pd.concat(parts, ignore_index=True)


def operator_rows(
    frame: pd.DataFrame,
    *,
    kind: OperatorKind,
    phase: Phase,
    group: pd.Series | str,
    device: pd.Series,
    sizes: Sequence[pd.Series | float],
    element_nbytes: pd.Series | int,
    time_s: pd.Series,
    flag: pd.Series,
    tp: pd.Series | None = None,
) -> pd.DataFrame:
    """Canonical operator rows, one for each row of ``frame`` (all series have its index).

    A row that lacks a size or a time, or whose sizes are not whole numbers (heads that ``tp`` does
    not divide), stays in the table with a flag that says so.
    """
    values = np.column_stack([np.broadcast_to(_floats(s), (len(frame),)) for s in sizes])
    is_good = np.isfinite(values) & (values > 0) & (np.round(values) == values)
    is_whole = np.asarray(is_good.all(axis=1))
    texts = ["x".join(map(str, row)) for row in np.where(is_whole[:, None], values, 0).astype(int)]
    out = pd.DataFrame(
        {
            "device": device.replace("", "unknown"),
            "group": group,
            "kind": kind.value,
            "phase": phase.value,
            "shape": texts,
            "element_nbytes": element_nbytes,
            "time_s": time_s,
            "tp": _degrees(tp if tp is not None else pd.Series(np.nan, index=frame.index)),
            "flag": flag,
        },
        index=frame.index,
    )
    add_flag(out, ~is_whole, "sizes are missing or not whole")
    return _without_bad_times(out)


def collective_rows(
    frame: pd.DataFrame,
    *,
    device: pd.Series,
    fabric: pd.Series,
    collective: pd.Series,
    num_ranks: pd.Series,
    num_nodes: pd.Series,
    nbytes: pd.Series,
    time_s: pd.Series,
    flag: pd.Series,
) -> pd.DataFrame:
    """Canonical collective rows, one for each row of ``frame``; a row without payload, time or
    a number of ranks stays with a flag."""
    counts = {
        name: pd.to_numeric(series, errors="coerce").astype(float)
        for name, series in (("num_ranks", num_ranks), ("num_nodes", num_nodes), ("nbytes", nbytes))
    }
    is_known = np.logical_and.reduce([np.isfinite(s) & (s > 0) for s in counts.values()])
    out = pd.DataFrame(
        {
            "device": device.replace("", "unknown"),
            "fabric": fabric.replace("", "unknown"),
            "collective": collective,
            **{name: s.where(is_known, 0).round().astype(np.int64) for name, s in counts.items()},
            "time_s": time_s,
            "flag": flag,
        },
        index=frame.index,
    )
    add_flag(out, ~is_known, "payload or ranks are missing or 0")
    add_flag(out, ~out["collective"].isin(sorted(_COLLECTIVES)), "not a collective we model")
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


def _degrees(values: pd.Series) -> pd.Series:
    degrees = pd.to_numeric(values, errors="coerce").astype(float)
    return degrees.where((degrees > 0) & (degrees % 1 == 0)).astype("Int64")


def _floats(values: pd.Series | float) -> np.ndarray:
    return np.asarray(pd.to_numeric(values, errors="coerce"), dtype=np.float64)


def _with_columns(frame: pd.DataFrame, columns: Sequence[str], name: str) -> pd.DataFrame:
    missing = [c for c in columns if c not in frame.columns and c not in OPTIONAL_COLUMNS]
    if missing:
        raise ConfigError(f"{name} lacks {', '.join(missing)}; add the columns of FORMAT.md")
    out = pd.DataFrame({c: frame[c] if c in frame.columns else pd.NA for c in columns})
    out = out.reset_index(drop=True)
    out["flag"] = out["flag"].astype(object).where(out["flag"].notna(), "").astype(str)
    return out


def _check(is_good: pd.Series, values: pd.Series, rule: str, name: str) -> None:
    bad = np.flatnonzero(~is_good.to_numpy(dtype=bool))
    if len(bad):
        row = int(bad[0])
        raise ConfigError(f"{name} line {row + 2}: {values.name} {values.iloc[row]!r} {rule}")


def _check_texts(out: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    for column in columns:
        is_text = out[column].notna() & (out[column].astype(str).str.strip() != "")
        _check(is_text, out[column], "must not be empty; give a name", name)
        out[column] = out[column].astype(str)


def _check_choice(values: pd.Series, choices: frozenset[str], name: str) -> None:
    known = values.isin(sorted(choices))
    _check(known, values, f"is none of {', '.join(sorted(choices))}", name)


def _check_shapes(out: pd.DataFrame, num_sizes: dict[str, int], name: str) -> None:
    shapes = out["shape"].astype(str)
    is_text = shapes.str.fullmatch(r"[1-9]\d*(x[1-9]\d*)*")
    _check(is_text, out["shape"], "must be whole numbers above 0 joined by x, as 4096x1024", name)
    wanted = out["kind"].map(num_sizes)
    counted = shapes.str.count("x") + 1
    bad = np.flatnonzero((counted != wanted).to_numpy())
    if len(bad):
        row = int(bad[0])
        raise ConfigError(
            f"{name} line {row + 2}: shape {shapes.iloc[row]!r} has {counted.iloc[row]} sizes; "
            f"{out['kind'].iloc[row]} has {wanted.iloc[row]}, see FORMAT.md"
        )
    out["shape"] = shapes


def _whole_numbers(values: pd.Series, rule: str, name: str) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce")
    _check(numbers.notna() & (numbers > 0) & (numbers % 1 == 0), values, f"must be {rule}", name)
    return numbers.astype(np.int64)


def _times(values: pd.Series, name: str) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    rule = "must be a time in seconds above 0; leave rows without one out"
    _check((numbers > 0) & (numbers < np.inf), values, rule, name)
    return numbers
