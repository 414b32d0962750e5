"""Options among the words of a command, each with the words after it: the only reader of them.

Whether a word after an option is its value depends on who reads it; a launcher, Megatron and a mask
decide that themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

_Word = TypeVar("_Word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """An option with the words up to the next one; words before the first option have none."""

    option: str
    """As written, without a joined value; empty for words before the first."""
    joined: str | None
    """The value after ``=``; None without one."""
    after: tuple[str, ...]
    """The words after it."""

    @property
    def words(self) -> list[str]:
        """The joined value, if any, and the words after it."""
        return [*self.after] if self.joined is None else [self.joined, *self.after]

    @property
    def written(self) -> list[str]:
        """All words as they were written."""
        if self.joined is not None:
            return [f"{self.option}={self.joined}", *self.after]
        return [self.option, *self.after] if self.option else [*self.after]

    def with_words(self, words: Sequence[str]) -> list[str]:
        """Return the option with other words, the first joined as before."""
        if self.joined is None or not words:
            return option_words(self.option, words)
        return [f"{self.option}={words[0]}", *words[1:]]


def is_option(word: str) -> bool:
    """Return True for an option; a negative number or a pattern is a value.

    >>> [is_option(word) for word in ("--bf16", "-n", "--", "-1e-4", "-.5", "-*-", "-")]
    [True, True, True, False, False, False, False]
    """
    return word.startswith("--") or (word[:1] == "-" and word[1:2].isalpha())


def grouped(words: Sequence[_Word], text: Callable[[_Word], str]) -> Iterator[list[_Word]]:
    """Yield each option with the words up to the next one; first those before all options."""
    group: list[_Word] = []
    for word in words:
        if group and is_option(text(word)):
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def sayings(words: Sequence[str]) -> Iterator[Saying]:
    """Yield each option with its words, in order; no word is left out."""
    for first, *after in grouped(words, str):
        option, equals, value = first.partition("=") if is_option(first) else ("", "", "")
        joined = value if equals else None
        yield Saying(
            option=option, joined=joined, after=tuple(after) if option else (first, *after)
        )


def options_of(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its words; words before the first have the option ``""``."""
    return ((said.option, said.words) for said in sayings(words))


def owners(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the option that each word is or follows, and the word."""
    return ((said.option, word) for said in sayings(words) for word in said.written)


def option_words(option: str, words: Sequence[str]) -> list[str]:
    """Return an option with its words as one writes them: a word with a dash in front is joined.

    >>> option_words("--hybrid-layer-pattern", ["-*-"]), option_words("--bf16", [])
    (['--hybrid-layer-pattern=-*-'], ['--bf16'])
    """
    if len(words) == 1 and words[0].startswith("-"):
        return [f"{option}={words[0]}"]
    return [option, *words]
