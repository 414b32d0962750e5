"""Words for a shell: whatever is in them, a shell takes them as words and a terminal shows them.

All that is written for a shell goes through here.  What is made is one line of printable text that
any ``sh`` reads alike; bytes that cannot be shown come from ``printf``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from .errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NOT_OF_A_HINT = re.compile(r"[^\w .,:=/+-]", re.ASCII)
_PLAIN_IN_FORMAT = frozenset(" #&()*+,-./:;<=>?@[]^_{|}~")
_LINE_END = '"${IFS#??}"'
"""What ``$( )`` takes off the end of a word; shells take no ``IFS`` from the environment."""


def quoted(word: str) -> str:
    """One word of a command, byte by byte what it is; undecodable bytes are surrogates.

    Raises ``ConfigError`` for what ``is_word`` is False of.

    >>> print(quoted("a b"), quoted("a\\x1b[1m%"), quoted("a\\n"))
    'a b' "$(printf -- 'a\\033[1m\\045')" "$(printf -- 'a')""${IFS#??}"
    """
    if word.isprintable():
        return shlex.quote(word)
    if not is_word(word):
        raise ConfigError(f"{shown(word)} can be no word of a command; remove what is no character")
    inner = word.rstrip("\n")
    form = "".join(map(_in_format, inner))
    return f"\"$(printf -- '{form}')\"" + _LINE_END * (len(word) - len(inner))


def joined(words: Iterable[str]) -> str:
    """A command of several words."""
    return " ".join(map(quoted, words))


def assigned(name: str, value: str) -> str:
    """``NAME=value`` in front of a command; raises ``ConfigError`` where it can be none.

    >>> assigned("A", "x y")
    "A='x y'"
    """
    if not is_variable(name, value):
        raise ConfigError(
            f"{shown(name)} is no variable that a shell sets; give a name of letters, digits and _"
        )
    return f"{name}={quoted(value)}"


def required(name: str, hint: str) -> str:
    """A variable that the user has to set; a shell stops with the hint where it is not.

    >>> required("PIN", "the $(pin)")
    '"${PIN:?the __pin_}"'
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{shown(name)} is no name of a variable; give letters, digits and _")
    return f'"${{{name}:?{_NOT_OF_A_HINT.sub("_", hint)}}}"'


def is_variable(name: str, value: str) -> bool:
    """True where the name is one that every shell takes and a process can be given the value.

    ``IFS`` is none: shells take none from outside, and ours would be read by the words behind it.
    """
    return _NAME.fullmatch(name) is not None and name != "IFS" and is_word(value)


def is_word(text: str) -> bool:
    """False for what no process can be given: a NUL, or half a character that is no byte."""
    return not any(c == "\0" or ("\ud800" <= c <= "\udfff" and not _is_byte(c)) for c in text)


def without_others(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables that a shell can set, and a note that names each other one."""
    settable = {name: value for name, value in environment.items() if is_variable(name, value)}
    notes = (
        f"the variable {shown(name)} is left out: no shell sets such a name or value; set it "
        "yourself if the program needs it"
        for name in sorted(environment.keys() - settable.keys())
    )
    return settable, tuple(notes)


def shown(text: str) -> str:
    """Text of others for a person: on one line, what a terminal would obey is escaped.

    >>> print(shown("a\\x1b\\u202e"))
    a\\x1b\\u202e
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _is_byte(char: str) -> bool:
    return "\udc80" <= char <= "\udcff"


def _in_format(char: str) -> str:
    if char.isalnum() or char in _PLAIN_IN_FORMAT or (char > "\x7f" and char.isprintable()):
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))
