"""Callbacks that run when a module has been imported, or at once if it already is."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .guard import place
from .stand_ins import calls_through

_log = logging.getLogger(__name__)
Callback = Callable[[ModuleType], object]
During = Callable[[], AbstractContextManager[Any]]


class _Finder(MetaPathFinder):
    """First entry of ``sys.meta_path`` while callbacks wait; it resolves no module itself."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}
        self._resolving: set[str] = set()
        self._during: dict[str, During] = {}

    def wait(self, name: str, callback: Callback, during: During | None) -> None:
        if during is not None:
            self._during[name] = during
        self._waiting.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    @calls_through
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._waiting or fullname in self._resolving:
            return None
        self._resolving.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._resolving.discard(fullname)
        if spec is None or spec.loader is None or isinstance(spec.loader, type):
            return None
        try:
            self._listen(fullname, spec.loader)
        except AttributeError:
            return None
        return spec

    def _listen(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module

        @calls_through
        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            with self._during.get(name, nullcontext)():
                execute(module)
            callbacks = self._waiting.pop(name, ())
            if not self._waiting and self in sys.meta_path:
                sys.meta_path.remove(self)
            for callback in callbacks:
                _run(callback, module)

        loader.exec_module = exec_module


_FINDER = _Finder()


def when_imported(module_name: str, callback: Callback, *, during: During | None = None) -> None:
    """Call ``callback(module)`` once, after ``module_name`` has been executed.

    Runs at once if the module is loaded; ``during`` is a context for its execution.  A fault of the
    callback is logged and never reaches the import.
    """
    module = sys.modules.get(module_name)
    if module is not None and not _is_initializing(module):
        _run(callback, module)
    else:
        _FINDER.wait(module_name, callback, during)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _run(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as err:
        _log.warning(
            "[forerun] not attached to %s: fault at %s: %s", module.__name__, place(err), str(err)
        )
