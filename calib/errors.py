"""Errors shown to users; each message has a value, a rule and a remedy."""

from __future__ import annotations


class ForerunError(Exception):
    """Base of all errors that Forerun raises."""


class ConfigError(ForerunError, ValueError):
    """Invalid configuration or flag given by the user."""


class RecordError(ForerunError):
    """Damaged, empty or foreign record file, or one of another schema."""


class CalibrationError(ForerunError):
    """Too few samples, or none of a required kind."""
