"""The two canonical tables, operators and collectives, and the checks of tables in this format.

``recipes/published/FORMAT.md`` describes them for people.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from ..errors import CalibrationError, ConfigError
from ..fit.operator_kinds import KINDS
from ..workload.collectives import Collective
from ..workload.operators import Phase

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
RANK_COLUMNS = ("communicator", "number", "rank", "world")
"""Further columns of one rank's operations; a rank below 0 is unknown."""
CHOSEN = "num_chosen"
"""Column of collectives, only in tables of exchanges that send a token once to each node."""
OPTIONAL_COLUMNS = frozenset({"tp", "flag"})

_PHASES = frozenset(phase.value for phase in Phase)
COLLECTIVES = frozenset(c.value for c in Collective if c is not Collective.OTHER)
NEEDED: Mapping[str, frozenset[str]] = {
    "operators": frozenset(OPERATOR_COLUMNS) - OPTIONAL_COLUMNS,
    "collectives": frozenset(COLLECTIVE_COLUMNS) - OPTIONAL_COLUMNS,
}
MICROSECOND_S = 1e-6
_ELEMENT_NBYTES = {
    **dict.fromkeys(("fp64", "float64", "double", "int64", "long"), 8),
    **dict.fromkeys(("fp32", "float32", "float", "tf32", "int32", "int"), 4),
    **dict.fromkeys(("fp16", "float16", "half", "bf16", "bfloat16", "short"), 2),
    **dict.fromkeys(("fp8", "float8", "int8", "nvfp4", "fp4"), 1),
    **dict.fromkeys(("byte", "char", "bool", "unsigned char", "signed char"), 1),
    "long int": 8,
}
_REMEDY = (
    "columns: recipes/published/FORMAT.md; benchmarks/published/convert.py writes the tables that "
    "others published in them"
)


