"""The time that a host takes to launch the work between two marks, where nothing held it up.

The host's clock is read with every event.  While a device is busy the host runs ahead of it, at
its own pace, until the device's queue is full; from there on it is as slow as the device.  How full
the queue is, the events tell that the device has not passed yet, each with the launches around it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from ..sensors.recorder import BACKWARD, FORWARD
from ..sensors.step_log import Code, StepLog, split
from ..sensors.stopwatch import NO_TIME
from .lags import CAUGHT_UP_NS, waits_for_host

MOST_QUEUED = 1024
"""Launches that CUDA holds before the host has to wait."""
LAUNCHES, BACKWARD_LAUNCHES = 4, 8
"""Those that an event stands for, itself among them, in forward and other passes: twice as many as
in layers of Megatron that launch every kernel alone."""
PEAK_FRAC = 0.5
"""Share of the most that a step has in flight: a queue that has ever been full is not at that."""
_PASSES = frozenset({FORWARD, BACKWARD})


def host_times(log: StepLog, lags: Sequence[int]) -> Iterator[int]:
    """Nanoseconds of the host before each mark of a resolved step, since the one before it.

    Our own hooks are out.  ``lags`` are those of ``lags_of``.  ``NO_TIME`` where the host may have
    waited for room in the queue or for a result, and for all marks of a step that it has timed
    itself.
    """
    if log.issued is None:
        yield from repeat(NO_TIME, len(log.what))
        return
    queued = _queued(log, lags)
    peak = max(filter(math.isfinite, queued), default=0.0)
    most = min(MOST_QUEUED, PEAK_FRAC * peak)
    pace, asked, own_ns = _Pace(), log.issued.host_ns, chain(log.own_ns, repeat(0))
    for event, lag_ns, launches in zip(log.events, lags, queued, strict=True):
        took_ns = NO_TIME
        if lag_ns != NO_TIME:
            took_ns = pace.reach(asked[event], lag_ns, is_ahead=launches > most)
        elif event == NO_TIME:
            pace.lag_ns = NO_TIME
        pace.ours_ns += next(own_ns)
        yield took_ns


@dataclass(slots=True)
class _Pace:
    """The mark before, and how long our hooks held the host up since."""

    asked_ns: int = 0
    lag_ns: int = NO_TIME
    ours_ns: int = 0

    def reach(self, asked_ns: int, lag_ns: int, *, is_ahead: bool) -> int:
        """Return the host's time since the mark before; with ``is_ahead`` the queue may be full."""
        before_ns, whole_ns = self.lag_ns, asked_ns - self.asked_ns
        took_ns = max(0, whole_ns - self.ours_ns)
        self.asked_ns, self.lag_ns, self.ours_ns = asked_ns, lag_ns, 0
        if before_ns == NO_TIME:
            return NO_TIME
        if waits_for_host(before_ns, lag_ns, whole_ns + lag_ns - before_ns):
            return took_ns
        # One that the device has overtaken meanwhile may have asked for what it had to do.
        has_waited = CAUGHT_UP_NS < before_ns <= whole_ns
        return NO_TIME if is_ahead or has_waited else took_ns


@dataclass(slots=True)
class _Queue:
    """Events in order: when the device passed each, by the host's clock, and launches up to it."""

    done_ns: array[int]
    sums: array[int]
    total: int = 0
    num_passed: int = 0
    num_unknown: int = 1
    """Events that have to be passed before all that is in flight has events."""

    def launches(self, asked_ns: int) -> float:
        """Those that may be in flight now; infinite where that is not known."""
        while self.num_passed < len(self.done_ns) and self.done_ns[self.num_passed] <= asked_ns:
            self.num_passed += 1
        is_known = self.num_passed >= self.num_unknown
        return self.total - self.sums[self.num_passed - 1] if is_known else math.inf

    def add(self, done_ns: int) -> None:
        """One more event."""
        self.done_ns.append(done_ns)
        self.sums.append(self.total)


def _queued(log: StepLog, lags: Sequence[int]) -> array[float]:
    """Launches that may have been in flight at each mark; infinite where that is not known.

    What is launched before the step, and in passes whose operators are not recorded, has no events:
    nothing is known before the device is through with it.
    """
    assert log.issued is not None
    found, asked = array("d"), log.issued.host_ns
    queue, last = _Queue(array("q"), array("q")), NO_TIME
    weight, has_spans = BACKWARD_LAUNCHES, False
    for what, event, lag_ns in zip(log.what, log.events, lags, strict=True):
        code, number = split(what)
        queue.total += weight * (event != last)
        last = event
        found.append(math.inf if lag_ns == NO_TIME else queue.launches(asked[event]))
        if lag_ns != NO_TIME:
            queue.add(asked[event] + lag_ns)
        name = log.phases[number][0] if code in (Code.PHASE_BEGIN, Code.PHASE_END) else ""
        has_spans |= code <= Code.BACKWARD_END
        if event == NO_TIME:
            queue.num_unknown = len(queue.done_ns) + 1
        elif name in _PASSES and code == Code.PHASE_BEGIN:
            weight, has_spans = LAUNCHES if name == FORWARD else BACKWARD_LAUNCHES, False
        elif name in _PASSES and not has_spans:
            queue.num_unknown = len(queue.done_ns)
    return found
