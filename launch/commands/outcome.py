"""What a verb tells: its exit code to the shell, JSON to programs, all else beside the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the shell sees."""

    ANSWER = 0
    THRESHOLD = 1
    USAGE = 2
    NO_DATA = 3


def print_json(value: Mapping[str, Any]) -> None:
    """The answer of a verb, for programs."""
    print(json.dumps({"schema": 1, **value}, indent=2))


def tell(*lines: str) -> None:
    """What a user should know beside the answer, on standard error."""
    for line in lines:
        print(f"forerun: {line}", file=sys.stderr)
