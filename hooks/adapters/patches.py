"""Replace a function of the host by one that does ours around it; the host's own always runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)


class Patches:
    """Which seams of a host were found, and which were not: what is lost is said once by name."""

    def __init__(self) -> None:
        self.found: dict[str, bool] = {}
        """Seam, as ``module.name``, to whether this release of the host has it."""

    @property
    def unseen(self) -> tuple[str, ...]:
        """Names for the coverage: the seams that are missing."""
        return tuple(f"seam:{name}" for name, is_there in self.found.items() if not is_there)

    def note(self, owner: Any, name: str, is_there: bool, lost: str) -> bool:
        """Keep whether ``owner.name`` is there; where it is not, say what is lost."""
        seam = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        if not is_there and self.found.get(seam) is not False:
            _log.warning("[forerun] seam %s is missing: %s; training goes on", seam, lost)
        self.found[seam] = is_there
        return is_there


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
