"""ISO 8601 times next to the Unix times in JSON files, and the text shown for an action."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

LONGEST_S = 100 * 365 * 86400.0
"""Limit that keeps dates and sums within what ``datetime`` and a double can represent."""
_UNIX, _ISO = "unix_s", "iso"
_DAY_S = 86400.0
_WEEK_S = 7 * _DAY_S
SHOW_SECONDS_BELOW_S = 600.0
"""A moment nearer than this is shown with seconds."""
_BEYOND = "beyond any calendar"


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
    at = _utc(unix_s)
    return "" if at is None else f"{at:%Y-%m-%dT%H:%M:%SZ}"


def format_moment(unix_s: float, now_unix_s: float, *, has_seconds: bool = False) -> str:
    """Return a time in UTC, as short as is unambiguous: without the day if it is that of now.

    >>> format_moment(60.0, 0.0), format_moment(0.0, -60.0, has_seconds=True)
    ('00:01 UTC', 'Thu 00:00:00 UTC')
    >>> format_moment(0.0, -1e5), format_moment(0.0, -1e6), format_moment(0.0, -1e8)
    ('Thu 00:00 UTC', 'Thu 1 Jan 00:00 UTC', 'Thu 1 Jan 1970 00:00 UTC')
    """
    at = _utc(unix_s)
    if at is None:
        return _BEYOND
    now = _utc(now_unix_s)
    is_today = now is not None and at.date() == now.date()
    day = "" if is_today else _day(at, abs(unix_s - now_unix_s))
    return f"{day}{_clock(at, has_seconds=has_seconds)} UTC"


def format_span(middle_unix_s: float, late_unix_s: float, now_unix_s: float) -> str:
    """Return the median and the 95 % quantile of a moment.

    >>> format_span(60.0, 90_000.0, 0.0)
    '00:01 UTC (by Fri 01:00 with 95 %)'
    """
    has_seconds = late_unix_s - now_unix_s < SHOW_SECONDS_BELOW_S
    text = format_moment(middle_unix_s, now_unix_s, has_seconds=has_seconds)
    begin, end = _utc(middle_unix_s), _utc(late_unix_s)
    if begin is None or end is None:
        late = format_moment(late_unix_s, now_unix_s, has_seconds=has_seconds)
        return f"{text} (by {late} with 95 %)"
    is_same_day = begin.date() == end.date() or end - begin < timedelta(hours=12)
    day = "" if is_same_day else _day(end, late_unix_s - now_unix_s)
    return f"{text} (by {day}{_clock(end, has_seconds=has_seconds)} with 95 %)"


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


def _utc(unix_s: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(unix_s, tz=timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def _day(at: datetime, away_s: float) -> str:
    if away_s < _WEEK_S:
        return f"{at:%a} "
    year = f" {at:%Y}" if away_s > 300 * _DAY_S else ""
    return f"{at:%a} {at.day} {at:%b}{year} "


def _clock(at: datetime, *, has_seconds: bool) -> str:
    return f"{at:%H:%M:%S}" if has_seconds else f"{at:%H:%M}"


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
