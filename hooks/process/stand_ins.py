"""Functions that replace others, yet pickle, compare and compile like the originals.

A stand-in has the name, module and text of its original, so that it pickles by reference like it.
torch's compiler traces the original in place of the stand-in (``_torchdynamo_inline``), and never
compiles our frames.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from .inspection import contents, holder

_F = TypeVar("_F", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".hooks.")[0]
_NEEDED = (f"{_PACKAGE}.hooks", f"{_PACKAGE}.calib")
_UNDER = "_torchdynamo_inline"
"""Attribute with the function that torch's compiler traces in place of another."""
_OURS = "__wrapped_by_forerun__"
_seen: set[str] = set()
_standing: set[CodeType] = set()


def stand_in(original: Callable[..., Any], ours: _F) -> _F:
    """Return ``ours``, which calls ``original``, disguised as the original."""
    functools.update_wrapper(ours, original)
    vars(ours)[_OURS] = True
    if type(original) is FunctionType:
        vars(ours)[_UNDER] = original
    return calls_through(ours)


def calls_through(function: _F) -> _F:
    """Return ``function``, marked so that the compiler skips it but compiles the foreign code it
    calls."""
    _standing.add(function.__code__)
    _pass_over(function.__code__, is_all=False)
    return function


class StandIns:
    """Stand-ins for attributes of modules and classes, until ``remove``."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any, Any]] = []
        self._made: dict[tuple[int, str], tuple[Any, Any]] = {}

    def put(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute that is ``owner``'s own, once, by ``wrap`` of it, which must be the
        same each time."""
        original = vars(owner).get(name)
        is_put = any(owner is saved[0] and name == saved[1] for saved in self._saved)
        if original is not None and not is_put:
            known = self._made.get((id(owner), name), (None, None))
            ours = known[1] if known[0] is original else stand_in(original, wrap(original))
            self._made[id(owner), name] = original, ours
            self._saved.append((owner, name, original, ours))
            _set(owner, name, ours)

    def remove(self) -> None:
        """Restore the originals, except those that someone else has replaced meanwhile."""
        while self._saved:
            owner, name, original, ours = self._saved.pop()
            if vars(owner).get(name) is ours:
                _set(owner, name, original)


def _set(owner: Any, name: str, value: Any) -> None:
    # A metaclass may have a method of its own for this.
    (type.__setattr__ if issubclass(type(owner), type) else setattr)(owner, name, value)


def is_stood_in(function: Any) -> bool:
    """Return True for a stand-in of ours, or a wrapper that another has put around one."""
    return _OURS in contents(function)


def function_at(owner: Any, name: str) -> Any:
    """Return a function of a module, or as defined by a class or its base; None if not a
    function."""
    if not issubclass(type(owner), type):
        return getattr(owner, name, None)
    home = holder(owner, name)
    member = None if home is None else vars(home)[name]
    return None if isinstance(member, (staticmethod, classmethod, property)) else member


def places_of(owner: Any, name: str) -> tuple[Any, ...]:
    """Return the owners that must have a stand-in: pickle looks up a function where it was defined.

    These are the class that defines a method, and every module that has imported a function.
    """
    if issubclass(type(owner), type):
        home = holder(owner, name)
        return (owner if home is None else home,)
    original = contents(owner).get(name)
    if original is None:
        return (owner,)
    modules = [module for module in list(sys.modules.values()) if module is not owner]
    return owner, *(m for m in modules if contents(m).get(name) is original)


def eager(note: Callable[[Any], object]) -> Callable[..., None]:
    """Return a hook that calls ``note`` with its first argument, and does nothing during
    compilation."""
    from torch.compiler import is_compiling

    def hook(thing: Any, *_: Any) -> None:
        if not is_compiling():
            note(thing)

    return pass_over(hook)


def pass_over_package() -> None:
    """Make the compiler skip all frames of our modules that are imported by now."""
    for name, module in sys.modules.copy().items():
        if name not in _seen and name.startswith(_NEEDED) and module is not None:
            _seen.add(name)
            path = getattr(module, "__file__", None)
            for code in _codes_of(module):
                # Functions from standard library decorators have that library's code objects.
                if code.co_filename == path and code not in _standing:
                    _pass_over(code, is_all=True)


def pass_over(function: _F) -> _F:
    """Return ``function``, which calls no user code: neither it nor its callees are compiled."""
    _pass_over(function.__code__, is_all=True)
    return function


def _pass_over(code: CodeType, *, is_all: bool) -> None:
    if "torch" not in sys.modules:
        return
    from torch._C._dynamo import eval_frame

    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    if strategy is None:  # before torch 2.7 frames are skipped one by one
        skip: Callable[[CodeType], object] = getattr(eval_frame, "skip_code", lambda _: None)
        skip(code)
        return
    action = eval_frame._FrameAction
    inner = action.SKIP if is_all else action.DEFAULT
    eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, inner))


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield from _codes_in(value.__code__)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for member in list(vars(value).values()):
                inside = (member, getattr(member, "fget", None), getattr(member, "__func__", None))
                for function in inside:
                    if isinstance(function, FunctionType):
                        yield from _codes_in(function.__code__)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)
