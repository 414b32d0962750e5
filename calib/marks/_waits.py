"""Times of the transfers of one step, in arrays: begin of the call, time waited, end.

Also the device's lag behind its host at each mark of a step, and the host's time between marks.

A device runs work some microseconds after the host has launched it, and later if the host is
ahead.  If the host is not ahead, the device waits for it: the time between two marks is then the
host's, the same for other sizes, and includes our own work on the host.

The two clocks have no common zero.  But a device never runs work before its launch: the minimum
lag is almost zero, if the device has caught up with the host at all.  If it has not, its lag at
the end of the step bounds the zero.

The host's clock is read with every event.  While a device is busy the host runs ahead of it, at
its own pace, until the device's queue is full; from there on it is as slow as the device.  The
queue's length follows from the events that the device has not passed yet, each with the launches
around it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat

from ..records.record_kinds import BACKWARD, FORWARD
from .step_marks import NO_TIME, STEP_STREAM, Code, StepMarks, unpack_mark

BLOCKED_NS = 20_000
"""Least wait that blocked: a shorter one had its transfer complete, and the call itself takes some
microseconds."""
_SOON_NS = 5_000
"""Least time between a call and its wait that indicates work of the stream in between."""
_UNSEEN = -1
_AFTER_NS = 2_000
"""Tolerance for a wait's end that is marked before the end of its transfer, because of rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """Times of one transfer; ``is_known`` if ``end_ns`` is its end and not merely an upper
    bound."""

    issue_ns: int
    end_ns: int
    exposed_ns: int
    is_sync: bool
    is_known: bool
    is_broken: bool
    """True if the clock has jumped back meanwhile, or a mark has no time."""
    is_aside: bool = False
    """True if it was called or awaited on a stream other than the step's; ``exposed_ns`` only
    counts waits of the step's stream."""


class Waits:
    """Known times of each transfer: its call, then its waits.

    ``num_open`` counts waits of the step's own stream; those of other streams delay nothing.
    """

    def __init__(self, num_transfers: int, *, is_host: bool = True) -> None:
        self._is_host = is_host
        self.num_open = 0
        self._num_waits = bytearray(num_transfers)
        self._is_sync = bytearray(num_transfers)
        self._is_aside = bytearray(num_transfers)
        self._issue, self._begin, self._end, self._exposed, self._blocked = (
            array("q", [0]) * num_transfers for _ in range(5)
        )
        self._jumps = array("i", [0]) * num_transfers
        self._last_jumps = array("i", [_UNSEEN]) * num_transfers

    def begin(
        self, number: int, now_ns: int, num_jumps: int, *, is_next: bool, is_aside: bool = False
    ) -> None:
        """Begin the call or a wait; ``is_next`` if no mark lies between it and the call."""
        self.num_open += not is_aside
        self._is_aside[number] |= is_aside
        if self._last_jumps[number] == _UNSEEN:
            self._issue[number] = now_ns
            self._jumps[number] = self._last_jumps[number] = num_jumps
        elif is_next and self._num_waits[number] == 1:
            # On the host the time in between is our own; a stream does not have such time.
            is_soon = self._is_host or now_ns - self._end[number] <= _SOON_NS
            self._is_sync[number] |= is_soon
        self._begin[number] = now_ns

    def end(
        self, number: int, now_ns: int, num_jumps: int, *, is_done: bool, is_aside: bool = False
    ) -> None:
        """End the call or a wait; ``is_done`` if the call has left nothing to wait for."""
        self.num_open = max(0, self.num_open - (not is_aside))
        if self._last_jumps[number] == _UNSEEN:
            return
        spent = max(0, now_ns - self._begin[number])
        self._exposed[number] += 0 if is_aside else spent
        self._is_sync[number] |= is_done
        count = self._num_waits[number]
        if count < 2:
            self._num_waits[number] = count + 1
            self._end[number], self._blocked[number] = now_ns, spent
            self._last_jumps[number] = num_jumps

    def times(self, number: int, now_ns: int, num_jumps: int) -> TransferTimes | None:
        """Return None if the call has not returned; ``now_ns`` is the end if nothing waited for
        it."""
        count = self._num_waits[number]
        if count == 0:
            return None
        is_sync = bool(self._is_sync[number])
        is_bounded_by_step = count == 1 and not is_sync
        last = num_jumps if is_bounded_by_step else self._last_jumps[number]
        is_blocked = count == 2 and self._blocked[number] >= BLOCKED_NS
        return TransferTimes(
            issue_ns=self._issue[number],
            end_ns=now_ns if is_bounded_by_step else self._end[number],
            exposed_ns=self._exposed[number],
            is_sync=is_sync,
            is_known=is_sync or is_blocked,
            is_broken=self._jumps[number] != last,
            is_aside=bool(self._is_aside[number]),
        )


