"""Calls of modules, seen where torch makes them: nothing is put into a module, a class or a copy.

While anything is watched, ``torch.nn.Module._call_impl`` is a stand-in that knows the watched
modules by identity.  A copy is another module, and is not watched; what is pickled, scripted,
exported or read by ``vars()`` is what it was.  Compared with torch's own hooks for all modules:
those cost each module of the process some 2 us a call, make ``torch.compile(model)`` warn, and are
guarded by compiled code, which is then compiled once more (tried on torch 2.13).

Methods of Megatron's that are operators and no modules: losses, copies of rows, joins of inputs.

The class's method has a stand-in during hooked steps, which knows its objects by identity: nothing
is put into them, and a copy is another object.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..process import Guard, classes, stand_in
from .captured import is_being_compiled

_NAME = "_call_impl"
_Module = torch.nn.Module


class Watch(Protocol):
    """What is done around the calls of one module.  Faults cost nothing but the watch."""

    def begin(self, module: Any) -> Any:
        """The call begins, before all hooks of torch; None where its end is of no interest."""
        ...

    def end(self, begun: Any, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """It has returned; ``begun`` is what ``begin`` gave."""
        ...

    def fail(self, begun: Any) -> None:
        """It has raised."""
        ...


MOST_CHANGES = 400 if sys.version_info >= (3, 13) else sys.maxsize
"""Python 3.13 counts how often a class has changed: after 1,000 times it looks up each attribute of
it, and of its subclasses, anew.  Before that the stand-in stays, and passes on."""
_is_traced = torch._C._get_tracing_state
"""Under ``jit.trace`` the sizes of tensors are part of what is traced."""
Entry = tuple[weakref.ref[Any], Watch, Guard]


def entries_of(watches: Iterable[tuple[Any, Watch]], guard: Guard) -> dict[int, Entry]:
    """Objects by their identity, each with what watches its calls."""
    return {id(owner): (weakref.ref(owner), watch, guard) for owner, watch in watches}


class ModuleCalls:
    """What is watched in one process, by who watches; the stand-in is there while anything is."""

    def __init__(self) -> None:
        self._watched: dict[object, dict[int, Entry]] = {}
        self._entries: dict[int, Entry] = {}
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None
        self._num_changes = 0

    def watch(self, owner: object, entries: dict[int, Entry]) -> None:
        """Watch these modules for ``owner``; who comes first is the outermost."""
        if entries:
            self._watched[owner] = entries
            self._join()
            if self._ours is None:
                self._install()

    def unwatch(self, owner: object) -> None:
        """Watch nothing for ``owner`` any more."""
        if self._watched.pop(owner, None) is not None:
            self._join()
            if not self._watched:
                self._remove()

    def _join(self) -> None:
        self._entries.clear()
        for entries in self._watched.values():
            shared = self._entries.keys() & entries.keys() if self._entries else ()
            both = {key: _both(self._entries[key], entries[key]) for key in shared}
            self._entries.update(entries)
            self._entries.update(both)

    def _install(self) -> None:
        self._num_changes += 1
        self._original = original = vars(_Module)[_NAME]
        self._ours = wrap_calls(original, self._entries)
        setattr(_Module, _NAME, self._ours)

    def _remove(self) -> None:
        """Put the original back, unless another has put his own there meanwhile: then ours, which
        he calls, has nothing to watch any more."""
        if self._num_changes >= MOST_CHANGES:
            return
        ours, self._ours = self._ours, None
        self._entries = {}
        if ours is not None and vars(_Module).get(_NAME) is ours:
            setattr(_Module, _NAME, self._original)


def wrap_calls(original: Callable[..., Any], entries: dict[int, Entry]) -> Callable[..., Any]:
    """A stand-in for a method: calls on the objects of these entries are watched."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = entries.get(id(self))
        if entry is None or entry[0]() is not self or is_being_compiled() or _is_traced():
            return original(self, *args, **kwargs)
        _, watch, guard = entry
        begun = None
        try:
            begun = watch.begin(self)
        except Exception as err:
            guard.fault(err)
        if begun is None:
            return original(self, *args, **kwargs)
        try:
            output = original(self, *args, **kwargs)
        except BaseException:
            guard.protect(watch.fail)(begun)
            raise
        try:
            watch.end(begun, self, args, kwargs, output)
        except Exception as err:
            guard.fault(err)
        return output

    return stand_in(original, call)


@dataclass(frozen=True, slots=True)
class _Both:
    """Two watches of one module; a fault of one keeps nothing from the other."""

    outer: Watch
    inner: Watch
    guard: Guard

    def begin(self, module: Any) -> Any:
        outer = self.guard.protect(self.outer.begin)(module)
        return outer, self.guard.protect(self.inner.begin)(module)

    def end(self, begun: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for watch, one in ((self.inner, begun[1]), (self.outer, begun[0])):
            if one is not None:
                self.guard.protect(watch.end)(one, module, args, kwargs, output)

    def fail(self, begun: Any) -> None:
        for watch, one in ((self.inner, begun[1]), (self.outer, begun[0])):
            if one is not None:
                self.guard.protect(watch.fail)(one)


def _both(first: Entry, second: Entry) -> Entry:
    """Where one of them is dead, its number has gone to the other."""
    if first[0]() is not second[0]():
        return second if first[0]() is None else first
    return first[0], _Both(first[1], second[1], first[2]), first[2]


CALLS = ModuleCalls()
"""Of this process."""


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
            ours = wrap_calls(original, entries)
            self._saved.append((home, name, original, ours))
            type.__setattr__(home, name, ours)

    def remove(self) -> None:
        """Put the originals back; what another has put there meanwhile stays his."""
        while self._saved:
            home, name, original, ours = self._saved.pop()
            if vars(home).get(name) is ours:
                type.__setattr__(home, name, original)
