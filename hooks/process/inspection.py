"""The user's objects, looked at without a question: no property, ``__getattr__`` or override runs.

What is asked may answer with a side effect: a module that makes what it is asked for, a length that
is a collective, a half-made object that raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MemberDescriptorType
from typing import Any

_mro = type.__dict__["__mro__"].__get__
_vars = type.__dict__["__dict__"].__get__
_MISSING = object()
_REGISTRIES = ("_modules", "_parameters", "_buffers")
"""Where ``torch.nn.Module`` keeps what its ``__getattr__`` would find."""


def contents(owner: Any) -> Mapping[str, Any]:
    """The object's own ``__dict__``; empty where it has none."""
    try:
        instance_dict = object.__getattribute__(owner, "__dict__")
    except Exception:  # a class may have a property of that name, which may raise anything
        return {}
    return instance_dict if type(instance_dict) is dict else {}


def classes(owner: Any) -> tuple[type, ...]:
    """The classes that the object is an instance of, its own first."""
    return _mro(type(owner))


def holder(kind: type, name: str) -> type | None:
    """The class or base that has ``name`` itself; None where none has."""
    return next((cls for cls in _mro(kind) if name in _vars(cls)), None)


def is_a(owner: Any, kind: type) -> bool:
    """``isinstance``, as Python itself knows it: neither the object nor its class is asked."""
    return any(cls is kind for cls in classes(owner))


def module_name(owner: Any) -> str:
    """Where the object's class says that it was defined; empty where it does not say."""
    defining_module = _vars(type(owner)).get("__module__")
    return defining_module if type(defining_module) is str else ""


def class_names(owner: Any) -> set[str]:
    """The names of these classes."""
    return {cls.__name__ for cls in classes(owner)}


def attribute(owner: Any, name: str, default: Any = None) -> Any:
    """What the object, its registries or its classes hold under that name, as it lies there.

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


def named_tree(model: Any) -> Iterator[tuple[str, Any]]:
    """A module and all inside it, each once, with the names of ``named_modules``."""
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
    """The modules of these models, each once."""
    return tuple({id(m): m for model in models for _, m in named_tree(model)}.values())


def direct_weights(module: Any) -> tuple[Any, ...]:
    """The parameters that a module has itself."""
    parameters = contents(module).get("_parameters")
    return (
        tuple(w for w in dict.values(parameters) if w is not None)
        if isinstance(parameters, dict)
        else ()
    )


def weights(models: Iterable[Any]) -> tuple[Any, ...]:
    """The parameters of these models, each once, in the order of ``parameters``."""
    return tuple({id(w): w for module in tree(*models) for w in direct_weights(module)}.values())
