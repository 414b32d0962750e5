"""What is advised, as ``decision.json`` has it and as people read it.  Standard library only."""

from __future__ import annotations

from enum import Enum


class Action(Enum):
    """What is advised; the value is that of files."""

    CONTINUE = "continue"
    STOP = "stop"
    ABSTAIN = "abstain"


_TEXTS = {Action.CONTINUE: "go on", Action.STOP: "stop", Action.ABSTAIN: "none yet"}


def action_text(value: str) -> str:
    """The words of every line for a value of ``action``; one of a newer version as it is.

    >>> action_text("continue"), action_text("abstain"), action_text("pause")
    ('go on', 'none yet', 'pause')
    """
    known = {action.value: text for action, text in _TEXTS.items()}
    return known.get(value, value)
