"""Words of a command line: what is blank in them, what changed, and how a shell is told them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..arguments.kept_arguments import MASK
from ..shell import assigned, quoted, required

_ASSIGNED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*=")
_NOT_OF_A_NAME = re.compile(r"[^A-Z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """What only the user knows; a shell stops with the hint where the variable is not set."""

    name: str
    hint: str

    @property
    def text(self) -> str:
        """As a shell reads it."""
        return required(self.name, self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word; each ``***`` of its text stands for the blank where it has one."""

    text: str
    blank: Blank | None = None
    is_variable: bool = False
    """It is ``NAME=value`` in front of a command."""

    @property
    def shell(self) -> str:
        """The word as ``sh`` takes it.

        >>> Word(text="a b").shell, Word(text="--pin=***", blank=Blank(name="PIN", hint="x")).shell
        ("'a b'", '--pin="${PIN:?x}"')
        """
        if self.is_variable:
            name, _, value = self.text.partition("=")
            return assigned(name, value)
        if self.blank is None:
            return quoted(self.text)
        return self.blank.text.join(part and quoted(part) for part in self.text.split(MASK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """An option with the words behind it, or a word that belongs to none."""

    words: tuple[Word, ...]

    @property
    def name(self) -> str:
        """The option, with dashes for underscores; a key of an assignment; empty otherwise."""
        first = self.words[0].text
        found = _ASSIGNED.match(first)
        if found and not first.startswith("-"):
            return found[0].rstrip("=").lstrip("+~")
        return first.partition("=")[0].replace("_", "-") if is_option(first) else ""

    @property
    def value(self) -> str:
        """What stands behind the option or the ``=``; empty where nothing does."""
        _, joined, value = self.words[0].text.partition("=")
        return value if joined else " ".join(word.text for word in self.words[1:])

    def having(self, value: Word) -> Phrase:
        """The phrase with another value, behind an ``=`` where there was one.

        >>> one, other = phrases(plain(("--lr", "1", "--wd=2")))
        >>> one.having(Word(text="3")).shell, other.having(Word(text="3")).shell
        ('--lr 3', '--wd=3')
        """
        name, joined, _ = self.words[0].text.partition("=")
        if joined:
            return Phrase(words=(Word(text=f"{name}={value.text}", blank=value.blank),))
        return Phrase(words=(Word(text=name), value))

    @property
    def shell(self) -> str:
        """The phrase as ``sh`` takes it."""
        return " ".join(word.shell for word in self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Words of a launch line, and what they cannot say."""

    words: tuple[Word, ...]
    notes: tuple[str, ...] = ()
    """What a user has to do or know, one sentence each."""


def phrases(words: Sequence[Word]) -> tuple[Phrase, ...]:
    """Each option with its words, assignments (``a.b=1``) and words before any option alone.

    >>> [one.shell for one in phrases(plain(("t.py", "--lr", "1", "--bf16", "train.x=2")))]
    ['t.py', '--lr 1', '--bf16', 'train.x=2']
    """
    found: list[list[Word]] = []
    for word in words:
        begins = is_option(word.text) or _ASSIGNED.match(word.text) is not None
        if begins or not found or not is_option(found[-1][0].text):
            found.append([word])
        else:
            found[-1].append(word)
    return tuple(Phrase(words=tuple(one)) for one in found)


def joined(found: Sequence[Phrase]) -> tuple[Word, ...]:
    """The words of phrases in their order."""
    return tuple(word for phrase in found for word in phrase.words)


def put(found: Sequence[Phrase], name: str, value: Word, dash: str) -> list[Phrase]:
    """With an option's value in the user's spelling where it is there, else at the end.

    ``dash`` is what stands between the parts of a name that is added.
    """
    if any(phrase.name == name for phrase in found):
        return [phrase.having(value) if phrase.name == name else phrase for phrase in found]
    return [*found, Phrase(words=(Word(text="--" + name[2:].replace("-", dash)), value))]


def plain(words: Sequence[str]) -> tuple[Word, ...]:
    """Words with nothing blank in them."""
    return tuple(Word(text=text) for text in words)


def variables(environment: Mapping[str, str]) -> tuple[Phrase, ...]:
    """What stands in front of a command, by name.

    >>> [one.shell for one in variables({"B": "1", "A": "x y"})]
    ["A='x y'", 'B=1']
    """
    found = (
        Word(text=f"{name}={environment[name]}", is_variable=True) for name in sorted(environment)
    )
    return tuple(Phrase(words=(word,)) for word in found)


def with_blanks(words: Sequence[str]) -> tuple[Word, ...]:
    """The words of a masked command; what is not kept becomes a variable that the user sets.

    Names are made of the option, one for each word, and never those of a usual variable.

    >>> [word.shell for word in with_blanks(["t.py", "--pin", "***"])]
    ['t.py', '--pin', '"${ARG_PIN:?the value of --pin, which is not kept}"']
    """
    seen: Counter[str] = Counter()
    return tuple(
        Word(text=text, blank=_blank(option, seen) if MASK in text else None)
        for option, text in _with_options(words)
    )


def is_option(text: str) -> bool:
    """False for negative numbers, which are values."""
    return text.startswith("-") and len(text) > 1 and not text[1].isdigit() and text[1] != "."


def _with_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    option = ""
    for text in words:
        found = _ASSIGNED.match(text)
        if is_option(text):
            option = text.partition("=")[0]
        elif found:
            yield found[0].rstrip("="), text
            continue
        yield option, text


def _blank(option: str, seen: Counter[str]) -> Blank:
    name = "_".join(filter(None, ("ARG", _NOT_OF_A_NAME.sub("_", option.upper()).strip("_"))))
    seen[name] += 1
    number = f"_{seen[name]}" if seen[name] > 1 or not option else ""
    what = f"the value of {option}" if option else "an argument"
    return Blank(name=name + number, hint=f"{what}, which is not kept")
