"""Replace a function of the host by one that does ours around it; the host's own always runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(
    owner: Any, name: str, before: Callable[..., object], after: Callable[..., object]
) -> bool:
    """Call ``before()`` and ``after()`` around ``owner.name``; False where there is no such name.

    Both must be protected by a guard: they run inside training.
    """
    original = getattr(owner, name, None)
    if original is None:
        return False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return original(*args, **kwargs)
        finally:
            after()

    setattr(owner, name, wrapper)
    return True


def bracket(session: Any, owner: Any, name: str, label: str) -> bool:
    """Tell the session how long ``owner.name`` takes, under ``label``."""
    return around(
        owner,
        name,
        functools.partial(session.begin_bracket, label),
        functools.partial(session.end_bracket, label),
    )
