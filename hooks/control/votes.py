"""What all ranks do at a step that is still ahead, or none of them: votes at the store.

One rank proposes an order and names its step.  Every rank that sees the proposal in time, and can
follow it, accepts; the last one to accept writes ``yes``.  Who cannot follow writes ``no`` and why,
and so does a rank that comes near the step without knowing the outcome.  The first write stands
(compare and set): ``yes`` means that every rank has accepted before the step, and that none can
have read anything else.  Training is never asked, and no collective is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...calib.workload.config_json import decode, encode
from ..process.store_link import Store

YES = "yes"
_NO = "no: "
LATE = "late"


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
    def from_text(text: bytes) -> Proposal:
        """The proposal that ``to_text`` wrote."""
        return decode(Proposal, json.loads(text))


class Votes:
    """Proposals one after the other, each under a number that is used once."""

    def __init__(self, store: Store, *, num_ranks: int) -> None:
        self._store = store
        self._num_ranks = num_ranks

    def propose(self, number: int, proposal: Proposal) -> None:
        """Lay a proposal before all ranks; only one of them ever does."""
        self._store.set(_key(number, "proposal"), proposal.to_text())

    def proposal(self, number: int) -> Proposal | None:
        """What is proposed under this number, None where nothing is yet."""
        key = _key(number, "proposal")
        return Proposal.from_text(self._store.get(key)) if self._store.check([key]) else None

    def accept(self, number: int) -> str:
        """This rank will follow; the outcome where that settles it, else an empty text."""
        if self._store.add(_key(number, "count"), 1) >= self._num_ranks:
            return self._settle(number, YES)
        return self.outcome(number)

    def refuse(self, number: int, why: str) -> str:
        """Say no for all ranks; the outcome, which may be that all have accepted before."""
        return self._settle(number, _NO + why)

    def outcome(self, number: int) -> str:
        """What stands; empty where nothing does yet."""
        key = _key(number, "outcome")
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _settle(self, number: int, wish: str) -> str:
        return self._store.compare_set(_key(number, "outcome"), "", wish).decode()


def why_not(outcome: str) -> str:
    """The reason in an outcome that is a no.

    >>> why_not("no: late")
    'late'
    """
    return outcome.removeprefix(_NO)


def _key(number: int, part: str) -> str:
    return f"order/{number}/{part}"
