"""Times of the transfers of one step, in arrays: when called, how long waited for, when over."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BLOCKED_NS = 20_000
"""A wait that took less found its transfer complete: the call itself takes some microseconds."""
_SOON_NS = 5_000
"""A stream on which so much passes between a call and its wait has had work in between."""
_UNSEEN = -1
_AFTER_NS = 2_000
"""The end of a wait may be marked so much before the end of what was waited for: rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """One transfer; ``is_known`` where ``end_ns`` is its end and not merely after it."""

    issue_ns: int
    end_ns: int
    exposed_ns: int
    is_sync: bool
    is_known: bool
    is_broken: bool
    """The clock has jumped back meanwhile, or a mark has no time."""
    is_aside: bool = False
    """It was called or waited for on another stream than the step's: exposed is what that waited.
    """


class Waits:
    """What is known of each transfer: its call, then its waits.

    ``num_open`` waits of the step's own stream last now; those of others hold nothing up.
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
        """The call begins, or a wait; ``is_next``: nothing has happened since the call."""
        self.num_open += not is_aside
        self._is_aside[number] |= is_aside
        if self._last_jumps[number] == _UNSEEN:
            self._issue[number] = now_ns
            self._jumps[number] = self._last_jumps[number] = num_jumps
        elif is_next and self._num_waits[number] == 1:
            # On the host what lies between is our own time; a stream has none of that.
            is_soon = self._is_host or now_ns - self._end[number] <= _SOON_NS
            self._is_sync[number] |= is_soon
        self._begin[number] = now_ns

    def end(
        self, number: int, now_ns: int, num_jumps: int, *, is_done: bool, is_aside: bool = False
    ) -> None:
        """The rank goes on; ``is_done`` says that the call has left nothing to wait for."""
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
        """None where the call has not come back; ``now_ns`` bounds what nobody has waited for."""
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
    """By transfer, how long the step's stream stood still for it, in nanoseconds.

    ``stalls`` are when that stream waited for another.  What it waited for is the transfer that
    ended last by then, and before that one began those before it; no moment counts twice.  Only
    transfers whose end is known can be the reason.
    """
    known = [(t.end_ns, t.issue_ns, number) for number, t in times.items() if t.is_known]
    known.sort()
    ends = [end_ns for end_ns, _, _ in known]
    found: dict[int, int] = {}
    for begin_ns, end_ns in stalls:
        _spread(begin_ns, end_ns, known, bisect_right(ends, end_ns + _AFTER_NS), found)
    return found


def _spread(
    begin_ns: int,
    end_ns: int,
    known: Sequence[tuple[int, int, int]],
    place: int,
    found: dict[int, int],
) -> None:
    """Give one stall to the transfers before ``place``, the last one first."""
    while place > 0 and end_ns > begin_ns:
        place -= 1
        done_ns, issue_ns, number = known[place]
        if done_ns <= begin_ns:
            return
        high_ns, low_ns = min(end_ns, done_ns), max(begin_ns, issue_ns)
        if low_ns < high_ns:
            found[number] = found.get(number, 0) + high_ns - low_ns
            end_ns = low_ns
