"""Serialisation of fitted models as ``.npz``: arrays, and the rest as JSON in one more array.

Nothing is unpickled: a class is named by its module below ``calib`` and built from its fields.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ... import calib
from ...calib.errors import ForerunError
from ...calib.records.files import CREATED_BY

_REST = "rest"
DAMAGE_ERRORS = (
    *(BadZipFile, zlib.error, EOFError, OSError, NotImplementedError),
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, ImportError, ForerunError),
)
"""Errors raised by archive, JSON or data classes for a damaged file or another version."""


def pack_model(value: Any) -> bytes:
    """Return the archive of a model for ``unpack_model``; shared objects stay shared.

    Raises ``TypeError`` for anything but numbers, text, arrays, tuples, mappings and our data
    classes and enumerations.  Fields marked ``is_kept=False`` get their defaults.
    """
    writer, file = _Writer(), io.BytesIO()
    text = json.dumps({"value": writer.plain(value), "objects": writer.objects})
    writer.arrays[CREATED_BY] = np.zeros(0)
    writer.arrays[_REST] = np.frombuffer(text.encode(), dtype=np.uint8)
    np.savez(file, **writer.arrays)
    return file.getvalue()


def unpack_model(data: bytes) -> Any:
    """Return the model that was packed; raises one of ``DAMAGE_ERRORS`` if it cannot be read."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = dict(file)
    rest, objects = json.loads(arrays[_REST].tobytes()), list[Any]()

    def value_of(plain: Any) -> Any:
        if isinstance(plain, list):
            return tuple(map(value_of, plain))
        if not isinstance(plain, dict):
            return plain
        if "map" in plain:
            return {value_of(key): value_of(one) for key, one in plain["map"]}
        return arrays[plain["array"]] if "array" in plain else objects[plain["object"]]

    for name, content in rest["objects"]:
        kind = _class(name)
        if isinstance(content, str):
            objects.append(kind[content])
        elif tuple(content) == _fields(kind):
            objects.append(kind(**{field: value_of(one) for field, one in content.items()}))
        else:
            raise ValueError(f"{name} has other fields")
    return value_of(rest["value"])


class _Writer:
    """Collects arrays, and other objects in an order in which they can be built."""

    def __init__(self) -> None:
        self.objects: list[tuple[str, str | dict[str, Any]]] = []
        self.arrays: dict[str, Any] = {}
        self._places: dict[int, tuple[object, dict[str, Any]]] = {}
        """Places by ``id``; the objects are referenced too, since an id is valid only while they
        live."""

    def plain(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, (tuple, list)):
            return [self.plain(one) for one in value]
        if isinstance(value, Mapping):
            return {"map": [[self.plain(key), self.plain(one)] for key, one in value.items()]}
        if id(value) not in self._places:
            self._places[id(value)] = value, self._place(value)
        return self._places[id(value)][1]

    def _place(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            self.arrays[str(len(self.arrays))] = value
            return {"array": str(len(self.arrays) - 1)}
        kind = type(value)
        is_member = isinstance(value, Enum)
        content = (
            value.name if is_member else {n: self.plain(getattr(value, n)) for n in _fields(kind)}
        )
        self.objects.append((_name(kind), content))
        return {"object": len(self.objects) - 1}


def _name(kind: type) -> str:
    prefix, _, module = kind.__module__.partition(f"{calib.__name__}.")
    if prefix or not module:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not cached")
    return f"{module}:{kind.__qualname__}"


@cache
def _class(name: str) -> Any:
    """Return the class of that name in ``calib``; only data classes and enumerations have
    fields."""
    module, _, qualname = name.partition(":")
    kind = getattr(import_module(f"{calib.__name__}.{module}"), qualname)
    if _name(kind) != name:
        raise ValueError(f"{name} is a class of another module")
    return kind


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.metadata.get("is_kept", one.init))