def exposures(
    stalls: Iterable[tuple[int, int]], times: Mapping[int, TransferTimes]
) -> dict[int, int]:
    """Return by transfer how long the step's stream waited for it, in nanoseconds.

    ``stalls`` are the spans in which that stream waited for another.  Each is assigned to the
    transfer that ended last by then, and the time before that one began to those before it; no
    moment counts twice.  Only transfers whose end is known qualify.
    """
    known = [(t.end_ns, t.issue_ns, number) for number, t in times.items() if t.is_known]
    known.sort()
    ends = [end_ns for end_ns, _, _ in known]
    exposed_ns: dict[int, int] = {}
    for begin_ns, end_ns in stalls:
        _spread(begin_ns, end_ns, known, bisect_right(ends, end_ns + _AFTER_NS), exposed_ns)
    return exposed_ns


def _spread(
    begin_ns: int,
    end_ns: int,
    known: Sequence[tuple[int, int, int]],
    place: int,
    exposed_ns: dict[int, int],
) -> None:
    """Distribute one stall over the transfers before ``place``, the last one first."""
    while place > 0 and end_ns > begin_ns:
        place -= 1
        done_ns, issue_ns, number = known[place]
        if done_ns <= begin_ns:
            return
        high_ns, low_ns = min(end_ns, done_ns), max(begin_ns, issue_ns)
        if low_ns < high_ns:
            exposed_ns[number] = exposed_ns.get(number, 0) + high_ns - low_ns
            end_ns = low_ns


MOST_QUEUED = 1024
"""Launches that CUDA queues before the host has to wait."""
LAUNCHES, BACKWARD_LAUNCHES = 4, 8
"""Launches per event, including itself, in forward and other passes: twice the number in layers of
Megatron that launch every kernel separately."""
PEAK_FRAC = 0.5
"""Share of a step's peak in flight below which the queue cannot be full, if it ever was."""
_PASSES = frozenset({FORWARD, BACKWARD})
CAUGHT_UP_NS = 20_000
"""Largest lag of a device that has caught up.  From a launch to its begin it takes 3 to 10 us (9.6
us between short kernels that are waited for, 3.8 us in a row: NVIDIA's blog "Getting Started with
CUDA Graphs", 2019), an event is read to 0.5 us (CUDA's manual), and both scatter."""
DRIFT_FRAC = 1e-4
"""Upper bound on the drift between host and device clock: crystals are sold within 50 ppm, each."""


_HIDDEN_FRAC = 0.5
"""Share of the host's time between two marks that a device may lag and still count as waiting."""


def waits_for_host(before_ns: int, after_ns: int, passed_ns: int) -> bool:
    """Return True if a device kept pace with its host between two marks, ``passed_ns`` apart on it.

    Its lag was ``before_ns`` and then ``after_ns``: no more than its last kernels may take during
    the host's time.  With a full queue it lags more, and while the queue fills up the lag grows.  A
    host that itself has waited for a result looks the same.

    >>> waits_for_host(0, 10_000, 40_000), waits_for_host(0, 150_000, 200_000)
    (True, False)
    """
    host_ns = passed_ns + before_ns - after_ns
    return max(before_ns, after_ns) <= max(CAUGHT_UP_NS, _HIDDEN_FRAC * host_ns)


def lags_of(log: StepMarks) -> array[int]:
    """Return the nanoseconds that the device lagged behind the host at each mark of a resolved
    step.

    ``NO_TIME`` for a mark on another stream or without a time; empty if the host's times are
    unknown, as in a step timed by the host itself.
    """
    if log.issued is None:
        return array("q")
    host_ns, late = log.issued.host_ns, log.issued.late
    lags = array("q", [NO_TIME]) * len(log.marks)
    places, bounds = array("l"), array("d")
    rows = zip(log.marks, log.events, log.streams, strict=True)
    for place, (mark, event, stream) in enumerate(rows):
        if mark != NO_TIME and stream == STEP_STREAM:
            lags[place] = behind = mark - host_ns[event]
            places.append(place)
            # The first event that had not happened yet lagged at least this much.
            bounds.append(behind - (log.issued.queried_ns - host_ns[event]) * (event == late))
    times = [log.marks[place] for place in places]
    # Forwards, then backwards: no zero exceeds the bound of a mark nearby.
    bounds = _least_so_far(times, bounds)
    bounds = _least_so_far(times[::-1], bounds[::-1])[::-1]
    for place, zero in zip(places, bounds, strict=True):
        lags[place] = max(0, lags[place] - round(zero))
    return lags


