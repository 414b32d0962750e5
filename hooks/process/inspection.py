"""Inspection of the user's objects without running a property, ``__getattr__`` or override.

Ordinary attribute access may have side effects: a module that creates attributes on demand, a
length that is a collective, a half-constructed object that raises, a property that draws.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType, MemberDescriptorType
from typing import Any

_mro = type.__dict__["__mro__"].__get__
_vars = type.__dict__["__dict__"].__get__
_MISSING = object()
_REGISTRIES = ("_modules", "_parameters", "_buffers")
"""Dictionaries in which ``torch.nn.Module.__getattr__`` looks up names."""


def contents(owner: Any) -> Mapping[str, Any]:
    """Return the object's own ``__dict__``; empty if it has none."""
    try:
        instance_dict = object.__getattribute__(owner, "__dict__")
    except Exception:  # a class may have a property of that name, which may raise anything
        return {}
    return instance_dict if type(instance_dict) is dict else {}


def classes(owner: Any) -> tuple[type, ...]:
    """Return the classes that the object is an instance of, its own first."""
    return _mro(type(owner))


def holder(kind: type, name: str) -> type | None:
    """Return the class or base that defines ``name``; None if none does."""
    return next((cls for cls in _mro(kind) if name in _vars(cls)), None)


def is_a(owner: Any, kind: type) -> bool:
    """Return the true ``isinstance``, without calling overrides of the object or its class."""
    return any(cls is kind for cls in classes(owner))


def module_name(owner: Any) -> str:
    """Return the ``__module__`` of the object's class; empty if it has none."""
    defining_module = _vars(type(owner)).get("__module__")
    return defining_module if type(defining_module) is str else ""


def class_names(owner: Any) -> set[str]:
    """Return the names of the object's classes."""
    return {cls.__name__ for cls in classes(owner)}


def attribute(owner: Any, name: str, default: Any = None) -> Any:
    """Return the raw attribute of the object, of its registries or of its classes.

    A function of a class is returned unbound; a property or another descriptor is ``default``.
    """
    instance_dict = contents(owner)
    value = instance_dict.get(name, _MISSING)
    for registry in _REGISTRIES:
        if value is _MISSING and isinstance(registered := instance_dict.get(registry), dict):
            value = dict.get(registered, name, _MISSING)
    if value is not _MISSING:
        return value
    home = holder(type(owner), name)
    if home is None:
        return default
    value = _vars(home)[name]
    if type(value) is MemberDescriptorType:  # a slot
        try:
            return value.__get__(owner)
        except AttributeError:
            return default
    is_bound = type(value) is not FunctionType and hasattr(type(value), "__get__")
    return default if is_bound else value


def local_variable(frame: FrameType, name: str) -> Any:
    """Return a variable of a frame of torch's own code; None if it has none of that name."""
    variables = frame.f_locals
    value = variables.get(name)
    if type(variables) is dict:  # a copy, before Python 3.13, which the frame would keep
        variables.clear()
    return value


@contextmanager
def forked_rng() -> Iterator[None]:
    """Put all generators back at the end: whatever runs code of a framework's classes, once at the
    start, runs it inside."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy.random")
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), numpy and numpy.get_state()
    try:
        with torch.random.fork_rng(devices, device_type="cuda"):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.set_state(numpy_state)


_TENSORS = frozenset({"torch", "transformer_engine", "megatron", "torchao"})
"""Packages whose tensors are inspected: a user's own class may redefine ``shape``."""


def is_tensor(value: Any) -> bool:
    """Return True for a tensor whose attributes run only code of torch and its extensions.

    ``isinstance`` would query a foreign object's ``__class__``.
    """
    kind, tensor = type(value), sys.modules["torch"].Tensor
    is_theirs = kind is tensor or module_name(value).partition(".")[0] in _TENSORS
    return is_theirs and issubclass(kind, tensor)


def named_tree(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module and all its submodules, each once, with the names of ``named_modules``."""
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        inner = contents(module).get("_modules")
        if isinstance(inner, dict):
            parts = [(f"{name}.{key}" if name else key, part) for key, part in dict.items(inner)]
            waiting += [pair for pair in reversed(parts) if pair[1] is not None]


def tree(*models: Any) -> tuple[Any, ...]:
    """Return the modules of these models, each once."""
    return tuple({id(m): m for model in models for _, m in named_tree(model)}.values())


def direct_weights(module: Any) -> tuple[Any, ...]:
    """Return a module's own parameters (not submodules', nor any of a class of the user's)."""
    parameters: Any = contents(module).get("_parameters")
    return tuple(filter(is_tensor, dict.values(parameters))) if is_a(parameters, dict) else ()


def weights(models: Iterable[Any]) -> tuple[Any, ...]:
    """Return the parameters of these models, each once, in the order of ``parameters``."""
    return tuple({id(w): w for module in tree(*models) for w in direct_weights(module)}.values())
