"""The step that is running."""

from __future__ import annotations

from dataclasses import dataclass

from ...calib.records.record_kinds import StepFlag, StepRecord
from ..recording.window import StepPlan


@dataclass(slots=True)
class OpenStep:
    """What is known of it so far."""

    number: int
    plan: StepPlan
    start_ns: int
    gap_ns: int
    flags: set[StepFlag]
    num_faults: int
    excluded_ns: int = 0
    hook_ns: int = 0

    @property
    def sorted_flags(self) -> tuple[StepFlag, ...]:
        """The flags in one order."""
        return tuple(sorted(self.flags, key=lambda flag: flag.value))

    def record(self, window: int, duration_ns: int, *, is_hooked: bool) -> StepRecord:
        """The step as a record of ``window``, once it is over."""
        return StepRecord(
            step=self.number,
            window=window,
            start_ns=self.start_ns,
            duration_ns=duration_ns,
            gap_ns=self.gap_ns,
            is_hooked=is_hooked,
            flags=self.sorted_flags,
            hook_ns=self.hook_ns,
        )
