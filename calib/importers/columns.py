"""What the readers have in common: columns that may be absent, flags, element sizes, groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

MICROSECOND_S = 1e-6

_DTYPE_NBYTES = {
    "fp64": 8,
    "float64": 8,
    "double": 8,
    "fp32": 4,
    "float32": 4,
    "float": 4,
    "tf32": 4,
    "int64": 8,
    "int32": 4,
    "fp16": 2,
    "float16": 2,
    "half": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "float8": 1,
    "int8": 1,
    "nvfp4": 1,
    "fp4": 1,
}
_NOT_SET = frozenset({"", "false", "0", "0.0", "nan", "none", "no", "<na>"})


def numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    """A column as floats; NaN where the column or a value is missing."""
    if name not in frame.columns:
        return pd.Series(np.nan, index=frame.index)
    return pd.to_numeric(frame[name], errors="coerce").astype(float)


def texts(frame: pd.DataFrame, name: str) -> pd.Series:
    """A column as texts; "" where the column or a value is missing."""
    if name not in frame.columns:
        return pd.Series("", index=frame.index, dtype=object)
    values = frame[name]
    return values.astype(object).where(values.notna(), "").astype(str)


def joined(frame: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    """The non-empty texts of several columns with a blank between them."""
    out = pd.Series("", index=frame.index, dtype=object)
    for name in names:
        out = (out + " " + texts(frame, name)).str.strip()
    return out


def flags(frame: pd.DataFrame, *, skip: Sequence[str] = ()) -> pd.Series:
    """Why a row is not to be used, "" where nothing speaks against it.

    Every column whose name says that it marks bad rows counts: ``flag``, ``*_flag``, ``EXCLUDE*``,
    ``*mismatch*`` and ``same_*`` (a copy of other rows).  A truth value gives the column's name.
    """
    out = pd.Series("", index=frame.index, dtype=object)
    for name in frame.columns:
        if name in skip or not _is_mark(str(name)):
            continue
        text = texts(frame, name).str.strip()
        is_set = ~text.str.lower().isin(sorted(_NOT_SET))
        text = text.where(~text.str.lower().isin(["true", "1", "1.0", "yes"]), str(name))
        out = out.where(~is_set, out.where(out == "", out + "; ") + text)
    return out


def element_nbytes(frame: pd.DataFrame, name: str = "dtype", default: int = 2) -> pd.Series:
    """Bytes of one element (at least 1), from a column of type names.

    >>> element_nbytes(pd.DataFrame({"dtype": ["bfloat16", "fp8_block", "torch.float32"]})).tolist()
    [2, 1, 4]
    """
    names = texts(frame, name).str.lower().str.removeprefix("torch.").str.split("_").str[0]
    return names.map(_DTYPE_NBYTES).fillna(default).astype(np.int64)


def num_nodes(frame: pd.DataFrame, ranks: pd.Series) -> pd.Series:
    """The column ``nodes``; where it is missing, ranks over ranks per node, else 1."""
    per_node = numbers(frame, "ranks_per_node")
    derived = np.ceil(ranks / per_node.where(per_node > 0))
    return numbers(frame, "nodes").fillna(derived).fillna(1)


def _is_mark(name: str) -> bool:
    low = name.lower()
    return (
        low in ("flag", "flags")
        or low.endswith(("_flag", "_flags"))
        or low.startswith(("exclude", "same_"))
        or "mismatch" in low
    )
