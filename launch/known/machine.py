"""What the verbs know of a machine once its step model is fitted."""

from __future__ import annotations

from dataclasses import dataclass

from ...calib.steps.model import FittedSteps
from ...calib.workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """What a directory says of the steps of any layout."""

    name: str
    """The run, or the machine that was imported."""
    own: RunConfig
    """The layout that others are held against."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None
    """What a measured peak had beyond its estimate; None where none was measured."""
    problems: tuple[str, ...] = ()
