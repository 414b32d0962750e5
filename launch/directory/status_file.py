"""``status.json``: where a run is now, as its companion has heard it.

Standard library only: it is written before pandas is loaded, and read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

from ...calib.records import with_iso_times
from .bounded_files import number

STATUS = "status.json"
SCHEMA = 1


class Phase(Enum):
    """How far a run has come, as far as its companion knows."""

    RUNS = "runs"
    ENDED = "ended"
    """It has said so."""
    GONE = "gone"
    """It has gone without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFile:
    """What the file holds beside whose it is."""

    phase: Phase = Phase.RUNS
    iteration: int = 0
    """Steps that are done."""
    steps_total: int = 0
    """0: not known."""
    step_time_s: float = 0.0
    """Median of the newest regular steps; 0.0 before the first."""
    step_low_s: float = 0.0
    """9 of 10 of them lie from here ..."""
    step_high_s: float = 0.0
    """... to here."""
    num_steps: int = 0
    """How many these are."""
    began_unix_s: float = 0.0
    heard_unix_s: float = 0.0
    """When training last said something."""
    unix_s: float = 0.0
    """When this was written."""
    host: str = ""
    """With the next two: the process that writes it."""
    pid: int = 0
    pid_start: int = 0

    def to_json(self, stamp: Mapping[str, Any]) -> dict[str, Any]:
        """The file, which begins with the stamp of its run."""
        value = {**asdict(self), "phase": self.phase.value}
        return with_iso_times({"schema": SCHEMA, "created_by": "forerun", **stamp, **value})


def status_of(value: Mapping[str, Any]) -> StatusFile:
    """What the object of such a file says; a value of another kind is as if it were not there."""
    found: dict[str, Any] = {}
    for one in fields(StatusFile):
        held, default = value.get(one.name), one.default
        if isinstance(default, str):
            found[one.name] = held if isinstance(held, str) else default
        elif isinstance(default, (int, float)):
            found[one.name] = type(default)(max(0.0, number(held)))
    known = {phase.value: phase for phase in Phase}
    return StatusFile(**found, phase=known.get(str(value.get("phase")), Phase.GONE))
