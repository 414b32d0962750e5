"""Budget of a window's marks: the layers and micro-batches whose operators are timed.

On a device each mark is an event that is recorded in training and read after it.  What it delays
training is learned: passes whose operators were recorded against those of others, by the device's
own clock.  A device that is busy meanwhile hides it; one that waits for its host does not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ...calib.marks.step_marks import NO_TIME, TransferKind
from ...calib.units import NS_PER_S
from ..recording.window import thin_samples
from ..sensors.step_log import StepLog
from ..sensors.stopwatch import MAX_EVENTS

COST_FRAC = 0.015
"""Share of a step that recording its operators may add to it, on average over hooked steps."""
MARKS_PER_S = 1_000
"""Marks for each second of a window, that they are read soon: some 2 us each, 0.2 % of the time
(``benchmarks/RESULTS.md``)."""
_DISPLACED_FACTOR = 1.5
"""Cost of an operator over the time inside its hooks, until passes have been compared: 1.3 on an
H200, 1.7 on a slow processor (``benchmarks/RESULTS.md``): what the hooks displace from caches is
fetched again."""
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
    _span_marks: float = 0.0
    _microbatch_spans: float = 0.0
    _other_marks: float = 0.0
    _costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _inside_s: float = 0.0
    _pass_s: dict[bool, float] = field(default_factory=dict)

    @property
    def cost_s(self) -> float:
        """Seconds that a recorded operator has added to a step, forwards and backwards together;
        0 before any was."""
        return (
            max(0.0, median(self._costs_s)) if self._costs_s else _DISPLACED_FACTOR * self._inside_s
        )

    def level(self, num_steps: int, num_chosen: int, step_s: float, sites_frac: float = 1.0) -> int:
        """Return the level of ``thin_samples`` for windows of so many hooked steps and
        micro-batches, if this share of the sites is watched.

        Every hooked step is paired with a bare one.
        """
        spans = sites_frac * (self._microbatch_spans or self.num_sites)
        each = max(1.0, spans * (self._span_marks or _MARKS_PER_SITE))
        num_free_marks = min(2 * MARKS_PER_S * step_s, STEP_MARKS) - self._other_marks
        share = min(num_free_marks / each, COST_FRAC * step_s / max(1e-9, self.cost_s * spans))
        most = max(LEAST_MICROBATCHES, num_steps * min(share, num_chosen))
        level = 0
        while math.ceil(num_steps * num_chosen / (1 << level)) > most:
            level += 1
        return level

    def chosen(
        self,
        samples: tuple[int, ...],
        num_hooked: int,
        num_steps: int,
        step_s: float,
        sites_frac: float = 1.0,
    ) -> tuple[int, ...]:
        """Return the micro-batches of ``samples`` that a hooked step times; the first step times
        one."""
        num_chosen = count_chosen(samples)
        if self._span_marks == 0.0 and num_chosen > 1:
            return thin_samples(samples, 0, math.ceil(math.log2(num_chosen)))
        level = self.level(num_steps, num_chosen, step_s, sites_frac)
        return thin_samples(samples, num_hooked, level)

    def learn(self, log: StepLog, *, is_thin: bool) -> None:
        """Update the costs and the transfers of every pass from a finished hooked step."""
        shown = log.frequent_kinds(is_thin=is_thin)
        if log.num_pass_marks:
            self.frequent = shown | (self.frequent or frozenset())
            num_spans = max(1, len(log.span_sites))
            self._span_marks = log.num_pass_marks / num_spans
            if not log.site_weights:
                self._microbatch_spans = num_spans / count_chosen(log.samples)
            self._other_marks = max(0, len(log.what) - log.num_pass_marks)
            self.largest_pass = max(self.largest_pass, log.largest_pass)
            self._inside_s = sum(log.hook_times_ns) / NS_PER_S / num_spans

    def learn_cost(self, log: StepLog) -> None:
        """Compare the passes of a hooked step whose marks have been read."""
        times_s: dict[tuple[bool, bool], list[float]] = {}
        for is_forward, is_sampled, first, last in log.passes:
            ends = log.marks[first : last + 1 : max(1, last - first)]
            if len(ends) == 2 and NO_TIME not in ends:
                times_s.setdefault((is_forward, is_sampled), []).append(
                    (ends[1] - ends[0]) / NS_PER_S
                )
        for is_forward in (True, False):
            if (is_forward, False) in times_s:
                self._pass_s[is_forward] = median(times_s[is_forward, False])
        added_s, num_spans = 0.0, len(log.span_sites)
        for is_forward in (True, False):
            sampled_s = times_s.get((is_forward, True))
            if not (sampled_s and is_forward in self._pass_s and num_spans):
                return
            added_s += sum(sampled_s) - len(sampled_s) * self._pass_s[is_forward]
        self._costs_s.append(added_s / num_spans)


def count_chosen(samples: Sequence[int]) -> int:
    """Return the number of micro-batches of a step that are timed; one if all passes are."""
    return len({number for number in samples if number >= 0}) or 1
