"""The way to the process group's store, over a connection of our own that training never waits for.

Only the address is kept: the server may live in a worker, and a reference of ours would outlive
``destroy_process_group``.  Nothing here runs in training's thread but ``find_link``.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

CONNECT_S = 5.0
"""Within which a server that is there takes a connection."""
ANSWER_S = 30.0
"""The same for the store's client, which may look up names first: seconds where DNS is slow."""


class StoreLink:
    """Opens short connections; ``key`` in front of all names tells one launch from another."""

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
        """A store that can be asked; raises ``OSError`` or ``RuntimeError`` where there is none."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        store = self._store
        if self._address is not None:
            # The client of the store tries again and again, and prints whole stacks: ask first.
            socket.create_connection(self._address, timeout=CONNECT_S).close()
            host, port = self._address
            timeout = timedelta(seconds=ANSWER_S)
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(f"forerun/{self._key}", store)


def find_link(key: str) -> StoreLink | None:
    """The link to the store of this process's default group; None where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Any = None
    with suppress(AttributeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store
    return None if store is None else StoreLink(store, key)


def values(store: Any, names: list[str]) -> list[bytes] | None:
    """The values of all names, None where one of them is not there: it is never waited for."""
    if not store.check(names):
        return None
    try:
        return store.multi_get(names)
    except (AttributeError, RuntimeError):
        return [store.get(name) for name in names]
