"""What follows from a decision for training: a stop, or a window for a second opinion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...calib.advice.decision import Action, Decision
from ...calib.workload.run_options import OnAdvice

MOST_WINDOWS = 3
"""Windows that are reopened for a second opinion in one run."""


class AdviceOrders:
    """Advice needs two windows in a row: the second is asked for, so that it comes soon."""

    def __init__(self, on_advice: OnAdvice, give: Callable[[dict[str, Any]], None]) -> None:
        self._may_stop = on_advice is OnAdvice.STOP
        self._give = give
        self._num_windows = 0

    def follow(self, decision: Decision) -> None:
        """Ask for what follows from a decision; for a stop only where the user has opted in."""
        if decision.action is Action.STOP:
            if self._may_stop:
                self._give(stop_order(decision))
        elif decision.rules_met and self._num_windows < MOST_WINDOWS:
            self._num_windows += 1
            rules = ", ".join(sorted(rule.value for rule in decision.rules_met))
            self._give({"order": "window", "reason": f"{rules}: a second window has to agree"})


def stop_order(decision: Decision) -> dict[str, Any]:
    """The order of a decision to stop, with the reasons that are met."""
    met = [reason for reason in decision.reasons if reason.is_met]
    return {
        "order": "stop",
        "rule": met[0].rule.value if met else "",
        "reason": "; ".join(reason.text for reason in met),
        "command": list(decision.command),
    }
