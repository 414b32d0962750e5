"""What a verb tells: its exit code, JSON for programs, and all else beside."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from ...calib.records import stamped


class ExitCode(IntEnum):
    """What the shell sees."""

    ANSWER = 0
    THRESHOLD = 1
    USAGE = 2
    NO_DATA = 3


def print_json(value: Mapping[str, Any]) -> None:
    """The answer of a verb, for programs; times in ISO 8601 stand beside those since 1970."""
    print(json.dumps(stamped(value), indent=2))


def tell(*lines: str) -> None:
    """What a user should know beside the answer, on standard error."""
    for line in lines:
        print(f"forerun: {line}", file=sys.stderr)
