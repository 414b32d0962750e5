"""Steps of several layouts as one trace in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ... import __version__

if TYPE_CHECKING:
    from ...calib.steps import FittedSteps
    from ...calib.workload import RunConfig


def write_trace(path: Path | str, steps: FittedSteps, layouts: Mapping[str, RunConfig]) -> None:
    """A process for each layout by its name, all on one scale; compressed where the name ends in
    ``.gz``.  ``OSError`` where the file cannot be written."""
    # Of use here alone, and slow to import.
    from ...calib.answers import PREDICTED, step_trace
    from ...calib.records import write_json

    estimates = {f"{PREDICTED}, {name}": steps.estimate(one) for name, one in layouts.items()}
    write_json(Path(path), step_trace(estimates, version=__version__))
