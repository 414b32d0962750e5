"""A step under PyTorch's profiler, as training leaves it.

Its log is a line of its rank's file, and the trace lies beside that file as the profiler exports
it, compressed.  The marks of the log are events of the trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import RecordError
from .marked_window import DAMAGED, packed_step, unpacked_step
from .step_marks import StepMarks

MAX_TRACE_NBYTES = 64 << 20
"""Most bytes of a trace before it is compressed, some 170,000 events."""
TRACE = re.compile(r"trace-\d+-[0-9a-f]+\.json\.gz")
"""Names of the files of traces."""
MARK = "forerun"
"""Name of the trace's events that are marks."""
COVERAGE = "trace"
"""Name of the trace in a window's coverage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step's log, whose marks are numbers of events, and the name of its trace's file."""

    TYPE: ClassVar = "traced"
    """Type of its line."""
    log: StepMarks
    trace: str
    num_marks: int
    first_transfer: int
    is_device: bool

    def to_line(self) -> str:
        """Return the line of the rank's file."""
        value = {
            "type": self.TYPE,
            "trace": self.trace,
            "num_marks": self.num_marks,
            "first_transfer": self.first_transfer,
            "is_device": self.is_device,
            "step": packed_step(self.log),
        }
        return json.dumps(value) + "\n"

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TracedStep:
        """Return the step of a line; raises ``RecordError`` if it is damaged."""
        try:
            return TracedStep(
                log=unpacked_step(value["step"]),
                trace=str(value["trace"]),
                num_marks=int(value["num_marks"]),
                first_transfer=int(value["first_transfer"]),
                is_device=bool(value["is_device"]),
            )
        except DAMAGED as err:
            raise RecordError(f"line of a traced step is damaged ({err}); skipped") from err
