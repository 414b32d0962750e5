"""One fact that ``doctor`` tells."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    """How a fact bears on calibration."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, and what to do about it where it stands in the way."""

    name: str
    value: str
    verdict: Severity = Severity.OK
    remedy: str = ""
