"""Steps that others have published, as they ship with the package."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from ...calib.answers import Answer, prefixed
from ...calib.differences import normal
from ...calib.errors import ForerunError
from ...calib.fit.priors import is_processor
from ...calib.importers import read_steps
from ...calib.records import StepRow
from .table_files import read_frame

FOLDER = Path(__file__).parents[2] / "recipes" / "published"
_SIMULATED = "steps_vtrain_single_node.csv.gz"


@cache
def published_rows() -> tuple[StepRow, ...]:
    """Every row that nothing speaks against; a simulator's output is none."""
    paths = (path for path in sorted(FOLDER.glob("steps_*")) if path.name != _SIMULATED)
    return tuple(row for path in paths for row in read_steps(read_frame(path), path.name).usable)


def with_normal(answer: Answer, directory: Path) -> Answer:
    """The answer with a line on its rate among published ones; the same of a CPU, and where
    nothing is published of its device."""
    if answer.modelled is None or is_processor(answer.device):
        return answer
    row = StepRow(
        table="",
        row_id="",
        config=answer.modelled.config,
        measured_s=answer.measured_step_s,
        machine=answer.run_id,
        group="",
    )
    with suppress(ForerunError):
        text = f"normal? {normal(row, published_rows()).sentence} · forerun normal {directory}"
        return replace(answer, transcript=(*answer.transcript, *prefixed([text])))
    return answer
