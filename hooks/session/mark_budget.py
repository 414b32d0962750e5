"""Budget of a window's marks: the micro-batches whose operators are timed if a mark is expensive.

On a device each mark is an event that is recorded in training and read after it.  The budget of a
window follows from the time of a step, and the cost of a micro-batch from earlier hooked steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..recording import thin_samples
from ..sensors import MAX_EVENTS, StepLog, TransferKind

MARKS_PER_S = 1_000
"""Marks for each second of a window.  One takes some 7 us to record and some 2 us to read
(``benchmarks/costs/marks.py`` on a slow processor): 0.7 % and 0.2 % of the time."""
STEP_MARKS = MAX_EVENTS // 3
"""Limit per step: two hooked steps are consecutive, and one may not be read yet."""
LEAST_MICROBATCHES = 2
"""Micro-batches that are timed in a window whose steps are too short for it."""
_MARKS_PER_SITE = 4


@dataclass(slots=True, kw_only=True)
class MarkBudget:
    """Costs observed in hooked steps; ``num_sites`` is a guess at a pass until one has been
    observed."""

    num_sites: int
    frequent: frozenset[TransferKind] | None = None
    largest_pass: int = 0
    _microbatch_marks: float = 0.0
    _other_marks: float = 0.0

    def level(self, num_steps: int, num_chosen: int, step_s: float) -> int:
        """Return the level of ``thin_samples`` for windows of so many hooked steps and
        micro-batches.

        Every hooked step is paired with a bare one.
        """
        each = max(1.0, self._microbatch_marks or _MARKS_PER_SITE * self.num_sites)
        num_free_marks = min(2 * MARKS_PER_S * step_s, STEP_MARKS) - self._other_marks
        most = max(LEAST_MICROBATCHES, int(num_steps * num_free_marks / each))
        level = 0
        while math.ceil(num_steps * num_chosen / (1 << level)) > most:
            level += 1
        return level

    def chosen(
        self, samples: tuple[int, ...], num_hooked: int, num_steps: int, step_s: float
    ) -> tuple[int, ...]:
        """Return the micro-batches of ``samples`` that a hooked step times; the first step times
        one."""
        num_chosen = max(1, len({number for number in samples if number >= 0}))
        if self._microbatch_marks == 0.0 and num_chosen > 1:
            return thin_samples(samples, 0, math.ceil(math.log2(num_chosen)))
        return thin_samples(samples, num_hooked, self.level(num_steps, num_chosen, step_s))

    def learn(self, log: StepLog, *, is_thin: bool) -> None:
        """Update the costs and the transfers of every pass from a finished hooked step."""
        shown = log.frequent_kinds(is_thin=is_thin)
        if log.num_pass_marks:
            self.frequent = shown | (self.frequent or frozenset())
            number = len({m for m in log.samples if m >= 0}) or 1
            self._microbatch_marks = log.num_pass_marks / number
            self._other_marks = max(0, len(log.what) - log.num_pass_marks)
            self.largest_pass = max(self.largest_pass, log.largest_pass)