def _least_so_far(times_ns: Sequence[int], bounds: array[float]) -> array[float]:
    """Return the least bound up to each time, relaxed over time by the clocks' drift."""
    least_bounds = array("d")
    least, before_ns = math.inf, 0
    for time_ns, bound in zip(times_ns, bounds, strict=True):
        least = min(bound, least + DRIFT_FRAC * abs(time_ns - before_ns))
        before_ns = time_ns
        least_bounds.append(least)
    return least_bounds


def host_times(log: StepMarks, lags: Sequence[int]) -> Iterator[int]:
    """Yield the host's nanoseconds from the previous mark to each mark of a resolved step.

    Our own hooks are excluded.  ``lags`` are those of ``lags_of``.  ``NO_TIME`` if the host may
    have waited for space in the queue or for a result, and for all marks of a step timed by the
    host itself.
    """
    if log.issued is None:
        yield from repeat(NO_TIME, len(log.what))
        return
    queued = _queued(log, lags)
    peak = max(filter(math.isfinite, queued), default=0.0)
    most = min(MOST_QUEUED, PEAK_FRAC * peak)
    pace, host_ns, hook_times_ns = _Pace(), log.issued.host_ns, chain(log.hook_times_ns, repeat(0))
    for event, lag_ns, launches in zip(log.events, lags, queued, strict=True):
        took_ns = NO_TIME
        if lag_ns != NO_TIME:
            took_ns = pace.reach(host_ns[event], lag_ns, is_ahead=launches > most)
        elif event == NO_TIME:
            pace.lag_ns = NO_TIME
        pace.ours_ns += next(hook_times_ns)
        yield took_ns


@dataclass(slots=True)
class _Pace:
    """The previous mark, and the time of our hooks on the host since."""

    issued_ns: int = 0
    lag_ns: int = NO_TIME
    ours_ns: int = 0

    def reach(self, issued_ns: int, lag_ns: int, *, is_ahead: bool) -> int:
        """Return the host's time since the previous mark; with ``is_ahead`` the queue may be
        full."""
        before_ns, whole_ns = self.lag_ns, issued_ns - self.issued_ns
        took_ns = max(0, whole_ns - self.ours_ns)
        self.issued_ns, self.lag_ns, self.ours_ns = issued_ns, lag_ns, 0
        if before_ns == NO_TIME:
            return NO_TIME
        if waits_for_host(before_ns, lag_ns, whole_ns + lag_ns - before_ns):
            return took_ns
        # If the device has caught up meanwhile, the host may have waited for its result.
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
    """Events to be passed before all launches in flight have events."""

    def launches(self, issued_ns: int) -> float:
        """Return the launches that may be in flight now; infinite if unknown."""
        while self.num_passed < len(self.done_ns) and self.done_ns[self.num_passed] <= issued_ns:
            self.num_passed += 1
        is_known = self.num_passed >= self.num_unknown
        return self.total - self.sums[self.num_passed - 1] if is_known else math.inf

    def add(self, done_ns: int) -> None:
        """Append an event."""
        self.done_ns.append(done_ns)
        self.sums.append(self.total)


def _queued(log: StepMarks, lags: Sequence[int]) -> array[float]:
    """Return the launches that may have been in flight at each mark; infinite if unknown.

    Launches before the step, and in passes whose operators are not recorded, have no events: the
    number is unknown until the device has completed them.
    """
    assert log.issued is not None
    in_flight, host_ns = array("d"), log.issued.host_ns
    queue, last = _Queue(array("q"), array("q")), NO_TIME
    weight, has_spans = BACKWARD_LAUNCHES, False
    unwatched = [*accumulate(not each for each in log.site_weights)]
    num_before = 0
    for what, event, lag_ns in zip(log.what, log.events, lags, strict=True):
        code, number = unpack_mark(what)
        queue.total += weight * (event != last)
        last = event
        if unwatched and code <= Code.BACKWARD_END:
            # Layers in between had no events: as many as those that were watched.
            site = log.span_sites[number]
            queue.total += 2 * weight * abs(unwatched[site] - num_before)
            num_before = unwatched[site]
        in_flight.append(math.inf if lag_ns == NO_TIME else queue.launches(host_ns[event]))
        if lag_ns != NO_TIME:
            queue.add(host_ns[event] + lag_ns)
        name = log.phases[number][0] if code in (Code.PHASE_BEGIN, Code.PHASE_END) else ""
        has_spans |= code <= Code.BACKWARD_END
        if event == NO_TIME:
            queue.num_unknown = len(queue.done_ns) + 1
        elif name in _PASSES and code == Code.PHASE_BEGIN:
            weight, has_spans = LAUNCHES if name == FORWARD else BACKWARD_LAUNCHES, False
        elif name in _PASSES and not has_spans:
            queue.num_unknown = len(queue.done_ns)
    return in_flight
