"""Functions of ours that are bound to other packages' names in this process."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import forerun.hooks as hooks

# Compared as text: a ``Path`` for every function takes half a minute.
_HOOKS = f"{Path(hooks.__file__).parent}{os.sep}"
_ELSEWHERE = f"{_HOOKS}sensors{os.sep}"  # what is put on in hooked steps has tests of its own
_vars = type.__dict__["__dict__"].__get__


def _is_ours(thing: Any) -> bool:
    if type(thing) is not FunctionType:
        return False
    path = thing.__code__.co_filename
    return path.startswith(_HOOKS) and not path.startswith(_ELSEWHERE)


def replaced_functions() -> Iterator[tuple[str, Any]]:
    """Yield place and function, from all modules outside the package and from their classes."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "forerun":
            continue
        attributes = getattr(module, "__dict__", None)
        for name, value in list(attributes.items()) if type(attributes) is dict else ():
            if _is_ours(value) and not value.__module__.startswith("forerun"):
                yield f"{module_name}.{name}", value
            elif issubclass(type(value), type):
                methods = dict(_vars(value))
                if methods.get("__module__") == module_name:
                    for inner, method in methods.items():
                        place = f"{module_name}.{name}.{inner}"
                        if _is_ours(method):
                            yield place, method


def check_replaced_functions() -> set[str]:
    """Return their places; assert that each has its original's names, is pickled by them, and is
    compiled as the original."""
    result = dict(replaced_functions())
    for place, function in result.items():
        original = vars(function).get("_torchdynamo_inline")
        assert original is not None and original is function.__wrapped__, place
        for name in ("__module__", "__qualname__", "__name__", "__doc__"):
            assert getattr(function, name) == getattr(original, name), (place, name)
        if "<locals>" not in function.__qualname__:
            assert pickle.loads(pickle.dumps(function)) is function, place
    return set(result)
