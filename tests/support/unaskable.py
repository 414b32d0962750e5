"""Objects that raise whatever they are asked for: what looks at them must not ask."""

from __future__ import annotations

from typing import Any


class Told(Exception):
    """Somebody asked."""


def refuse(*_: Any, **__: Any) -> Any:
    raise Told


ASKED = (
    *("__len__", "__iter__", "__bool__", "__eq__", "__hash__", "__getattr__", "__getattribute__"),
    *("__instancecheck__", "__contains__", "__getitem__", "__repr__", "__str__", "__format__"),
    *("__length_hint__", "__next__", "__index__", "__int__", "__reduce__", "__reduce_ex__"),
    *("__call__", "__copy__", "__deepcopy__", "keys", "values", "items", "shape", "dim", "__dir__"),
)
OF_CLASSES = ("__eq__", "__hash__", "__instancecheck__", "__subclasscheck__", "__getattribute__")
UNASKABLE = {**dict.fromkeys(ASKED, refuse), "__class__": property(refuse)}


def unaskable(*bases: type) -> type:
    """A class whose instances have no answer; it has none itself, where Python alone makes it."""
    if any(type(base) is not type for base in bases):
        return type("Unaskable", bases, UNASKABLE)
    own = {name: refuse for name in OF_CLASSES}
    return type("Meta", (type,), own)("Unaskable", bases, UNASKABLE)


Unaskable: Any = unaskable()
