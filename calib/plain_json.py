"""JSON values, and a parser for untrusted JSON that raises only ``ValueError``."""

from __future__ import annotations

import json
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""Any JSON value."""
JsonObject: TypeAlias = "dict[str, Json]"

MOST_DIGITS = 20
"""Most digits of a whole number, enough for 64 bits; longer ones would overflow later."""


def parse_json(text: str | bytes) -> Json:
    """Return the value of a JSON text.

    Raise ``ValueError`` also if brackets are nested too deeply or a number is too long.

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
