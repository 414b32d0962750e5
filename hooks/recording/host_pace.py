"""How far a device is behind its host at each mark of a step, and the host's own pace between two.

A device runs what the host has asked for, some microseconds later, and the later the more the host
is ahead.  Where it is not ahead, the device waits for it: what passes there between two marks is
the host's time, the same for other sizes, and our own work on the host is part of it.

The two clocks have no common zero.  But a device never runs before it was asked: the least that it
is behind is next to nothing, if it has caught up with the host at all.  Where it has not, how far
it was when the step had ended says so.

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
from ..sensors.stopwatch import NO_TIME, STEP_STREAM

MOST_QUEUED = 1024
"""Launches that CUDA holds before the host has to wait."""
LAUNCHES, BACKWARD_LAUNCHES = 4, 8
"""Those that an event stands for, itself among them, in forward and other passes: twice as many as
in layers of Megatron that launch every kernel alone."""
PEAK_FRAC = 0.5
"""Share of the most that a step has in flight: a queue that has ever been full is not at that."""
_PASSES = frozenset({FORWARD, BACKWARD})
CAUGHT_UP_NS = 20_000
"""A device that is no further behind has caught up.  From a launch to its begin it takes 3 to
10 us (9.6 us between short kernels that are waited for, 3.8 us in a row: NVIDIA's blog "Getting
Started with CUDA Graphs", 2019), an event is read to 0.5 us (CUDA's manual), and both scatter."""
DRIFT_FRAC = 1e-4
"""The clocks of host and device run apart by no more: crystals are sold within 50 ppm, each."""


_HIDDEN_FRAC = 0.5
"""Share of the host's time between two marks: the device had less than that still to do."""


def waits_for_host(before_ns: int, after_ns: int, passed_ns: int) -> bool:
    """True where a device kept pace with its host between two marks, ``passed_ns`` apart on it.

    It was ``before_ns`` and then ``after_ns`` behind: no more than its last kernels may take beside
    what the host took.  A queue that is full is further behind, and one that fills up falls behind.
    A host that itself has waited for a result looks the same.

    >>> waits_for_host(0, 10_000, 40_000), waits_for_host(0, 150_000, 200_000)
    (True, False)
    """
    host_ns = passed_ns + before_ns - after_ns
    return max(before_ns, after_ns) <= max(CAUGHT_UP_NS, _HIDDEN_FRAC * host_ns)


def lags_of(log: StepLog) -> array[int]:
    """Nanoseconds that the device was behind the host at each mark of a resolved step.

    ``NO_TIME`` for a mark on another stream, or without a time; empty where nothing is known of the
    host's times, as in a step that the host itself has timed.
    """
    if log.issued is None:
        return array("q")
    asked, late = log.issued.host_ns, log.issued.late
    lags = array("q", [NO_TIME]) * len(log.marks)
    places, bounds = array("l"), array("d")
    rows = zip(log.marks, log.events, log.streams, strict=True)
    for place, (mark, event, stream) in enumerate(rows):
        if mark != NO_TIME and stream == STEP_STREAM:
            lags[place] = behind = mark - asked[event]
            places.append(place)
            # The first that had not happened was this far behind, or further.
            bounds.append(behind - (log.issued.asked_ns - asked[event]) * (event == late))
    times = [log.marks[place] for place in places]
    # Forwards, then backwards: no zero is above what a mark nearby allows.
    bounds = _least_so_far(times, bounds)
    bounds = _least_so_far(times[::-1], bounds[::-1])[::-1]
    for place, zero in zip(places, bounds, strict=True):
        lags[place] = max(0, lags[place] - round(zero))
    return lags


def _least_so_far(times_ns: Sequence[int], bounds: array[float]) -> array[float]:
    """The least bound up to each time; it grows from there as the clocks run apart."""
    found = array("d")
    least, before_ns = math.inf, 0
    for time_ns, bound in zip(times_ns, bounds, strict=True):
        least = min(bound, least + DRIFT_FRAC * abs(time_ns - before_ns))
        before_ns = time_ns
        found.append(least)
    return found


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
