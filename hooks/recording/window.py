"""Plan of hooked steps, and of the micro-batches whose operators are recorded.

Warm-up is dropped, then hooked and bare steps come in ABBA blocks.  Each hooked step records few
micro-batches, a window records all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from ...calib.timeline.programs import Pipeline
from ...calib.timeline.schedules import schedule_table
from ...calib.workload.config import RunConfig

# First steps allocate, compile and connect; Megatron's CUDA graphs also begin after three.
NUM_WARMUP_STEPS = 3
MAX_STRIDE = 8
_BLOCK = (True, False, False, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Plan of one step; ``window`` is None outside all windows."""

    window: int | None
    is_hooked: bool
    is_warmup: bool = False
    is_last: bool = False
    is_traced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """The plan of a whole run, a pure function of the step's number since the start of training.

    All ranks start together, so they hook the same steps without communication.  ABBA blocks cancel
    a linear drift of the step time in the comparison of hooked and bare steps.

    >>> plan = WindowPlan(steps=8)
    >>> [plan.at(i).is_hooked for i in range(3, 11)]
    [True, False, False, True, True, False, False, True]
    """

    steps: int
    every: int = 0
    num_warmup: int = NUM_WARMUP_STEPS
    num_traced: int = 0
    """Steps at the end of the first window that are neither hooked nor bare."""
    ordered: tuple[int, ...] = ()
    """First steps of windows that all ranks have agreed on, in order."""

    def at(self, index: int) -> StepPlan:
        """Return the plan of step ``index``, counted from 0 since this process began to train."""
        if index < self.num_warmup:
            return StepPlan(window=0 if self.steps > 0 else None, is_hooked=False, is_warmup=True)
        first = index - self.num_warmup
        if first < self.steps:
            return _inside(0, first, self.steps + self.num_traced)
        if first < self.steps + self.num_traced:
            is_last = first == self.steps + self.num_traced - 1
            return StepPlan(window=0, is_hooked=False, is_traced=True, is_last=is_last)
        opened = self._reopened(index)
        if opened is None:
            return StepPlan(window=None, is_hooked=False)
        return _inside(*opened, self.reopened_steps)

    def opened_at(self, index: int) -> WindowPlan:
        """Return the plan with another window from step ``index`` on; unchanged inside an open
        window.

        >>> WindowPlan(steps=8).opened_at(40).at(43)
        StepPlan(window=1, is_hooked=True, is_warmup=False, is_last=True, is_traced=False)
        """
        is_free = self.steps > 0 and self.at(index).window is None
        return replace(self, ordered=(*self.ordered, index)) if is_free else self

    def _reopened(self, index: int) -> tuple[int, int] | None:
        """Return the number of the open window after the first, counted in order, and the step in
        it.

        A periodic window that overlaps an ordered one is skipped.
        """
        length = self.reopened_steps
        for count, begin in enumerate(self.ordered):
            if begin <= index < begin + length:
                periodic_window = begin // self.period if self.every > 0 else 0
                return periodic_window + count + 1, index - begin
        if self.every <= 0:
            return None
        window, offset = divmod(index, self.period)
        begin = index - offset
        if window == 0 or offset >= length or any(abs(o - begin) < length for o in self.ordered):
            return None
        return window + sum(o < begin for o in self.ordered), offset

    @property
    def num_hooked(self) -> int:
        """Hooked steps of the longest window.

        >>> WindowPlan(steps=20).num_hooked
        10
        """
        length = max(self.steps, self.reopened_steps if self.steps > 0 or self.every > 0 else 0)
        return sum(_BLOCK[offset % len(_BLOCK)] for offset in range(length))

    @property
    def reopened_steps(self) -> int:
        """Length of every window after the first."""
        return max(len(_BLOCK), self.steps // 2)

    @property
    def period(self) -> int:
        """Steps from one window to the next: ``every``, but never inside an open window."""
        first = self.num_warmup + self.steps + self.num_traced
        return max(self.every, self.reopened_steps + 1, first + 1)


def _inside(window: int, offset: int, length: int) -> StepPlan:
    return StepPlan(
        window=window,
        is_hooked=_BLOCK[offset % len(_BLOCK)],
        is_last=offset == length - 1,
    )


def pass_microbatches(config: RunConfig) -> tuple[int, ...]:
    """Return the micro-batch of every forward pass of a stage in order, the same for backward
    passes.

    The result is the same on all ranks, which therefore record the same micro-batches.
    """
    if config.parallelism.vp == 1:
        return tuple(range(config.num_microbatches))
    table = schedule_table(
        Pipeline(
            num_stages=config.parallelism.pp,
            num_microbatches=config.num_microbatches,
            num_virtual_stages=config.parallelism.vp,
            microbatch_group_size=config.parallelism.microbatch_group_size,
        )
    )
    return tuple(place.microbatch for place in table)


def sampling_stride(num_microbatches: int) -> int:
    """Return the distance between the micro-batches of a step whose operators are timed.

    >>> [sampling_stride(n) for n in (0, 1, 2, 4, 8, 64)]
    [1, 1, 2, 4, 8, 8]
    """
    return max(1, min(num_microbatches, MAX_STRIDE))


def samples(microbatches: tuple[int, ...], num_hooked: int) -> tuple[int, ...]:
    """Return the micro-batch of each pass in hooked step ``num_hooked``, -1 if it is not recorded.

    Micro-batches are recorded whole, so that an operator without time did not run; the choice
    rotates, in every second or fourth hooked step too. Empty if all are recorded, or the passes are
    unknown.

    >>> samples((0, 1, 2, 3), 0), samples((0, 1, 2, 3), 1)
    ((0, -1, -1, -1), (-1, 1, -1, -1))
    """
    stride = sampling_stride(1 + max(microbatches, default=-1))
    if stride == 1:
        return ()
    digits, rest = [0], num_hooked
    while rest:
        rest, digit = divmod(rest, stride)
        digits.append(digit)
    first = sum(digits) % stride
    return tuple(number if number % stride == first else -1 for number in microbatches)


def thin_samples(chosen: tuple[int, ...], num_hooked: int, level: int) -> tuple[int, ...]:
    """Return the samples with one of ``2 ** level`` micro-batches, counted over all hooked steps.

    Higher levels are subsets of lower ones, so that ranks which disagree share the smaller set.  If
    all passes are recorded, or they are unknown, whole steps are chosen.

    >>> thin_samples((0, -1, 2, -1), 0, 1), thin_samples((), 0, 1), thin_samples((), 1, 1)
    ((0, -1, -1, -1), (), (-1,))
    """
    microbatches = sorted({number for number in chosen if number >= 0})
    first, every = num_hooked * max(1, len(microbatches)), 1 << level
    if not chosen:
        return chosen if first % every == 0 else (-1,)
    selected = {m for place, m in enumerate(microbatches) if (first + place) % every == 0}
    return tuple(number if number in selected else -1 for number in chosen)


_TURN = (5**0.5 - 1) / 2
"""Golden section: its multiples, and those of every part of them, are spread evenly."""


def layer_weights(natures: Mapping[int, Hashable], num_hooked: int) -> dict[int, float]:
    """Return the layers that a hooked step records, and the number of layers that each stands for.

    These are the first, the last, and two of the others of each nature, half of them apart; they
    rotate.

    >>> layer_weights(dict.fromkeys(range(8), "dense"), 1)
    {0: 1.0, 1: 3.0, 4: 3.0, 7: 1.0}
    """
    order = sorted(natures)
    chosen = dict.fromkeys((*order[:1], *order[-1:]), 1.0)
    alike: dict[Hashable, list[int]] = {}
    for layer in order[1:-1]:
        alike.setdefault(natures[layer], []).append(layer)
    for layers in alike.values():
        count = len(layers)
        first = int(num_hooked * _TURN % 1.0 * count)
        for place in {first, (first + count // 2) % count}:
            chosen[layers[place]] = count / min(count, 2)
    return dict(sorted(chosen.items()))
