"""ISO 8601 times next to the Unix times in JSON files, and the text shown for an action."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any

LONGEST_S = 100 * 365 * 86400.0
"""Limit that keeps dates and sums within what ``datetime`` and a double can represent."""
_UNIX, _ISO = "unix_s", "iso"


def with_iso_times(value: Mapping[str, object]) -> dict[str, object]:
    """Return the object with each ``unix_s`` time repeated in UTC, under its name with ``iso``.

    Nested objects are converted too; intervals of times, by name, are repeated as a whole.

    >>> with_iso_times({"end_unix_s": 1_700_000_000.4, "left": {"unix_s": 0}, "now_unix_s": None})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'end_unix_s': 1700000000.4, 'end_iso': '2023-11-14T22:13:20Z',
     'left': {'unix_s': 0, 'iso': '1970-01-01T00:00:00Z'}, 'now_unix_s': None}
    """
    with_times: dict[str, object] = {}
    for name, item in value.items():
        with_times[name] = _with_iso(item)
        if (name == _UNIX or name.endswith(f"_{_UNIX}")) and (iso := _to_iso(item)):
            with_times.setdefault(name.removesuffix(_UNIX) + _ISO, iso)
    return with_times


def stamped(value: Mapping[str, object]) -> dict[str, object]:
    """Return an answer for programs: schema first, times in both forms."""
    return with_iso_times({"schema": 1, **value})


def iso_time(unix_s: object) -> str:
    """Return seconds since 1970 as ISO 8601 in UTC; empty if that is no time.

    >>> iso_time(0), iso_time(None), iso_time(float("nan"))
    ('1970-01-01T00:00:00Z', '', '')
    """
    if isinstance(unix_s, bool) or not isinstance(unix_s, (int, float)):
        return ""
    try:
        moment = datetime.fromtimestamp(unix_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return ""
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _with_iso(value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_iso_times(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return [_with_iso(one) for one in value]
    return value


def _to_iso(value: Any) -> Any:
    """Convert one time, the ends of an interval, or intervals by name; empty if it is no time."""
    if isinstance(value, Mapping):
        return {name: iso for name, item in value.items() if (iso := _to_iso(item))}
    if isinstance(value, (list, tuple)):
        iso = [iso_time(one) for one in value]
        return iso if all(iso) else []
    return iso_time(value)


class Action(Enum):
    """Advice to the user; its value is written to files."""

    CONTINUE = "continue"
    STOP = "stop"
    ABSTAIN = "abstain"


_TEXTS = {Action.CONTINUE: "keep running", Action.STOP: "stop", Action.ABSTAIN: "none yet"}


def action_text(value: str) -> str:
    """Return the words shown for a value of ``action``; one of a newer version unchanged.

    >>> action_text("continue"), action_text("abstain"), action_text("pause")
    ('keep running', 'none yet', 'pause')
    """
    known = {action.value: text for action, text in _TEXTS.items()}
    return known.get(value, value)
