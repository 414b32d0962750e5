"""Which steps are hooked: warm-up dropped, then hooked and bare steps in ABBA blocks."""

from __future__ import annotations

from dataclasses import dataclass

NUM_WARMUP_STEPS = 3
_BLOCK = (True, False, False, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What happens in one step: ``window`` is None outside all windows."""

    window: int | None
    is_hooked: bool
    is_warmup: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The plan of a whole run, a pure function of the step's number since the start of training.

    All ranks start together, so all of them hook the same steps without talking about it.  ABBA
    blocks cancel a linear drift of the step time in the comparison of hooked and bare steps.

    >>> plan = WindowPlan(steps=8)
    >>> [plan.at(i).is_hooked for i in range(3, 11)]
    [True, False, False, True, True, False, False, True]
    """

    steps: int
    every: int = 0

    def at(self, index: int) -> StepPlan:
        """The plan of step ``index``, counted from 0 since this process began to train."""
        if index < NUM_WARMUP_STEPS:
            return StepPlan(window=0 if self.steps > 0 else None, is_hooked=False, is_warmup=True)
        first = index - NUM_WARMUP_STEPS
        if first < self.steps:
            return _inside(0, first, self.steps)
        if self.every <= 0:
            return StepPlan(window=None, is_hooked=False)
        window, offset = divmod(index, self.period)
        if window == 0 or offset >= self.reopened_steps:
            return StepPlan(window=None, is_hooked=False)
        return _inside(window, offset, self.reopened_steps)

    @property
    def reopened_steps(self) -> int:
        """Length of every window after the first."""
        return max(len(_BLOCK), self.steps // 2)

    @property
    def period(self) -> int:
        """Steps from one window to the next: ``every``, but never inside an open window."""
        return max(self.every, self.reopened_steps + 1, NUM_WARMUP_STEPS + self.steps + 1)


def _inside(window: int, offset: int, length: int) -> StepPlan:
    return StepPlan(
        window=window,
        is_hooked=_BLOCK[offset % len(_BLOCK)],
        is_last=offset == length - 1,
    )
