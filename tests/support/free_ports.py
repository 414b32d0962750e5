"""Ports for process groups of tests that run in several processes at the same time."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

# At random: several processes count at the same time.
_PORTS = itertools.count(12_000 + int.from_bytes(os.urandom(4), "big") % 15_000)


def free_port() -> int:
    """Return an unused port below the ephemeral range."""
    while True:
        port = next(_PORTS)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
