"""What a reader of a family of step tables is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from ..records.step_rows import StepRow
from .step_records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFamily:
    """Step tables that one reader understands, known by their columns."""

    name: str
    columns: frozenset[str]
    """All of these have to be there."""
    read: Callable[[Record, str, str], StepRow]
    """From one row, its name and the table's; ``ConfigError`` says why a row is no layout."""
    id_column: str = "row_id"
    """Names the rows."""
    prepare: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    """Makes one row of each layout where the table has several."""
