"""JSON values, and JSON from files that anyone may have written: there is one kind of error."""

from __future__ import annotations

import json
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What a JSON text can hold."""
JsonObject: TypeAlias = "dict[str, Json]"

MOST_DIGITS = 20
"""Of a whole number; enough for 64 bits.  More would overflow what it is turned into."""


def parse_json(text: str | bytes) -> Json:
    """The value of a JSON text; ``ValueError`` also where it is too deep or a number too long.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS + 1:
        raise ValueError(f"a number has {len(text)} digits; at most {MOST_DIGITS} are read")
    return int(text)
