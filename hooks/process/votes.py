"""Agreement of all ranks or none, by votes at the store without a collective.

A collective that one rank does not join hangs the others, and on a group of training it would also
be matched with training's next one.  So each question has one outcome, whose first write wins
(compare and set): the last rank to accept writes ``yes``, and one that refuses or times out writes
``no`` and why.  ``yes`` means that every rank has accepted, and that none can have read anything
else.  Nothing here waits inside the store, which other threads use.

The store is reached over a private connection that training never waits for.  Only its address is
stored: the server may live in a rank, and a reference of ours would outlive
``destroy_process_group``.  Only ``find_link`` runs in training's thread.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


YES = "yes"
LATE = "late"
_NO = "no: "
_PAUSE_S = 0.0005
_PAUSE_PER_RANK_S = 0.00002
"""Pause per rank, which limits the store to some 50,000 requests a second."""


class Votes:
    """Sequence of questions, each under a number that is used once."""

    def __init__(self, store: Store, prefix: str, *, num_ranks: int) -> None:
        self._store = store
        self._prefix = prefix
        self._num_ranks = num_ranks

    def propose(self, number: int, text: str) -> str:
        """Write a text for all ranks if there is none yet, and return the one that stands."""
        return self._settle(number, "proposal", text)

    def proposal(self, number: int) -> str:
        """Return the proposal under this number; empty if there is none yet."""
        return self._read(number, "proposal")

    def accept(self, number: int) -> str:
        """Accept on this rank, and return the outcome; empty if not settled."""
        if self._store.add(self._key(number, "count"), 1) >= self._num_ranks:
            return self._settle(number, "outcome", YES)
        return self.outcome(number)

    def refuse(self, number: int, why: str) -> str:
        """Refuse for all ranks, and return the outcome, which may be an earlier acceptance by
        all."""
        return self._settle(number, "outcome", _NO + why)

    def outcome(self, number: int) -> str:
        """Return the outcome; empty if there is none yet."""
        return self._read(number, "outcome")

    def meet(self, number: int, text: str, *, patience_s: float) -> bool:
        """Return True on all ranks if all came in time with the same text, else False on all.

        On True every rank is inside this call; one that never comes costs the others ``patience_s``
        once.
        """
        if self.propose(number, text) != text:
            return self.refuse(number, "plans differ") == YES
        deadline_s = time.monotonic() + patience_s
        outcome = self.accept(number)
        while not outcome:
            if time.monotonic() > deadline_s:
                outcome = self.refuse(number, LATE)
            else:
                time.sleep(_PAUSE_S + _PAUSE_PER_RANK_S * self._num_ranks)
                outcome = self.outcome(number)
        return outcome == YES

    def _key(self, number: int, part: str) -> str:
        return f"{self._prefix}/{number}/{part}"

    def _read(self, number: int, part: str) -> str:
        key = self._key(number, part)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _settle(self, number: int, part: str, wish: str) -> str:
        return self._store.compare_set(self._key(number, part), "", wish).decode()


def refusal_reason(outcome: str) -> str:
    """Return the reason of a refusal.

    >>> refusal_reason("no: late")
    'late'
    """
    return outcome.removeprefix(_NO)


CONNECT_S = 5.0
"""Timeout for connecting to the store's server."""
ANSWER_S = 30.0
"""Timeout of the store's client, which may look up names first: seconds with slow DNS."""


class StoreLink:
    """Factory of short connections; ``key`` prefixes all names, so that launches stay separate."""

    def __init__(self, store: Any, key: str) -> None:
        from torch._C._distributed_c10d import TCPStore

        self._key = key
        self._address: tuple[str, int] | None = None
        self._store: Any = None
        if isinstance(store, TCPStore):
            self._address = (store.host, store.port)
        else:
            self._store = store

    def connect(self) -> Any:
        """Return a connected store; raises ``OSError`` or ``RuntimeError`` if there is none."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = self._store
        if self._address is not None:
            # The store's client retries repeatedly and prints stack traces: test the address first.
            socket.create_connection(self._address, timeout=CONNECT_S).close()
            host, port = self._address
            timeout = timedelta(seconds=ANSWER_S)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(f"forerun/{self._key}", store)


def find_link(key: str) -> StoreLink | None:
    """Return the link to the store of this process's default group; None if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Any = None
    with suppress(AttributeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    return None if store is None else StoreLink(store, key)


def read_values(store: Any, names: list[str]) -> list[bytes] | None:
    """Return the values of all names; None, without waiting, if one is missing."""
    if not store.check(names):
        return None
    try:
        return store.multi_get(names)
    except (AttributeError, RuntimeError):
        return [store.get(name) for name in names]
