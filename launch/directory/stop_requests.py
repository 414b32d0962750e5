"""The companion's side of a wrapper's request to save and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .bounded_files import number, read_object
from .publishing import Place

STOP_REQUEST = "stop-request.json"
"""The wrapper: please save and stop, since the scheduler soon ends this job."""
REQUEST_RULE = "request"
"""The rule of a stop that the wrapper asked for."""


class StopRequests:
    """A request becomes an order to all ranks, once; only one that is for this launch."""

    def __init__(
        self, place: Place, give: Callable[[dict[str, Any]], None], *, since_unix_s: float = 0.0
    ) -> None:
        self._place = place
        self._since_unix_s = since_unix_s
        self._give = give
        self._is_given = False

    def look(self) -> None:
        """Pass on a request of the launch's own wrapper."""
        if self._is_given or not self._place.launch_id:
            return
        value = read_object(self._place.path / STOP_REQUEST)
        if value is None or value.get("launch_id") != self._place.launch_id:
            return
        # A name may be given again, and the wrapper of the launch before have died.
        if number(value.get("unix_s")) < self._since_unix_s:
            return
        self._is_given = True
        self._give({"order": "stop", "rule": REQUEST_RULE, "reason": str(value.get("reason", ""))})
