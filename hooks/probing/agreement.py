"""All ranks or none: whether to join a collective of ours, agreed without a collective.

A collective that one rank does not join hangs the others, and on a group of training it would also
be taken for training's next one.  So ranks meet at the store of their rendezvous first: the last to
arrive writes ``yes``, one that is out of patience or not able writes ``no``, and the first write
stands (compare and set).  ``yes`` means that every rank is inside this call; one that never comes
costs the others their patience once.  Nothing here waits inside the store, which other threads use.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..process.store_link import Store

YES, NO = "yes", "no"
_PAUSE_S = 0.0005
_PAUSE_PER_RANK_S = 0.00002
"""So that the store answers at most some 50,000 questions a second."""


class Agreement:
    """One meeting after the other, each under a name that is used once."""

    def __init__(
        self,
        store: Store,
        *,
        prefix: str,
        num_ranks: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._num_ranks = num_ranks
        self._clock = clock
        self._sleep = sleep

    def meet(self, name: str, vote: str, *, patience_s: float) -> bool:
        """True on all ranks where all came in time with the same vote; else False on all."""
        outcome = self._key(name, "outcome")
        voted = self._store.compare_set(self._key(name, "vote"), "", vote)
        if voted.decode() != vote:
            return self._settle(outcome, NO)
        if self._store.add(self._key(name, "count"), 1) >= self._num_ranks:
            return self._settle(outcome, YES)
        deadline = self._clock() + patience_s
        while not self._store.check([outcome]):
            if self._clock() > deadline:
                return self._settle(outcome, NO)
            self._sleep(_PAUSE_S + _PAUSE_PER_RANK_S * self._num_ranks)
        return self._settle(outcome, NO)

    def refuse(self, name: str) -> None:
        """Say no for all ranks, without waiting for any."""
        self._settle(self._key(name, "outcome"), NO)

    def _key(self, name: str, part: str) -> str:
        return f"forerun/{self._prefix}/{name}/{part}"

    def _settle(self, key: str, wish: str) -> bool:
        """What stands, once this rank's wish has been put forward."""
        return self._store.compare_set(key, "", wish).decode() == YES
