"""Calls of modules and methods, intercepted in their class: no object is modified or copied.

While anything is watched, ``torch.nn.Module._call_impl`` is a stand-in that knows the watched
modules by identity.  A copy is another module, and is not watched; pickling, scripting, exporting
and ``vars()`` are unaffected.  torch's own hooks for all modules were rejected: they cost each
module of the process some 2 us a call, make ``torch.compile(model)`` warn, and are guarded by
compiled code, which is then recompiled (tried on torch 2.13).

Methods of Megatron's that are operators but no modules (losses, copies of rows, joins of inputs)
are intercepted likewise: their class has a stand-in during hooked steps.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch._C._dynamo import eval_frame

from ..process.guard import Guard
from ..process.inspection import classes
from ..process.stand_ins import StandIns
from .captured import is_being_compiled

_NAME = "_call_impl"
_Module = torch.nn.Module


class Watch(Protocol):
    """Observer of one module's calls.  Its faults cost nothing but the observation."""

    def begin(self, module: Any) -> Any:
        """Begin a call, before all hooks of torch; None if its end is of no interest."""
        ...

    def end(self, begun: Any, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """End a call; ``begun`` is the result of ``begin``."""
        ...

    def fail(self, begun: Any) -> None:
        """End a call that raised."""
        ...


MOST_CHANGES = 400 if sys.version_info >= (3, 13) else sys.maxsize
"""Limit on changes of the class, after which the stand-in stays installed and passes calls through.

Python 3.13 stops caching attributes of a class, and of its subclasses, after 1,000 changes.
"""
_is_traced = torch._C._get_tracing_state
"""Tracing state; under ``jit.trace`` the sizes of tensors are traced too."""
Entry = tuple[weakref.ref[Any], Watch, Guard]


def entries_of(watches: Iterable[tuple[Any, Watch]], guard: Guard) -> dict[int, Entry]:
    """Return the observed objects by identity, each with the observer of its calls."""
    return {id(owner): (weakref.ref(owner), watch, guard) for owner, watch in watches}


class ModuleCalls:
    """Watched modules of one process, by owner; the stand-in is installed while there are any."""

    def __init__(self) -> None:
        self._watched: dict[object, dict[int, Entry]] = {}
        self._entries: dict[int, Entry] = {}
        self._stand_ins = StandIns()
        self._num_changes = 0

    def watch(self, owner: object, entries: dict[int, Entry]) -> None:
        """Watch these modules for ``owner``; the first owner is the outermost."""
        if entries:
            self._num_changes += not self._watched
            self._watched[owner] = entries
            self._join()
            self._stand_ins.put(_Module, _NAME, partial(wrap_calls, entries=self._entries))

    def unwatch(self, owner: object) -> None:
        """Stop watching for ``owner``."""
        if self._watched.pop(owner, None) is not None:
            self._join()
            if not self._watched and self._num_changes < MOST_CHANGES:
                self._stand_ins.remove()
                # A stand-in that someone else has wrapped keeps none of the next step's.
                self._stand_ins, self._entries = StandIns(), {}

    def _join(self) -> None:
        self._entries.clear()
        for entries in self._watched.values():
            shared = self._entries.keys() & entries.keys() if self._entries else ()
            both = {key: _both(self._entries[key], entries[key]) for key in shared}
            self._entries.update(entries)
            self._entries.update(both)


def wrap_calls(original: Callable[..., Any], entries: dict[int, Entry]) -> Callable[..., Any]:
    """Return a function for ``stand_in`` that watches a method of the objects of these entries.

    Where torch's method only calls a module's ``forward``, ours does, in its place: the stack is as
    deep as without us.
    """
    is_torchs, of_all = _shared_hooks(original)
    first, second, third, fourth = _HOOKS

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method: Any = MethodType(original, self)
        if is_torchs and type(self).__getattribute__ is object.__getattribute__:
            get = self.__dict__.get
            is_hooked = get(first, 1) or get(second, 1) or get(third, 1) or get(fourth, 1)
            if not (is_hooked or any(of_all) or _is_traced()) and _compiler() is None:
                method = self.forward
        entry = entries.get(id(self))
        if entry is None or entry[0]() is not self or is_being_compiled() or _is_traced():
            return method(*args, **kwargs)
        _, watch, guard = entry
        begun = None
        try:
            begun = watch.begin(self)
        except Exception as err:
            guard.fault(err)
        if begun is None:
            return method(*args, **kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            guard.protect(watch.fail)(begun)
            raise
        try:
            watch.end(begun, self, args, kwargs, output)
        except Exception as err:
            guard.fault(err)
        return output

    return call


_HOOKS = ["_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"]
_OF_ALL = [f"_global{_HOOKS[number]}" for number in (1, 0, 2, 3)]
_compiler = getattr(eval_frame, "get_eval_frame_callback", bool)


def _shared_hooks(original: Any) -> tuple[bool, list[Any]]:
    """Return whether a method is torch's call of a module, which looks for the hooks known here
    first, and the hooks of all modules."""
    code = getattr(original, "__code__", None)
    names = [name for name in getattr(code, "co_names", ()) if "hook" in name]
    of_all = [vars(torch.nn.modules.module).get(name) for name in _OF_ALL]
    return names[:8] == _HOOKS + _OF_ALL, of_all


@dataclass(frozen=True, slots=True)
class _Both:
    """Two observers of one module; a fault of one does not affect the other."""

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
    """Return both entries combined; only the live one if an ``id`` was reused."""
    if first[0]() is not second[0]():
        return second if first[0]() is None else first
    return first[0], _Both(first[1], second[1], first[2]), first[2]


CALLS = ModuleCalls()
"""The watched modules of this process."""


class Methods:
    """Watched methods of some objects, between ``install`` and ``remove``."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._entries: dict[tuple[type, str], dict[int, Entry]] = {}
        self._stand_ins = StandIns()
        self.remove = self._stand_ins.remove

    def add(self, owner: Any, name: str, watch: Watch) -> None:
        """Watch a method of an object in the class that defines it."""
        home = next(cls for cls in classes(owner) if name in vars(cls))
        entries = self._entries.setdefault((home, name), {})
        entries |= entries_of([(owner, watch)], self._guard)

    def install(self) -> None:
        """Install the stand-ins, unless they are installed already."""
        for (home, name), entries in self._entries.items():
            self._stand_ins.put(home, name, partial(wrap_calls, entries=entries))
