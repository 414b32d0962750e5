"""Convert published tables of any family to canonical ones.

The family is identified by the columns, never by the name.  ``name`` is the table's name in answers
and errors: ``ConfigError`` if its columns match no known family, ``CalibrationError`` if it has no
rows.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd

from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.published import (
    collectives,
    operators_ett,
    operators_inference,
    operators_neusight,
    operators_profiles,
    steps_bridge,
    steps_megatron,
    steps_nemo,
    steps_others,
)
from forerun.benchmarks.published.rows import TableFamily
from forerun.calib.errors import CalibrationError, ConfigError
from forerun.calib.importers import canonical_steps
from forerun.calib.importers.canonical_tables import NEEDED, read_table, unknown_table_error
from forerun.calib.records.step_rows import StepTable
from forerun.launch.known.table_files import read_frame

RECIPES = Path(__file__).parents[2] / "recipes" / "published"

_FORERUN_TABLES = tuple(
    TableFamily(name=f"own {what}", columns=needed, read=read_table)
    for what, needed in NEEDED.items()
)
_FORERUN_STEPS = TableFamily(
    name="own steps", columns=canonical_steps.REQUIRED, read=canonical_steps.read_steps
)
FAMILIES = (
    *_FORERUN_TABLES,
    *operators_ett.FAMILIES,
    *operators_inference.FAMILIES,
    *operators_neusight.FAMILIES,
    *operators_profiles.FAMILIES,
    *collectives.FAMILIES,
)
STEP_FAMILIES = (
    *(_FORERUN_STEPS, *steps_megatron.FAMILIES, *steps_bridge.FAMILIES),
    *(*steps_nemo.FAMILIES, *steps_others.FAMILIES),
)


def read_published(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return operators or collectives in canonical columns; a table in our own format unchanged."""
    return _nearest(frame, name, FAMILIES).read(frame.reset_index(drop=True), name)


def read_steps(frame: pd.DataFrame, name: str) -> StepTable:
    """Return rows of layouts; rows that could not be converted are listed with the reason."""
    return _nearest(frame, name, STEP_FAMILIES).read(frame.reset_index(drop=True), name)


def frame_of(data: Path, name: str) -> pd.DataFrame:
    """Return a table by name, from a folder of published ones or from ``recipes/published``."""
    for folder in (data, RECIPES):
        for path in (folder / f"{name}.csv.gz", folder / f"{name}.csv"):
            if path.exists():
                return read_frame(path)
    raise ConfigError(f"{name} is neither in {data} nor in {RECIPES}; give the folder that has it")


@lru_cache(maxsize=64)
def steps_of(data: Path, name: str) -> StepTable:
    """Return the rows of a table of step times by name."""
    return read_steps(frame_of(data, name), name)


@lru_cache(maxsize=64)
def model_over(data: Path, names: tuple[str, ...]) -> TableSteps:
    """Return the package's step model on tables of operators and collectives."""
    return TableSteps([read_published(frame_of(data, name), name) for name in names])


def is_of_steps(frame: pd.DataFrame) -> bool:
    """Return True if the columns are those of step times, published or our own."""
    columns = frozenset(map(str, frame.columns))
    return any(columns >= family.columns for family in STEP_FAMILIES)


def _nearest(frame: pd.DataFrame, name: str, families: tuple[TableFamily, ...]) -> TableFamily:
    """Return our own family if it matches, else the matching one with the most columns."""
    columns = frozenset(map(str, frame.columns))
    fitting = [family for family in families if columns >= family.columns]
    if not columns or (fitting and not len(frame)):
        raise CalibrationError(f"{name} has no rows; give a table with measurements")
    if not fitting:
        known = {family.name: family.columns for family in families}
        raise unknown_table_error(columns, name, known, "give a table of one of these")
    forerun_families = (*_FORERUN_TABLES, _FORERUN_STEPS)
    return max(fitting, key=lambda family: (family in forerun_families, len(family.columns)))
