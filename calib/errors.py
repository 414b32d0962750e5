"""Errors shown to users; each message has a value, a rule and a remedy."""

from __future__ import annotations

from itertools import pairwise


class ForerunError(Exception):
    """Base of all errors that Forerun raises."""


class ConfigError(ForerunError, ValueError):
    """Invalid configuration or flag given by the user."""


class RecordError(ForerunError):
    """Damaged, empty or foreign record file, or one of another schema."""


class CalibrationError(ForerunError):
    """Too few samples, or none of a required kind."""


def check_ascending(what: str, *values: float | None) -> None:
    """Raise ``CalibrationError`` if an answer's values do not ascend, apart from rounding: a limit,
    the low end of an interval, its value, its high end.  None and NaN are unknown, and skipped."""
    known = [value for value in values if value is not None and value == value]
    if any(one - other > 1e-9 * (abs(one) + abs(other)) for one, other in pairwise(known)):
        chain = " <= ".join(f"{value:g}" for value in known)
        remedy = "record more steps (--calibrate-steps), or longer ones"
        raise CalibrationError(f"{what}: {chain} is impossible; {remedy}")
