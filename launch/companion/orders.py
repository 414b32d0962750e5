"""What the companion asks of training: what follows from a decision, and what a wrapper wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...calib.advice import Decision
from ...calib.records import Action
from ...calib.workload import OnAdvice
from ..directory.bounded_files import number, read_object
from ..directory.launch_files import REQUEST_RULE, STOP_REQUEST
from ..directory.publishing import Place

MOST_WINDOWS = 3
"""Windows that are reopened for a second opinion in one run."""


class AdviceOrders:
    """Advice needs two windows in a row: the second is asked for, so that it comes soon."""

    def __init__(self, on_advice: OnAdvice, give: Callable[[dict[str, Any]], object]) -> None:
        self._may_stop = on_advice is OnAdvice.STOP
        self._give = give
        self._num_windows = 0

    def follow(self, decision: Decision) -> None:
        """Ask for what follows from a decision; for a stop only where the user has opted in."""
        if decision.action is Action.STOP:
            if self._may_stop:
                met = [reason for reason in decision.reasons if reason.is_met]
                self._give(
                    {
                        "order": "stop",
                        "rule": met[0].rule.value if met else "",
                        "reason": "; ".join(reason.text for reason in met),
                        "command": list(decision.command),
                    }
                )
        elif decision.rules_met and self._num_windows < MOST_WINDOWS:
            self._num_windows += 1
            rules = ", ".join(sorted(rule.value for rule in decision.rules_met))
            self._give({"order": "window", "reason": f"{rules}: a second window must confirm it"})


class StopRequests:
    """A request becomes an order to all ranks, once; only one that is for this launch."""

    def __init__(
        self, place: Place, give: Callable[[dict[str, Any]], object], *, since_unix_s: float = 0.0
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
