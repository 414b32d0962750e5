"""Attributes of a host that stand replaced for as long as it trains."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..session.session import Session


class Replaced:
    """Replaces attributes, and puts back what is still ours."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._depths: Counter[str] = Counter()
        self._saved: list[tuple[Any, str, Any, Any]] = []

    def bracket(self, owner: Any, name: str, label: str) -> None:
        """Tell the session how long ``owner.name`` takes; calls inside each other are one."""
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._depths[label] += 1
            if self._depths[label] == 1:
                self._session.begin_bracket(label)
            try:
                return original(*args, **kwargs)
            finally:
                self._depths[label] -= 1
                if not self._depths[label]:
                    self._session.end_bracket(label)

        self.put(owner, name, wrapper)

    def put(self, owner: Any, name: str, value: Callable[..., Any]) -> None:
        """``owner.name`` is ``value`` until ``remove``."""
        self._saved.append((owner, name, vars(owner).get(name), value))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Put everything back; what another has replaced meanwhile stays his."""
        while self._saved:
            owner, name, original, value = self._saved.pop()
            if vars(owner).get(name) is not value:
                continue
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
