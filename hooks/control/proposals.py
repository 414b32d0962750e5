"""What the companion asks of all ranks, and the step that one of them names for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...calib.workload.config_json import decode, encode


class OrderKind(Enum):
    """What the companion can ask of all ranks."""

    STOP = "stop"
    """End training after the step that is named."""
    WINDOW = "window"
    """Open a window with the step that is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the companion asks for, and why."""

    kind: OrderKind
    reason: str = ""
    rule: str = ""
    command: tuple[str, ...] = ()

    @staticmethod
    def from_json(value: dict[str, Any]) -> Order:
        """The order of one line; raises ``KeyError`` or ``ValueError`` where it is none."""
        return decode(Order, {**value, "kind": value["order"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An order and its step; from ``settle`` on, who does not know the outcome says no."""

    kind: OrderKind
    step: int
    settle: int

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(encode(self))

    @staticmethod
    def from_text(text: str) -> Proposal:
        """The proposal that ``to_text`` wrote."""
        return decode(Proposal, json.loads(text))
