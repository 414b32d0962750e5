"""JSON Schema, draft 2020-12, as far as our schemas use it: any other keyword is an error.

Stricter than the draft in one thing: a name of an object that no schema speaks of is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_SKIPPED_KEYWORDS = {"$schema", "$id", "$defs", "title", "description", "additionalProperties"}


class Mismatch(AssertionError):
    """A value is not what its schema says."""


def check(value: Any, whole: Mapping[str, Any]) -> None:
    """Raise ``Mismatch`` if the value violates the schema or has names that it lacks."""
    _Checker(whole).check(value, whole, "$")


class _Checker:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole

    def check(self, value: Any, schema: Mapping[str, Any], place: str) -> None:
        known = self._names(value, schema, place)
        if isinstance(value, dict) and known is not None and set(value) - known:
            raise Mismatch(f"{place}: {sorted(set(value) - known)} are not described")

    def _names(self, value: Any, schema: Mapping[str, Any], place: str) -> set[str] | None:
        """Return the names of an object that the schema lists, or None for any."""
        names: set[str] | None = set()
        is_open = "properties" not in schema and schema.get("type") == "object"
        if is_open and "additionalProperties" not in schema:
            names = None
        for keyword, constraint in schema.items():
            if keyword in _SKIPPED_KEYWORDS:
                continue
            rule = getattr(self, "_" + keyword.lstrip("$").lower(), None)
            if rule is None:
                raise Mismatch(f"{place}: keyword {keyword} is none that is checked")
            result = rule(value, constraint, place)
            if keyword in ("$ref", "allOf", "anyOf"):
                names = None if result is None or names is None else names | result
        if isinstance(value, dict):
            properties = schema.get("properties", {})
            if "additionalProperties" in schema:
                for name in value.keys() - properties.keys():
                    self.check(value[name], schema["additionalProperties"], f"{place}.{name}")
                return None
            names = None if names is None else names | set(properties)
        return names

    def _ref(self, value: Any, pointer: str, place: str) -> set[str] | None:
        result: Any = self._whole
        for step in pointer.removeprefix("#/").split("/"):
            result = result[step]
        return self._names(value, result, place)

    def _allof(self, value: Any, schemas: list[Any], place: str) -> set[str] | None:
        names: set[str] = set()
        for one in schemas:
            result = self._names(value, one, place)
            if result is None:
                return None
            names |= result
        return names

    def _anyof(self, value: Any, schemas: list[Any], place: str) -> set[str] | None:
        messages = []
        for one in schemas:
            try:
                self.check(value, one, place)
                return self._names(value, one, place)
            except Mismatch as err:
                messages.append(str(err))
        raise Mismatch(f"{place}: none of {len(schemas)} holds: {'; '.join(messages)}")

    def _type(self, value: Any, expected: str | list[str], place: str) -> None:
        kinds = [expected] if isinstance(expected, str) else expected
        allowed = tuple(kind for name in kinds for kind in _TYPES[name])
        is_bool = isinstance(value, bool) and bool not in allowed
        if is_bool or not isinstance(value, allowed):
            raise Mismatch(f"{place}: {value!r} is no {' or '.join(kinds)}")

    def _properties(self, value: Any, properties: Mapping[str, Any], place: str) -> None:
        for name in value.keys() & properties.keys() if isinstance(value, dict) else ():
            self.check(value[name], properties[name], f"{place}.{name}")

    def _required(self, value: Any, required: list[str], place: str) -> None:
        if isinstance(value, dict) and (lacking := set(required) - set(value)):
            raise Mismatch(f"{place}: lacks {sorted(lacking)}")

    def _items(self, value: Any, schema: Mapping[str, Any], place: str) -> None:
        for number, one in enumerate(value if isinstance(value, list) else ()):
            self.check(one, schema, f"{place}[{number}]")

    def _enum(self, value: Any, allowed: list[Any], place: str) -> None:
        if value not in allowed:
            raise Mismatch(f"{place}: {value!r} is none of {allowed}")

    def _const(self, value: Any, expected: Any, place: str) -> None:
        self._enum(value, [expected], place)

    def _minimum(self, value: Any, minimum: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value >= minimum:
            raise Mismatch(f"{place}: {value} is below {minimum}")

    def _maximum(self, value: Any, maximum: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value <= maximum:
            raise Mismatch(f"{place}: {value} is above {maximum}")

    def _exclusiveminimum(self, value: Any, minimum: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value > minimum:
            raise Mismatch(f"{place}: {value} is not above {minimum}")

    def _minitems(self, value: Any, minimum: int, place: str) -> None:
        if isinstance(value, list) and len(value) < minimum:
            raise Mismatch(f"{place}: has {len(value)} of at least {minimum}")

    def _minlength(self, value: Any, minimum: int, place: str) -> None:
        if isinstance(value, str) and len(value) < minimum:
            raise Mismatch(f"{place}: {value!r} is too short")
