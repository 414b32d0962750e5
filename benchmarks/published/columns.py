"""Columns of published tables: such as may be absent, flags, sizes of elements, joined names."""

from __future__ import annotations

import numpy as np
import pandas as pd

from forerun.calib.importers import element_types

_NOT_SET = frozenset({"", "false", "0", "0.0", "nan", "none", "no", "<na>"})
_SET = frozenset({"true", "1", "1.0", "yes"})


def numbers(frame: pd.DataFrame, *names: str) -> pd.Series:
    """A column as floats; NaN where no column of these names has a value, the first one wins."""
    out = pd.Series(np.nan, index=frame.index)
    for name in names:
        if name in frame.columns:
            out = out.fillna(pd.to_numeric(frame[name], errors="coerce").astype(float))
    return out


def texts(frame: pd.DataFrame, name: str) -> pd.Series:
    """A column as texts; "" where the column or a value is missing."""
    if name not in frame.columns:
        return pd.Series("", index=frame.index, dtype=object)
    values = frame[name]
    return values.astype(object).where(values.notna(), "").astype(str)


def joined(frame: pd.DataFrame, *names: str) -> pd.Series:
    """The non-empty texts of several columns with a blank between them."""
    out = pd.Series("", index=frame.index, dtype=object)
    for name in names:
        out = (out + " " + texts(frame, name)).str.strip()
    return out


def flags(frame: pd.DataFrame, *, skip: str = "") -> pd.Series:
    """Why a row is not to be used, "" where nothing speaks against it.

    Every column whose name says that it marks bad rows counts: ``flag``, ``*_flag``, ``EXCLUDE*``,
    ``*mismatch*`` and ``same_*`` (a copy of other rows).  A truth value gives the column's name.
    """
    out = pd.Series("", index=frame.index, dtype=object)
    for name in (str(c) for c in frame.columns if c != skip and _is_mark(str(c).lower())):
        text = texts(frame, name).str.strip()
        low = text.str.lower()
        text = text.where(~low.isin(_SET), name)
        out = out.where(low.isin(_NOT_SET), out.where(out == "", out + "; ") + text)
    return out


def element_nbytes(frame: pd.DataFrame, name: str = "dtype", default: int = 2) -> pd.Series:
    """Bytes of one element (at least 1), from a column of type names."""
    sizes = texts(frame, name).map(lambda text: element_types.element_nbytes(text, default))
    return sizes.astype(np.int64)


def _is_mark(low: str) -> bool:
    return (
        low in ("flag", "flags")
        or low.endswith(("_flag", "_flags"))
        or low.startswith(("exclude", "same_"))
        or "mismatch" in low
    )
