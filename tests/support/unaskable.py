"""Objects that raise on every query: code that inspects objects must not query these."""

from __future__ import annotations

from typing import Any


class QueriedError(Exception):
    """A query of such an object."""


def refuse(*_: Any, **__: Any) -> Any:
    raise QueriedError


REFUSED_NAMES = (
    *("__len__", "__iter__", "__bool__", "__eq__", "__hash__", "__getattr__", "__getattribute__"),
    *("__instancecheck__", "__contains__", "__getitem__", "__repr__", "__str__", "__format__"),
    *("__length_hint__", "__next__", "__index__", "__int__", "__reduce__", "__reduce_ex__"),
    *("__call__", "__copy__", "__deepcopy__", "keys", "values", "items", "shape", "dim", "__dir__"),
)
OF_CLASSES = ("__eq__", "__hash__", "__instancecheck__", "__subclasscheck__", "__getattribute__")
UNASKABLE = {**dict.fromkeys(REFUSED_NAMES, refuse), "__class__": property(refuse)}


def unaskable(*bases: type) -> type:
    """Return a class whose instances refuse queries; it refuses them too if no base has a custom
    metaclass."""
    if any(type(base) is not type for base in bases):
        return type("Unaskable", bases, UNASKABLE)
    methods = {name: refuse for name in OF_CLASSES}
    return type("Meta", (type,), methods)("Unaskable", bases, UNASKABLE)


Unaskable: Any = unaskable()
