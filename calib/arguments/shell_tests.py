"""Conditions of shell scripts, as far as their words settle them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_EQUAL, _OTHER = ("=", "=="), "!="
_UNSETTLED = frozenset("$`*?[\\")
"""Characters of an expansion that only a run can do, or of a pattern."""
_BRACKETS = {"[": "]", "[[": "]]"}


def holds(words: Sequence[str]) -> bool | None:
    """Return True where a command succeeds, None where only a run can say.

    Empty words are not among ``words``, as the reader of scripts leaves them out.

    >>> [holds(text.split()) for text in ("[[ a == a ]]", "[ 8 -gt 9 ]", "[ -z ]", "[ $X = 1 ]")]
    [True, False, True, None]
    """
    if not words or words[0] == "!":
        inner = holds(words[1:]) if words else None
        return None if inner is None else not inner
    if words[0] in ("true", "false", ":"):
        return words[0] != "false"
    if _BRACKETS.get(words[0]) != words[-1]:
        return None
    return _settled(list(words[1:-1]))


def _settled(words: list[str]) -> bool | None:
    if words[:1] == ["!"]:
        inner = _settled(words[1:])
        return None if inner is None else not inner
    if any(set(word) & _UNSETTLED for word in words):
        return None
    if words[:1] in (["-z"], ["-n"]) and len(words) <= 2:
        return (len(words) == 1) == (words[0] == "-z")
    signs = [place for place, word in enumerate(words[:2]) if word in (*_EQUAL, _OTHER)]
    if len(signs) == 1 and len(words) <= 3:
        place = signs[0]
        is_same = "".join(words[:place]) == "".join(words[place + 1 :])
        return is_same == (words[place] != _OTHER)
    if len(words) == 3 and words[1] in _NUMBERS and words[0].isdecimal() and words[2].isdecimal():
        return _NUMBERS[words[1]](int(words[0]), int(words[2]))
    return None


def joined(conditions: Sequence[tuple[str, bool | None]]) -> bool | None:
    """Return the value of a list of conditions, each with its ``&&`` or ``||``, from the left.

    >>> joined([("", None), ("||", True)]), joined([("", False), ("&&", None), ("||", None)])
    (True, None)
    """
    value: bool | None = True
    for place, (sign, one) in enumerate(conditions):
        if not place:
            value = one
        elif sign == "&&":
            value = False if False in (value, one) else None if None in (value, one) else True
        elif sign == "||":
            value = True if True in (value, one) else None if None in (value, one) else False
        else:  # the last command of several decides
            value = one
    return value
