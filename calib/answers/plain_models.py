"""Fitted models as a JSON value and back: only data classes and enumerations of ``calib``.

Nothing is unpickled: a class is named by its module below ``calib``, and made from its fields.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

_ROOM = __name__.rpartition(".answers.")[0]
_NAME = re.compile(r"([a-z_0-9]+(?:\.[a-z_0-9]+)*):([A-Za-z_0-9]+)")
_DTYPES = frozenset({"<f8", "<f4", "<i8", "<i4", "|b1", "|u1"})


def plain(value: Any) -> dict[str, Any]:
    """A JSON value that ``made`` turns back; one object that is held twice stays one.

    ``TypeError`` where it holds anything but numbers, text, arrays, containers and our own data
    classes.  Fields marked ``is_kept=False`` are left to their defaults.
    """
    writer = _Writer()
    whole = writer.value(value)
    return {"objects": writer.objects, "value": whole}


def made(value: Any) -> Any:
    """What ``plain`` was given; some error where the value is damaged or of another version."""
    objects: list[Any] = []
    for entry in value["objects"]:
        objects.append(_array(entry) if "array" in entry else _instance(entry, objects))
    return _value(value["value"], objects)


class _Writer:
    """Objects in the order in which they can be made."""

    def __init__(self) -> None:
        self.objects: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []
        """An identity is only good while its object lives."""

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, Enum):
            return {"enum": [_name(type(value)), value.name]}
        if isinstance(value, (int, np.integer)):
            return int(value)
        if isinstance(value, (float, np.floating)):
            return float(value) if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Mapping):
            return {"map": [[self.value(k), self.value(v)] for k, v in value.items()]}
        for name, kind in _CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.value(one) for one in value]}
        return {"object": self._place(value)}

    def _place(self, value: Any) -> int:
        place = self._places.get(id(value))
        if place is None:
            entry = self._entry(value)
            place = self._places[id(value)] = len(self.objects)
            self.objects.append(entry)
            self._alive.append(value)
        return place

    def _entry(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            whole = np.ascontiguousarray(value)
            if whole.dtype.str not in _DTYPES:
                raise TypeError(f"an array of {whole.dtype} is not kept")
            text = base64.b64encode(whole.tobytes()).decode("ascii")
            return {"array": text, "dtype": whole.dtype.str, "shape": list(value.shape)}
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise TypeError(f"{type(value).__name__} is not kept")
        fields = {name: self.value(getattr(value, name)) for name in _fields(type(value))}
        return {"class": _name(type(value)), "fields": fields}


def _value(value: Any, objects: list[Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name == "object":
        return objects[held]
    if name == "map":
        return {_value(k, objects): _value(v, objects) for k, v in held}
    if name == "enum":
        return _class(held[0], Enum)[held[1]]
    if name == "float":
        return float(held)
    return _CONTAINERS[name](_value(one, objects) for one in held)


def _instance(entry: dict[str, Any], objects: list[Any]) -> Any:
    kind = _class(entry["class"], object)
    fields = entry["fields"]
    if tuple(fields) != _fields(kind):
        raise ValueError(f"{entry['class']} has other fields")
    return kind(**{name: _value(held, objects) for name, held in fields.items()})


def _array(entry: dict[str, Any]) -> Any:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"an array of {entry['dtype']} is not ours")
    flat = np.frombuffer(base64.b64decode(entry["array"]), dtype=entry["dtype"])
    return flat.reshape(entry["shape"])


def _name(kind: type) -> str:
    room, _, module = kind.__module__.partition(f"{_ROOM}.")
    if room or not module:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not kept")
    return f"{module}:{kind.__qualname__}"


@cache
def _class(name: str, base: type) -> Any:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} does not name a class of Forerun")
    kind: Any = getattr(import_module(f"{_ROOM}.{found[1]}"), found[2])
    if not isinstance(kind, type) or kind.__module__ != f"{_ROOM}.{found[1]}":
        raise ValueError(f"{name} does not name a class of Forerun")
    if not issubclass(kind, base) or not _is_plain(kind):
        raise ValueError(f"{name} is not a data class")
    return kind


def _is_plain(kind: type) -> bool:
    return hasattr(kind, "__dataclass_fields__") or issubclass(kind, Enum)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(
        one.name for one in dataclasses.fields(kind) if one.metadata.get("is_kept", one.init)
    )


_CONTAINERS: Mapping[str, type] = {"tuple": tuple, "list": list, "set": frozenset}
