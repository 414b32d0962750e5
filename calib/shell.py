"""Quoting of arbitrary words for a shell, so that a terminal can show them.

All text for a shell goes through this module.  The output is one line of printable text that
every ``sh`` reads alike; unprintable bytes come from ``printf``.
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
"""A newline, which ``$( )`` strips from the end of a word; shells do not inherit ``IFS``."""


def quoted(word: str) -> str:
    """Return one word of a command, quoted byte for byte; undecodable bytes are surrogates.

    Raise ``ConfigError`` if ``is_word`` is False for it.

    >>> print(quoted("a b"), quoted("a\\x1b[1m%"), quoted("a\\n"))
    'a b' "$(printf -- 'a\\033[1m\\045')" "$(printf -- 'a')""${IFS#??}"
    """
    if word.isprintable():
        return shlex.quote(word)
    if not is_word(word):
        raise ConfigError(
            f"{printable(word)} cannot be a word of a command; remove the invalid characters"
        )
    inner = word.rstrip("\n")
    form = "".join(map(_in_format, inner))
    return f"\"$(printf -- '{form}')\"" + _LINE_END * (len(word) - len(inner))


def joined(words: Iterable[str]) -> str:
    """Return a command of several words, quoted."""
    return " ".join(map(quoted, words))


def assigned(name: str, value: str) -> str:
    """Return ``NAME=value`` for the front of a command.

    Raise ``ConfigError`` if no shell can set the variable.

    >>> assigned("A", "x y")
    "A='x y'"
    """
    if not is_variable(name, value):
        raise ConfigError(
            f"{printable(name)} is no variable that a shell sets; give a name of letters, digits "
            "and _"
        )
    return f"{name}={quoted(value)}"


def exported(name: str, value: str) -> str:
    """Return the command that sets a variable for all others; raise as ``assigned`` does."""
    return f"export {assigned(name, value)}"


def required(name: str, hint: str) -> str:
    """Return the expansion of a variable that the user has to set.

    If it is not set, the shell stops with the hint.

    >>> required("PIN", "the $(pin)")
    '"${PIN:?the __pin_}"'
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{printable(name)} is no name of a variable; give letters, digits and _")
    return f'"${{{name}:?{_NOT_OF_A_HINT.sub("_", hint)}}}"'


def is_variable(name: str, value: str) -> bool:
    """True if every shell accepts the name and a process can be given the value.

    ``IFS`` is refused: shells do not inherit it, and later words expand by it (``_LINE_END``).
    """
    return _NAME.fullmatch(name) is not None and name != "IFS" and is_word(value)


def is_word(text: str) -> bool:
    """False if no process can be given the text: it has a NUL or a surrogate that is no byte."""
    return not any(c == "\0" or ("\ud800" <= c <= "\udfff" and not _is_byte(c)) for c in text)


def without_others(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that a shell can set, and a note on each of the others."""
    settable = {name: value for name, value in environment.items() if is_variable(name, value)}
    notes = (
        f"the variable {printable(name)} is left out: no shell sets such a name or value; set it "
        "yourself if the program needs it"
        for name in sorted(environment.keys() - settable.keys())
    )
    return settable, tuple(notes)


def printable(text: str) -> str:
    """Return untrusted text for display: on one line, with unprintable characters escaped.

    >>> print(printable("a\\x1b\\u202e"))
    a\\x1b\\u202e
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """Return untrusted text of several lines as ``printable`` does, with its line ends."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def _is_byte(char: str) -> bool:
    return "\udc80" <= char <= "\udcff"


def _in_format(char: str) -> str:
    if char.isalnum() or char in _PLAIN_IN_FORMAT or (char > "\x7f" and char.isprintable()):
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))
