"""Steps that others have published, as they ship with the package."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ...calib.importers.own_steps import read_steps
from ...calib.records.step_rows import StepRow
from .table_files import read_frame

FOLDER = Path(__file__).parents[2] / "recipes" / "published"
_SIMULATED = "steps_vtrain_single_node.csv.gz"


@cache
def published_rows() -> tuple[StepRow, ...]:
    """Every row that nothing speaks against; a simulator's output is none."""
    paths = (path for path in sorted(FOLDER.glob("steps_*")) if path.name != _SIMULATED)
    return tuple(row for path in paths for row in read_steps(read_frame(path), path.name).usable)
