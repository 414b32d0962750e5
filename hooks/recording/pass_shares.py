"""Weights and waiting for the passes of a window that were not timed, from those that were.

On a device only some passes have their transfers timed.  All are counted, so that one that was
timed speaks for a known number of calls; and a pass that was not timed waits as long as one that
was, on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..sensors.recorder import BACKWARD, FORWARD
from ..sensors.step_log import Code, StepLog, TransferKind, split
from ..sensors.stopwatch import NO_TIME, STEP_STREAM

_PASSES = (FORWARD, BACKWARD)
_BEGINS = (Code.WAIT_BEGIN, Code.STALL_BEGIN)
_ENDS = (Code.WAIT_END, Code.CALL_DONE, Code.STALL_END)


def transfer_weights(logs: Iterable[StepLog]) -> dict[TransferKind, float]:
    """By kind, the calls inside passes of all these steps over those that were timed."""
    called: Counter[TransferKind] = Counter()
    timed: Counter[TransferKind] = Counter()
    for log in logs:
        for kind, count in zip(log.kinds, log.num_pass_calls, strict=True):
            called[kind] += count
        for kind, number in zip(log.transfer_kinds, log.transfer_passes, strict=True):
            if number >= 0:
                timed[log.kinds[kind]] += 1
    return {kind: called[kind] / count for kind, count in timed.items()}


def mean_waits(logs: Sequence[StepLog]) -> dict[str, int]:
    """By name, how long the timed passes of resolved steps wait on average, in nanoseconds.

    Empty where the transfers of all passes were timed.
    """
    if not any(log.untimed_passes for log in logs):
        return {}
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for log in logs:
        for number, wait_ns in _waits(log).items():
            name = log.phases[number][0]
            sums[name] += wait_ns
            counts[name] += 1
    return {name: sums[name] // count for name, count in counts.items()}


def _waits(log: StepLog) -> dict[int, int]:
    """The waiting of the step's own stream in each timed pass, by the number of its phase."""
    streams = log.streams or (STEP_STREAM,) * len(log.what)
    waits: dict[int, int] = {}
    current, num_open, before_ns = -1, 0, 0
    for what, mark, stream in zip(log.what, log.marks, streams, strict=True):
        if stream != STEP_STREAM or mark == NO_TIME:
            continue
        code, number = split(what)
        if num_open and current >= 0:
            waits[current] += max(0, mark - before_ns)
        before_ns = mark
        if code == Code.PHASE_BEGIN and log.phases[number][0] in _PASSES:
            is_timed = number not in log.untimed_passes
            current = number if is_timed else -1
            if is_timed:
                waits[number] = 0
        elif code == Code.PHASE_END and number == current:
            current = -1
        elif code in _BEGINS:
            num_open += 1
        elif code in _ENDS:
            num_open = max(0, num_open - 1)
    return waits
