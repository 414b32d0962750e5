"""Encoding of frozen dataclasses as JSON, and decoding by their annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, ClassVar, Protocol, TypeVar

from ..errors import ConfigError
from ..plain_json import Json, JsonObject
from .argument_values import shown

_T = TypeVar("_T")
KEY = "key"
"""Metadata of a field whose key in JSON is not its name."""


class DataclassInstance(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class Encoded:
    """Base of dataclasses that are objects of JSON: all fields, unless a class says otherwise."""

    __slots__ = ()

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return _encoded_fields(self)


def encoded(**values: object) -> JsonObject:
    """Return the JSON object of some named values.

    >>> encoded(kept=(0.5, None), path=PurePath("a"))
    {'kept': [0.5, None], 'path': 'a'}
    """
    return {key: encode(value) for key, value in values.items()}


def encode(value: object) -> Json:
    """Return the JSON value of a dataclass, enum, mapping, sequence or plain value."""
    if isinstance(value, Encoded):
        return value.to_json()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(encode(key)): encode(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [encode(v) for v in value]
    if isinstance(value, PurePath):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _encoded_fields(value)
    plain: Any = value
    return plain


def encode_fields(value: DataclassInstance, *without: str) -> JsonObject:
    """Return a JSON object of the fields of a dataclass, all but ``without``."""
    whole = _encoded_fields(value)
    return {name: each for name, each in whole.items() if name not in without}


def _encoded_fields(value: Any) -> JsonObject:
    return {_key(field): encode(getattr(value, field.name)) for field in fields(value)}


def _key(field: Field[Any]) -> str:
    """Return the key of a field: its name, unless ``field(metadata={KEY: ...})`` says another."""
    return field.metadata.get(KEY, field.name)


def decode(kind: type[_T], value: object) -> _T:
    """Return the value of type ``kind`` from ``encode`` output.

    Unknown keys are ignored and missing ones get defaults.  Raises ``ConfigError`` if a field
    without a default is missing, an enum has no such value, or a value has another form.
    """
    return _decoded(kind, value)


def _decoded(kind: Any, value: Any) -> Any:
    if isinstance(kind, types.UnionType):
        inner = next(k for k in typing.get_args(kind) if k is not type(None))
        return None if value is None else _decoded(inner, value)
    if hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{kind.__name__} {shown(value)} is not an object; write it with to_json"
            )
        # A newer version may have written more keys; unknown ones are skipped.
        known = {
            name: _decoded(hint, value[key]) for key, name, hint in _hints(kind) if key in value
        }
        try:
            return kind(**known)
        except TypeError as err:
            raise ConfigError(
                f"{kind.__name__} is incomplete: {err}; write it with to_json"
            ) from err
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, value)
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        is_list = isinstance(value, list | tuple)
        if not is_list or (kinds[-1] is not ... and len(value) != len(kinds)):
            raise ConfigError(f"{shown(value)} is not a list of values; write it with to_json")
        each = kinds if kinds[-1] is not ... else kinds[:1] * len(value)
        return tuple(_decoded(one, v) for one, v in zip(each, value, strict=True))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{shown(value)} is not an object; write it with to_json")
        return {key: _decoded(kinds[1], each) for key, each in value.items()}
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return kind(_plain(str, value))
    return _plain(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    """Return a number, truth value or text; raise ``ConfigError`` if it is of another type."""
    allowed = _PLAIN.get(kind)
    if allowed is None:
        return value
    if type(value) not in allowed or (kind in (int, float) and not abs(value) < 2**63):
        raise ConfigError(f"{shown(value)} is not of type {kind.__name__}; write it with to_json")
    return value


_PLAIN: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (int, float), str: (str,), bool: (bool,),
}  # fmt: skip


@lru_cache
def _hints(kind: Any) -> tuple[tuple[str, str, Any], ...]:
    """Return key, name and type of the fields, without class variables."""
    hints = typing.get_type_hints(kind)
    return tuple((_key(field), field.name, hints[field.name]) for field in fields(kind))


def _member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as err:
        names = ", ".join(str(member.value) for member in kind)
        raise ConfigError(
            f"{kind.__name__} {shown(value)} is not known; choose from {names}"
        ) from err
