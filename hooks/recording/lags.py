"""How far a device is behind its host at each mark of a step.

A device runs what the host has asked for, some microseconds later, and the later the more the host
is ahead.  Where it is not ahead, the device waits for it: what passes there between two marks is
the host's time, the same for other sizes, and our own work on the host is part of it.

The two clocks have no common zero.  But a device never runs before it was asked: the least that it
is behind is next to nothing, if it has caught up with the host at all.  Where it has not, how far
it was when the step had ended says so.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from ..sensors.step_log import StepLog
from ..sensors.stopwatch import NO_TIME, STEP_STREAM

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
