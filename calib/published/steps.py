"""From a published table of step times, whichever family it is of, to rows of layouts."""

from __future__ import annotations

import difflib

import pandas as pd

from ..errors import CalibrationError, ConfigError
from ..records.step_rows import StepTable
from . import steps_megatron, steps_nemo, steps_others, steps_own
from .step_families import StepFamily
from .step_records import read_records

STEP_FAMILIES: tuple[StepFamily, ...] = (
    *steps_own.FAMILIES,
    *steps_megatron.FAMILIES,
    *steps_nemo.FAMILIES,
    *steps_others.FAMILIES,
)


def read_steps(frame: pd.DataFrame, name: str) -> StepTable:
    """The rows of ``frame``; ``name`` is how answers and errors call the table.

    The family is told by the columns, never by the name.  Rows that could not be made a layout are
    listed with the reason.  ``ConfigError`` where the columns are of no family that we know,
    ``CalibrationError`` where there are no rows.
    """
    columns = frozenset(map(str, frame.columns))
    family = step_family(columns)
    if len(frame) == 0 and (not columns or family is not None):
        raise CalibrationError(f"{name} has no rows; give a table with step times")
    if family is None:
        raise ConfigError(_unknown(columns, name))
    frame = frame.reset_index(drop=True)
    prepared = family.prepare(frame) if family.prepare else frame
    rows, skipped = read_records(prepared, name, family.read, family.id_column)
    return StepTable(name=name, family=family.name, rows=tuple(rows), skipped=tuple(skipped))


def step_family(columns: frozenset[str]) -> StepFamily | None:
    """The family whose columns are all there, the one with the most where there are several."""
    found = [f for f in STEP_FAMILIES if f.columns <= columns]
    return max(found, key=lambda f: len(f.columns), default=None)


def _unknown(columns: frozenset[str], name: str) -> str:
    nearest = max(STEP_FAMILIES, key=lambda f: len(f.columns & columns) / len(f.columns))
    missing = []
    for column in sorted(nearest.columns - columns):
        close = difflib.get_close_matches(column, columns - nearest.columns, n=1)
        missing.append(f"{column} (is {close[0]} meant?)" if close else column)
    known = ", ".join(f.name for f in STEP_FAMILIES)
    return (
        f"the columns of {name} are of no family of step times that is known ({known}); nearest "
        f"is {nearest.name}, which also needs {', '.join(missing)}"
    )
