"""What becomes of a session in a child that training forks, such as a worker of a data loader."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def in_forked_child(owner: Any, do: Callable[[Any], object]) -> None:
    """Call ``do(owner)`` in every child forked from now on, for as long as ``owner`` lives here.

    ``do`` takes no lock: a thread may have held it at the fork.
    """
    reference = weakref.ref(owner)

    def after_fork() -> None:
        found = reference()
        if found is not None:
            with suppress(Exception):
                do(found)

    os.register_at_fork(after_in_child=after_fork)
