"""Wrappers around functions of a host; the original function always runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..process.stand_ins import function_at, places_of, stand_in
from ..session.session import Session

_log = logging.getLogger(__name__)


def wrapped(
    original: Callable[..., Any], before: Callable[..., object], after: Callable[..., object]
) -> Callable[..., Any]:
    """Return ``original`` between ``before`` and ``after``, both called with its arguments.

    Both must be protected by a guard: they run inside training.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            after(*args, **kwargs)

    return stand_in(original, wrapper)


class Patches:
    """Attributes replaced in one host, to be restored, and places that this release lacks."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._depths: Counter[str] = Counter()
        self._saved: list[tuple[Any, str, Any, Any]] = []
        self.presence_by_place: dict[str, bool] = {}
        """Presence in this release of the host, by place (``module.name``)."""

    @property
    def unseen(self) -> tuple[str, ...]:
        """Missing places, named as in the coverage of record files."""
        return tuple(
            f"seam:{name}" for name, is_there in self.presence_by_place.items() if not is_there
        )

    def note(self, owner: Any, name: str, is_there: bool, lost: str) -> bool:
        """Record if ``owner.name`` exists; if it does not, log once which data is lost."""
        place = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        if not is_there and self.presence_by_place.get(place) is not False:
            text = "[forerun] no patch at %s, which is missing: %s; training goes on"
            _log.warning(text, place, lost)
        self.presence_by_place[place] = is_there
        return is_there

    def bracket(self, owner: Any, name: str, label: str, *, lost: str = "") -> None:
        """Report the duration of ``owner.name`` on the training thread to the session.

        Nested calls count as one.
        """
        guard = self._session.guard

        def begin(*_: Any, **__: Any) -> None:
            if guard.is_training:
                self._depths[label] += 1
                if self._depths[label] == 1:
                    self._session.begin_bracket(label)

        def end(*_: Any, **__: Any) -> None:
            if guard.is_training:
                self._depths[label] -= 1
                if not self._depths[label]:
                    self._session.end_bracket(label)

        self.around(owner, name, before=begin, after=end, lost=lost)

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] = lambda *_, **__: None,
        after: Callable[..., object] = lambda *_, **__: None,
        lost: str = "",
    ) -> None:
        """Call both around ``owner.name``, as ``wrapped`` does; log ``lost`` if it is missing."""
        original = function_at(owner, name)
        if lost:
            self.note(owner, name, original is not None, lost)
        if original is not None:
            self.put(owner, name, wrapped(original, before, after))

    def put(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        """Set ``owner.name`` to ``value``, made by ``stand_in``, until ``remove``."""
        for place in places_of(owner, name):
            self._saved.append((place, name, vars(place).get(name), value))
            setattr(place, name, value)

    def remove(self) -> None:
        """Restore all attributes, except those that someone else has replaced meanwhile."""
        while self._saved:
            owner, name, original, value = self._saved.pop()
            if vars(owner).get(name) is not value:
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
