"""JSON Schema, draft 2020-12, as far as ours uses it: any other keyword is an error.

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
_SAID = {"$schema", "$id", "$defs", "title", "description", "additionalProperties"}


class Mismatch(AssertionError):
    """A value is not what its schema says."""


def check(value: Any, whole: Mapping[str, Any]) -> None:
    """``Mismatch`` where the value is not one of the schema, or has names that it leaves out."""
    _Checker(whole).check(value, whole, "$")


class _Checker:
    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole

    def check(self, value: Any, schema: Mapping[str, Any], place: str) -> None:
        known = self._names(value, schema, place)
        if isinstance(value, dict) and known is not None and set(value) - known:
            raise Mismatch(f"{place}: {sorted(set(value) - known)} are not described")

    def _names(self, value: Any, schema: Mapping[str, Any], place: str) -> set[str] | None:
        """Names of an object that the schema speaks of; None: any."""
        names: set[str] | None = set()
        is_open = "properties" not in schema and schema.get("type") == "object"
        if is_open and "additionalProperties" not in schema:
            names = None
        for keyword, said in schema.items():
            if keyword in _SAID:
                continue
            rule = getattr(self, "_" + keyword.lstrip("$").lower(), None)
            if rule is None:
                raise Mismatch(f"{place}: keyword {keyword} is none that is checked")
            result = rule(value, said, place)
            if keyword in ("$ref", "allOf", "anyOf"):
                names = None if result is None or names is None else names | result
        if isinstance(value, dict):
            own = schema.get("properties", {})
            if "additionalProperties" in schema:
                for name in value.keys() - own.keys():
                    self.check(value[name], schema["additionalProperties"], f"{place}.{name}")
                return None
            names = None if names is None else names | set(own)
        return names

    def _ref(self, value: Any, said: str, place: str) -> set[str] | None:
        result: Any = self._whole
        for step in said.removeprefix("#/").split("/"):
            result = result[step]
        return self._names(value, result, place)

    def _allof(self, value: Any, said: list[Any], place: str) -> set[str] | None:
        names: set[str] = set()
        for one in said:
            result = self._names(value, one, place)
            if result is None:
                return None
            names |= result
        return names

    def _anyof(self, value: Any, said: list[Any], place: str) -> set[str] | None:
        told = []
        for one in said:
            try:
                self.check(value, one, place)
                return self._names(value, one, place)
            except Mismatch as err:
                told.append(str(err))
        raise Mismatch(f"{place}: none of {len(said)} holds: {'; '.join(told)}")

    def _type(self, value: Any, said: str | list[str], place: str) -> None:
        kinds = [said] if isinstance(said, str) else said
        allowed = tuple(kind for name in kinds for kind in _TYPES[name])
        is_bool = isinstance(value, bool) and bool not in allowed
        if is_bool or not isinstance(value, allowed):
            raise Mismatch(f"{place}: {value!r} is no {' or '.join(kinds)}")

    def _properties(self, value: Any, said: Mapping[str, Any], place: str) -> None:
        for name in value.keys() & said.keys() if isinstance(value, dict) else ():
            self.check(value[name], said[name], f"{place}.{name}")

    def _required(self, value: Any, said: list[str], place: str) -> None:
        if isinstance(value, dict) and (lacking := set(said) - set(value)):
            raise Mismatch(f"{place}: lacks {sorted(lacking)}")

    def _items(self, value: Any, said: Mapping[str, Any], place: str) -> None:
        for number, one in enumerate(value if isinstance(value, list) else ()):
            self.check(one, said, f"{place}[{number}]")

    def _enum(self, value: Any, said: list[Any], place: str) -> None:
        if value not in said:
            raise Mismatch(f"{place}: {value!r} is none of {said}")

    def _const(self, value: Any, said: Any, place: str) -> None:
        self._enum(value, [said], place)

    def _minimum(self, value: Any, said: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value >= said:
            raise Mismatch(f"{place}: {value} is below {said}")

    def _maximum(self, value: Any, said: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value <= said:
            raise Mismatch(f"{place}: {value} is above {said}")

    def _exclusiveminimum(self, value: Any, said: float, place: str) -> None:
        if isinstance(value, (int, float)) and not value > said:
            raise Mismatch(f"{place}: {value} is not above {said}")

    def _minitems(self, value: Any, said: int, place: str) -> None:
        if isinstance(value, list) and len(value) < said:
            raise Mismatch(f"{place}: has {len(value)} of at least {said}")

    def _minlength(self, value: Any, said: int, place: str) -> None:
        if isinstance(value, str) and len(value) < said:
            raise Mismatch(f"{place}: {value!r} is too short")
