"""Requests to save and stop, from a wrapper to the session that it started."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..calib.samples.files import replace_file
from .bounded_files import number, read_object

STOP_REQUEST = "stop-request.json"
"""The wrapper: please save and stop, since the scheduler soon ends this job."""
REQUEST_RULE = "request"
"""The rule of a stop that the wrapper asked for."""


def request_stop(directory: Path, reason: str) -> bool:
    """Ask the session to save and stop; False where the file cannot be written."""
    value = {"schema": 1, "unix_s": time.time(), "reason": reason, "rule": REQUEST_RULE}
    try:
        replace_file(directory / STOP_REQUEST, json.dumps(value) + "\n")
    except OSError:
        return False
    return True


def withdraw_request(directory: Path) -> None:
    """No request is left for a later launch."""
    with suppress(OSError):
        (directory / STOP_REQUEST).unlink()


class StopRequests:
    """The companion's side: a request becomes an order to all ranks, once."""

    def __init__(
        self, directory: Path, since_unix_s: float, give: Callable[[dict[str, Any]], None]
    ) -> None:
        self._path = directory / STOP_REQUEST
        self._since_unix_s = since_unix_s
        self._give = give
        self._is_given = False

    def look(self) -> None:
        """Pass on a request that is newer than the run."""
        value = None if self._is_given else read_object(self._path)
        if value is None or number(value.get("unix_s")) < self._since_unix_s:
            return
        self._is_given = True
        self._give({"order": "stop", "rule": REQUEST_RULE, "reason": str(value.get("reason", ""))})
