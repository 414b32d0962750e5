"""Times of the transfers of one step, in arrays: when called, how long waited for, when over."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

BLOCKED_NS = 20_000
"""A wait that took less found its transfer complete: the call itself takes some microseconds."""
_UNSEEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimes:
    """One transfer; ``is_known`` where ``end_ns`` is its end and not merely after it."""

    issue_ns: int
    end_ns: int
    exposed_ns: int
    is_sync: bool
    is_known: bool
    is_broken: bool
    """The clock has jumped back meanwhile."""


class Waits:
    """What is known of each transfer: its call, then its waits.  ``num_open`` waits last now."""

    def __init__(self, num_transfers: int) -> None:
        self.num_open = 0
        self._num_waits = bytearray(num_transfers)
        self._is_sync = bytearray(num_transfers)
        self._issue, self._begin, self._end, self._exposed, self._blocked = (
            array("q", [0]) * num_transfers for _ in range(5)
        )
        self._jumps = array("i", [0]) * num_transfers
        self._last_jumps = array("i", [_UNSEEN]) * num_transfers

    def begin(self, number: int, now_ns: int, num_jumps: int, *, is_next: bool) -> None:
        """The call begins, or a wait; ``is_next``: nothing has happened since the call."""
        self.num_open += 1
        if self._last_jumps[number] == _UNSEEN:
            self._issue[number] = now_ns
            self._jumps[number] = self._last_jumps[number] = num_jumps
        elif is_next and self._num_waits[number] == 1:
            self._is_sync[number] = True
        self._begin[number] = now_ns

    def end(self, number: int, now_ns: int, num_jumps: int, *, is_done: bool) -> None:
        """The rank goes on; ``is_done`` says that the call has left nothing to wait for."""
        self.num_open = max(0, self.num_open - 1)
        if self._last_jumps[number] == _UNSEEN:
            return
        spent = max(0, now_ns - self._begin[number])
        self._exposed[number] += spent
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
        )
