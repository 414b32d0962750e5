"""The step that is running, and the time since the one before it."""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Between:
    """Evaluation, saves and probes between the end of one step and the begin of the next."""

    end_ns: int | None = None
    brackets: dict[str, tuple[int, int]] = field(default_factory=dict)

    def extend(self, name: str, start_ns: int, end_ns: int) -> None:
        """Brackets of one name are one: its first begin to its last end."""
        known = self.brackets.get(name, (start_ns, end_ns))
        self.brackets[name] = (min(known[0], start_ns), max(known[1], end_ns))

    def gap_ns(self, start_ns: int) -> int:
        """From the last step's end to ``start_ns`` without the brackets."""
        if self.end_ns is None:
            return 0
        gap_ns, covered_ns = start_ns - self.end_ns, self.end_ns
        for begin_ns, end_ns in sorted(self.brackets.values()):
            begin_ns = max(begin_ns, covered_ns)
            gap_ns -= max(0, end_ns - begin_ns)
            covered_ns = max(covered_ns, end_ns)
        return max(0, gap_ns)