def read_table(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the operators or collectives of a table in Forerun's format, named by its columns.

    ``name`` is used in errors.  Raise ``ConfigError`` if columns are missing or a row breaks a
    rule, ``CalibrationError`` if there are no rows.
    """
    columns = frozenset(map(str, frame.columns))
    what = next((what for what, needed in NEEDED.items() if columns >= needed), None)
    if not len(frame) and (what or not columns):
        raise CalibrationError(f"{name} has no rows; give a table with measurements")
    if what is None:
        raise unknown_table_error(columns, name, NEEDED)
    return operator_table(frame, name) if what == "operators" else collective_table(frame, name)


def table_kind(table: pd.DataFrame) -> str:
    """Return the kind of a table that was read: operators or collectives."""
    return "operators" if "kind" in table.columns else "collectives"


def unknown_table_error(
    columns: frozenset[str],
    name: str,
    families: Mapping[str, frozenset[str]],
    remedy: str = _REMEDY,
) -> ConfigError:
    """Return an error that names the columns missing for the nearest family.

    ``families`` has the columns that each needs.
    """

    def share(family: str) -> float:
        return len(families[family] & columns) / len(families[family])

    nearest = max(families, key=share)
    lacking = []
    for column in sorted(families[nearest] - columns):
        close = difflib.get_close_matches(column, columns - families[nearest], n=1)
        lacking.append(f"{column} (is {close[0]} meant?)" if close else column)
    message = f"the columns of {name} fit no known table ({', '.join(families)}); nearest is"
    if len(families) == 1:
        message = f"{name} is not a table of"
    return ConfigError(f"{message} {nearest}, which also needs {', '.join(lacking)}; {remedy}")


def operator_table(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of an operator table in our own format, checked and in canonical types.

    Raise ``ConfigError`` for the first row that breaks a rule, by its line in the file (the header
    is line 1); rows with a flag are not used and may break any.
    """
    out = _with_columns(frame, OPERATOR_COLUMNS)
    sizes = {kind.value: law.num_sizes for kind, law in KINDS.items() if law.num_sizes}
    _check_texts(out, ("device", "group"), name)
    _check_choice(out, "kind", sizes, name)
    _check_choice(out, "phase", _PHASES, name)
    _check_shapes(out, sizes, name)
    is_first = out["kind"] == out.groupby(["device", "group"])["kind"].transform("first")
    _check(
        *(out, "kind", is_first, name),
        "is not the kind of earlier rows of its group; a group is one operator",
    )
    _make_whole(out, ("element_nbytes",), name)
    _make_times(out, name)
    out["tp"] = degrees(out["tp"])
    return out


def collective_table(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of a collective table in our own format; errors as in ``operator_table``."""
    out = _with_columns(frame, COLLECTIVE_COLUMNS)
    _check_texts(out, ("device", "fabric"), name)
    _check_choice(out, "collective", COLLECTIVES, name)
    _make_whole(out, ("num_ranks", "num_nodes", "nbytes"), name)
    if CHOSEN in frame.columns:
        out[CHOSEN] = frame[CHOSEN].fillna(0).to_numpy().astype(np.int64)
    _check(
        *(out, "num_nodes", out["num_nodes"] <= out["num_ranks"], name),
        "must not exceed num_ranks; count a node once for all its ranks",
    )
    _make_times(out, name)
    return out


def shape_sizes(shapes: pd.Series) -> np.ndarray:
    """Return the sizes of shape texts of one kind, ``(rows, sizes)`` float.

    >>> shape_sizes(pd.Series(["2x3", "4x5"])).tolist()
    [[2.0, 3.0], [4.0, 5.0]]
    """
    if not len(shapes):
        return np.empty((0, 0))
    return np.array([text.split("x") for text in shapes], dtype=np.float64)


def element_nbytes(name: str, default: int = 2) -> int:
    """Return the bytes of an element of a type (at least 1), ``default`` if its name is unknown.

    >>> [element_nbytes(name) for name in ("bfloat16", "fp8_block", "torch.float32")]
    [2, 1, 4]
    """
    return _ELEMENT_NBYTES.get(name.lower().removeprefix("torch.").split("_")[0], default)


def degrees(values: pd.Series) -> pd.Series:
    """Return degrees as whole numbers; invalid ones are missing values."""
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    return numbers.where((numbers > 0) & (numbers % 1 == 0)).astype("Int64")


def _with_columns(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    out = pd.DataFrame({c: frame[c] if c in frame.columns else pd.NA for c in columns})
    out = out.reset_index(drop=True)
    out["flag"] = out["flag"].astype(object).where(out["flag"].notna(), "").astype(str)
    return out


def _check(
    out: pd.DataFrame, column: str, is_good: pd.Series, name: str, rule: str | pd.Series
) -> None:
    bad = np.flatnonzero(~is_good.to_numpy(dtype=bool) & (out["flag"] == "").to_numpy())
    if len(bad):
        row = int(bad[0])
        rule_text = rule if isinstance(rule, str) else rule.iloc[row]
        raise ConfigError(f"{name} line {row + 2}: {column} {out[column].iloc[row]!r} {rule_text}")


def _check_texts(out: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    for column in columns:
        is_text = out[column].notna() & (out[column].astype(str).str.strip() != "")
        _check(out, column, is_text, name, "must not be empty; give a name")
        out[column] = out[column].astype(str)


def _check_choice(out: pd.DataFrame, column: str, choices: Collection[str], name: str) -> None:
    known = sorted(choices)
    rule = f"is not known; choose from {', '.join(known)}"
    _check(out, column, out[column].isin(known), name, rule)


def _check_shapes(out: pd.DataFrame, num_sizes: Mapping[str, int], name: str) -> None:
    shapes = out["shape"].astype(str)
    rule = "must be whole numbers above 0 joined by x, as 4096x1024"
    _check(out, "shape", shapes.str.fullmatch(r"[1-9]\d*(x[1-9]\d*)*"), name, rule)
    out["shape"] = shapes
    counted, wanted = shapes.str.count("x") + 1, out["kind"].map(dict(num_sizes)).astype("Int64")
    has = "has " + counted.astype(str) + " sizes; " + out["kind"].astype(str) + " has "
    is_right = (counted == wanted).fillna(value=False)
    _check(out, "shape", is_right, name, has + wanted.astype(str) + ", see FORMAT.md")


def _make_whole(out: pd.DataFrame, columns: Sequence[str], name: str) -> None:
    for column in columns:
        numbers = pd.to_numeric(out[column], errors="coerce")
        _check(
            out, column, (numbers > 0) & (numbers % 1 == 0), name, "must be a whole number above 0"
        )
        out[column] = numbers.fillna(0).astype(np.int64)


def _make_times(out: pd.DataFrame, name: str) -> None:
    times_s = pd.to_numeric(out["time_s"], errors="coerce").astype(float)
    rule = "must be a time in seconds above 0; leave rows without one out"
    _check(out, "time_s", (times_s > 0) & (times_s < np.inf), name, rule)
    out["time_s"] = times_s
