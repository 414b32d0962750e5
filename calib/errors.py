"""The errors that a user can meet; each message has a value, a rule and a remedy."""

from __future__ import annotations


class ForerunError(Exception):
    """Base of all errors that Forerun raises."""


class ConfigError(ForerunError, ValueError):
    """The user wrote a configuration or a flag that cannot be."""


class RecordError(ForerunError):
    """A record file is damaged, empty, foreign, or of another schema."""


class CalibrationError(ForerunError):
    """There are too few samples, or none of something that is needed."""
