"""What a verb does not take is said in one line, with what is near to it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ...calib.workload import shown

USAGE = 2
"""The exit code of what cannot be understood."""


class VerbParser(argparse.ArgumentParser):
    """A parser whose errors are one line, with a remedy."""

    def error(self, message: str) -> NoReturn:
        """Say it on standard error, and end."""
        self.exit(USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is not None and value not in choices:
            names = [str(one) for one in choices]
            raise argparse.ArgumentError(
                action, (f"{shown(value)} is not a choice; {remedy(value, names)}")
            )


def remedy(word: object, known: Iterable[str]) -> str:
    """What was perhaps meant by a word, else all that is known."""
    names = [*known]
    return near(str(word), names) or f"there are {', '.join(names)}"


def near(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """The question for the nearest ones; empty where none is near.

    >>> near("paln", ("plan", "predict"))
    'did you mean plan?'
    """
    import difflib  # no answer needs it

    found = difflib.get_close_matches(word, [*known], n=2, cutoff=cutoff)
    return f"did you mean {' or '.join(found)}?" if found else ""


def not_taken(verbs: argparse.ArgumentParser, verb: str, words: Sequence[str]) -> str:
    """What a verb does not take, and what it does that is near, or which verbs take it.

    ``verbs`` is the parser of all of them.
    """
    from ...calib.arguments import LAYOUT_NAMES

    subs = next(a for a in verbs._actions if isinstance(a, argparse._SubParsersAction)).choices
    taken = {name: set(sub._option_string_actions) for name, sub in subs.items()}
    option = next((word for word in words if word[:1] == "-"), "")
    if not option:
        return f"{verb} takes no {' '.join(words)}; see forerun {verb} --help"
    name = option.partition("=")[0]
    axis = name.removeprefix("--")
    if verb == "plan" and axis in {one for n in LAYOUT_NAMES for one in (n.name, *n.others)}:
        return f"plan takes no {name}; write --keep {axis}=VALUE for such layouts alone"
    others = [one for one, options in taken.items() if name in options]
    if said := near(name, taken[verb], cutoff=0.6):
        return f"{verb} takes no {name}; {said}"
    there = f"{', '.join(others)} {'do' if others[1:] else 'does'}; " if others else ""
    return f"{verb} takes no {name}; {there}see forerun {verb} --help"
