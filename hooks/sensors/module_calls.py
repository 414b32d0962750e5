"""Calls of modules, seen where torch makes them: nothing is put into a module, a class or a copy.

While anything is watched, ``torch.nn.Module._call_impl`` is a stand-in that knows the watched
modules by identity.  A copy is another module, and is not watched; what is pickled, scripted,
exported or read by ``vars()`` is what it was.  Compared with torch's own hooks for all modules:
those cost each module of the process some 2 us a call, make ``torch.compile(model)`` warn, and are
guarded by compiled code, which is then compiled once more (tried on torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ..process.guard import Guard
from ..process.stand_in import stand_in
from .regions import is_being_compiled

_NAME = "_call_impl"
_Module = torch.nn.Module


class Watch(Protocol):
    """What is done around the calls of one module.  Faults cost nothing but the watch."""

    def begin(self, module: Any) -> Any:
        """The call begins, before all hooks of torch; what it returns goes to the end."""
        ...

    def end(self, begun: Any, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """It has returned."""
        ...

    def fail(self, begun: Any) -> None:
        """It has raised."""
        ...


_is_traced = torch._C._get_tracing_state
"""Under ``jit.trace`` the sizes of tensors are part of what is traced."""
Entry = tuple[weakref.ref[Any], tuple[tuple[Watch, Guard], ...]]


class ModuleCalls:
    """The watches of one process; the stand-in is there while there is one."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._original: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def watch(self, watches: Iterable[tuple[Any, Watch]], guard: Guard) -> None:
        """Watch the calls of each module; the first that watches a module is the outermost."""
        for module, watch in watches:
            known = self._entries.get(id(module))
            before = known[1] if known is not None and known[0]() is module else ()
            self._entries[id(module)] = (weakref.ref(module), (*before, (watch, guard)))
        if self._entries and self._ours is None:
            self._install()

    def unwatch(self, guard: Guard, *kinds: type) -> None:
        """Take back what was watched under this guard by watches of these classes."""
        for key, (reference, watches) in list(self._entries.items()):
            rest = tuple(w for w in watches if w[1] is not guard or type(w[0]) not in kinds)
            if rest and reference() is not None:
                self._entries[key] = (reference, rest)
            else:
                del self._entries[key]
        if not self._entries:
            self._remove()

    def _install(self) -> None:
        self._original = original = vars(_Module)[_NAME]
        self._ours = watching(original, self._entries)
        setattr(_Module, _NAME, self._ours)

    def _remove(self) -> None:
        """Put the original back, unless another has put his own there meanwhile: then ours, which
        he calls, has nothing to watch any more."""
        ours, self._ours = self._ours, None
        self._entries = {}
        if ours is not None and vars(_Module).get(_NAME) is ours:
            setattr(_Module, _NAME, self._original)


def watching(original: Callable[..., Any], entries: dict[int, Entry]) -> Callable[..., Any]:
    """A stand-in for a method: calls on the objects of these entries are watched."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = entries.get(id(self))
        if entry is None or entry[0]() is not self or is_being_compiled() or _is_traced():
            return original(self, *args, **kwargs)
        begun: list[Any] = []
        for watch, guard in entry[1]:
            try:
                begun.append(watch.begin(self))
            except Exception as err:
                begun.append(None)
                guard.fault(err)
        try:
            output = original(self, *args, **kwargs)
        except BaseException:
            for (watch, guard), token in zip(entry[1], begun, strict=True):
                guard.protect(watch.fail)(token)
            raise
        for (watch, guard), token in zip(reversed(entry[1]), reversed(begun), strict=True):
            try:
                watch.end(token, self, args, kwargs, output)
            except Exception as err:
                guard.fault(err)
        return output

    return stand_in(original, call)


CALLS = ModuleCalls()
"""Of this process."""
