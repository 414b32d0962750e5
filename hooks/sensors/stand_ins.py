"""Functions of ours at other people's names: pickled, compiled and named as theirs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..process.looking import contents, holder

_UNDER = "_torchdynamo_inline"
"""Where torch's compiler looks for what it is to trace in place of a function."""
_OURS = "__wrapped_by_forerun__"


def stand_in(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` with the names of ``original``, which is what a compiler sees of it."""
    functools.update_wrapper(wrapper, original)
    vars(wrapper).update({_UNDER: original, _OURS: True})
    return wrapper


def is_stood_in(function: Any) -> bool:
    """True where a stand-in of ours lies there, or beneath what another has put around it."""
    return _OURS in contents(function)


def lying_at(owner: Any, name: str) -> Any:
    """The function of a module, or as a class or its base has it; None where it is no function."""
    if not issubclass(type(owner), type):
        return getattr(owner, name, None)
    home = holder(owner, name)
    found = None if home is None else vars(home)[name]
    return None if isinstance(found, (staticmethod, classmethod, property)) else found


def places_of(owner: Any, name: str) -> tuple[Any, ...]:
    """Where a stand-in must lie: pickle looks a function up where it was defined, and compares.

    That is the class that defines a method, and every module that has imported a function.
    """
    if issubclass(type(owner), type):
        home = holder(owner, name)
        return (owner if home is None else home,)
    original = contents(owner).get(name)
    if original is None:
        return (owner,)
    modules = [module for module in list(sys.modules.values()) if module is not owner]
    return owner, *(m for m in modules if contents(m).get(name) is original)
