"""Methods of Megatron's that are operators and no modules: losses, copies of rows, joins of inputs.

The class's method has a stand-in during hooked steps, which knows its objects by identity: nothing
is put into them, and a copy is another object.
"""

from __future__ import annotations

from typing import Any

from ..process.guard import Guard
from ..process.looking import classes
from .module_calls import Entry, Watch, entries_of, watching


class Methods:
    """The watched methods of some objects, between ``install`` and ``remove``."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._entries: dict[tuple[type, str], dict[int, Entry]] = {}
        self._saved: list[tuple[type, str, Any, Any]] = []

    def add(self, owner: Any, name: str, watch: Watch) -> None:
        """Watch a method of an object where its class has it from."""
        home = next(cls for cls in classes(owner) if name in vars(cls))
        entries = self._entries.setdefault((home, name), {})
        entries |= entries_of([(owner, watch)], self._guard)

    def install(self) -> None:
        """Put the stand-ins in; does nothing where they are."""
        if self._saved:
            return
        for (home, name), entries in self._entries.items():
            original = vars(home)[name]
            ours = watching(original, entries)
            self._saved.append((home, name, original, ours))
            type.__setattr__(home, name, ours)

    def remove(self) -> None:
        """Put the originals back; what another has put there meanwhile stays his."""
        while self._saved:
            home, name, original, ours = self._saved.pop()
            if vars(home).get(name) is ours:
                type.__setattr__(home, name, original)
