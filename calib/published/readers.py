"""From a published table, whichever family it is of, to the canonical one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import pandas as pd

from ..errors import CalibrationError, ConfigError
from ..importers.own_format import (
    COLLECTIVE_COLUMNS,
    OPERATOR_COLUMNS,
    OPTIONAL_COLUMNS,
    TableFamily,
    collective_table,
    operator_table,
)
from . import (
    collectives,
    operators_ett,
    operators_inference,
    operators_neusight,
    operators_profiles,
)

OPERATOR_FAMILIES = (
    *operators_ett.FAMILIES,
    *operators_inference.FAMILIES,
    *operators_neusight.FAMILIES,
    *operators_profiles.FAMILIES,
)
COLLECTIVE_FAMILIES = collectives.FAMILIES
_OWN_OPERATORS = frozenset(OPERATOR_COLUMNS) - OPTIONAL_COLUMNS
_OWN_COLLECTIVES = frozenset(COLLECTIVE_COLUMNS) - OPTIONAL_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedTable:
    """One table in canonical columns: either operators or collectives."""

    name: str
    family: str
    operators: pd.DataFrame | None = None
    collectives: pd.DataFrame | None = None


def read_published(frame: pd.DataFrame, name: str) -> PublishedTable:
    """The canonical table of ``frame``; ``name`` is how answers and errors call it.

    The family is told by the columns, never by the name.  ``ConfigError`` where they are of no
    family that we know, or where a row of our own format breaks a rule; ``CalibrationError`` where
    there are no rows.
    """
    columns = frozenset(map(str, frame.columns))
    if len(columns) == 0 or (len(frame) == 0 and _family(columns) is not None):
        raise CalibrationError(f"{name} has no rows; give a table with measurements")
    if columns >= _OWN_OPERATORS:
        return PublishedTable(name=name, family="own", operators=operator_table(frame, name))
    if columns >= _OWN_COLLECTIVES:
        return PublishedTable(name=name, family="own", collectives=collective_table(frame, name))
    family = _family(columns)
    if family is None:
        raise ConfigError(_unknown(columns, name))
    rows = family.read(frame.reset_index(drop=True))
    if family in COLLECTIVE_FAMILIES:
        return PublishedTable(name=name, family=family.name, collectives=rows)
    return PublishedTable(name=name, family=family.name, operators=rows)


def _family(columns: frozenset[str]) -> TableFamily | None:
    """The family whose columns are all there, the one with the most where there are several."""
    found = [f for f in _families() if f.columns <= columns]
    return max(found, key=lambda f: len(f.columns), default=None)


def _families() -> tuple[TableFamily, ...]:
    own = (
        TableFamily(name="own operators", columns=_OWN_OPERATORS, read=lambda frame: frame),
        TableFamily(name="own collectives", columns=_OWN_COLLECTIVES, read=lambda frame: frame),
    )
    return (*own, *OPERATOR_FAMILIES, *COLLECTIVE_FAMILIES)


def _unknown(columns: frozenset[str], name: str) -> str:
    nearest = max(_families(), key=lambda f: len(f.columns & columns) / len(f.columns))
    missing = []
    for column in sorted(nearest.columns - columns):
        close = difflib.get_close_matches(column, columns - nearest.columns, n=1)
        missing.append(f"{column} (is {close[0]} meant?)" if close else column)
    known = ", ".join(f.name for f in _families())
    return (
        f"the columns of {name} are of no family that is known ({known}); nearest is "
        f"{nearest.name}, which also needs {', '.join(missing)}"
    )
