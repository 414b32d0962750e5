"""Launches in scripts: the command that starts training, and the script around it.

Scripts are read, never run.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path, PurePath

from ...calib.arguments.launch_words import EXPANSION, Word
from ...calib.arguments.launchers import ranks_of, split_front, split_variables
from ...calib.arguments.megatron_command import split_launcher
from ...calib.arguments.shell_text import BATCH, SHELLS, commands, inline_script, of_options
from ...calib.errors import ConfigError, UnreadError
from ._given_files import read_text

_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_SIZES = ("--num-layers", "--hidden-size")
_SOURCES = ("source", ".")
_NAMING = ("echo", "printf", "[", "[[", "test", *_SOURCES)
"""Words of a shell behind which a script is only named."""
_MOST_DEEP = 4


def script_hint(words: Sequence[str]) -> str:
    """Return how to give the script among words; empty if none is one."""
    script = next((word for word in words if word.endswith(_SCRIPTS)), "")
    return f"{script} is a script; give it after --, such as -- bash {script}" if script else ""


def inner_launch_line(words: Sequence[str]) -> tuple[str, ...]:
    """Return the launch line inside ``bash run.sh``, ``sbatch run.sh`` or ``srun bash -c TEXT``.

    Other lines are returned unchanged.  Raises ``ConfigError`` if a script cannot be read, or no
    training script can be identified from its text alone.
    """
    for _ in range(_MOST_DEEP):
        place = _wrapper(words)
        if place is None:
            break
        words = (*words[:place], *_script_at(words, place).launch)
    return tuple(words)


def _wrapper(words: Sequence[str]) -> int | None:
    """Return the index of a shell, batch command or shell script before any training script."""
    launcher, arguments = split_launcher(words)
    is_script = bool(launcher) or len(arguments) < len(words)
    front = launcher if is_script else words
    names = (*SHELLS, *BATCH)
    places = (n for n, w in enumerate(front) if PurePath(w).name in names or w.endswith(_SCRIPTS))
    return next(places, None)


def _script_at(words: Sequence[str], place: int) -> LaunchScript:
    rest = words[place:]
    variables, starter = split_variables(words[:place])
    front = {"starter": starter, "exported": variables}
    if (script := inline_script(rest)) is not None:
        name = f"{rest[0]} -c"
        return LaunchScript(name=name, text=script[1], variables=variables, **front)
    behind = rest if rest[0].endswith(_SCRIPTS) else rest[1:]
    word = next((one for one in behind if os.path.isfile(one)), None)
    if word is None:
        shown = " ".join(rest[:3])
        raise ConfigError(f"{shown}: no script that can be read; give the launch line itself")
    options = rest[1 : rest.index(word)] if PurePath(rest[0]).name in BATCH else ()
    variables = {**of_options(options), **variables}
    given = behind[behind.index(word) + 1 :]
    variables |= {"#": str(len(given)), **{str(n): one for n, one in enumerate(given, 1)}}
    text = read_text(Path(word), "give the launch line itself")
    return LaunchScript(
        name=str(Path(word)),
        text=text,
        variables=variables,
        **front,
        options=tuple(options),
    )


_PIECES = re.compile(
    r"""(?s)(?<!\S)(?P<note>\#[^\n]*)|\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?P<out>\d*(?:&>|[<>]))"""
    r"""|(?P<end>\n|;;?|&&|\|\|?|(?<![<>])&)"""
)
"""Quotes, comments, redirections, and what ends a command."""
_COMPUTED = re.compile(
    r"""(?m)^[ \t]*(?:export[ \t]+)?\w+="?"""
    r"""(?:\$\((?!\()[^()\n]*(?:\([^()\n]*\)[^()\n]*)*\)|`[^`\n]*`)"?[ \t]*$"""
)
"""An assignment of a command's output, which leaves the variable to the shell."""
_FRONT = re.compile(
    r"""(?s)\s*(?:(?:then|do|else|\{|exec|env|time)\s+)*"""
    r"""(?:[A-Za-z_]\w*=(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\;|&])*(?:\s|\\\n)+)*"""
)
"""Words of a shell and assignments in front of a command."""
_SETS = re.compile(r"""<<|["'\s;]\w+=|\bexport\b""")
"""Variables of a script within a command, which would be lost with it."""
_OF_A_TASK = re.compile(r"SLURM_(?:PROC|NODE|LOCAL)ID$|HOSTNAME$")


@dataclass(frozen=True, kw_only=True)
class LaunchScript:
    """A script of the user's, and where it starts training."""

    name: str
    text: str
    variables: Mapping[str, str]
    """Variables that are set for it, its arguments by their number."""
    starter: tuple[str, ...] = ()
    """Words in front of the shell that runs it."""
    options: tuple[str, ...] = ()
    """Options of ``sbatch`` in front of it."""
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of the shell that runs it."""

    @cached_property
    def launch(self) -> tuple[str, ...]:
        """Words of the command that starts training."""
        return _launch(self._commands(self.text), self.name)

    @cached_property
    def sourced(self) -> tuple[str, ...]:
        """Files that it takes settings from, which are not opened."""
        lines = (split_variables(one)[1] for one in self._commands(self.text))
        return tuple(one[1] for one in lines if len(one) > 1 and one[0] in _SOURCES)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that the script is given."""
        return tuple(self.variables[str(n + 1)] for n in range(int(self.variables.get("#", 0))))

    def _commands(self, text: str) -> list[tuple[str, ...]]:
        try:
            known = _COMPUTED.sub(lambda one: " " * len(one[0]), text)
            return commands(known, self.variables)
        except ConfigError:
            if text == self.text:
                raise
            return []  # cut within a quote

    @cached_property
    def _span(self) -> tuple[int, int]:
        """Begin and end of the simple command that starts training; equal if there is not one."""
        text = self.text
        ends = [0, *(one.end() for one in _PIECES.finditer(text) if one["end"]), len(text)]
        last = bisect_left(ends, True, key=lambda end: self.launch in self._commands(text[:end]))
        begin = ends[max(last - 1, 0)]
        before, until = self._commands(text[:begin]), self._commands(text[: ends[last]])
        if match := _FRONT.match(text, begin):
            begin = match.end()
        pieces = _PIECES.finditer(text, begin)
        end = next((one.start() for one in pieces if one.lastgroup), len(text))
        word = re.escape("".join(text[begin:end].split()[:1]))
        is_called = re.search(rf"(?m)^\s*(?:function\s+{word}\b|{word}\s*\(\))", text)
        is_one = len(until) == len(before) + 1 and self._commands(text).count(self.launch) == 1
        return (begin, end if is_one and not is_called else begin)

    def refusal(self, words: Sequence[Word]) -> str:
        """Return why no other command can stand in the place of the launch, such as a word that the
        shell would not replace as it does now; empty if one can."""
        begin, end = self._span
        numberless = {name: value for name, value in self.variables.items() if name != "#"}
        if self.starter or _wrapper(self.launch) is not None:
            return f"{self.name} is one of several scripts or commands; give the inner one alone"
        if not self.arguments and replace(self, variables=numberless).launch != self.launch:
            return f"{self.name} takes arguments; give them behind it"
        if begin == end or _SETS.search(self.text[begin:end]):
            return f"{self.name} starts training at no single place; give the launch line itself"
        is_of_srun = "srun" in [PurePath(word.text).name for word in words]
        for text in [word.text for word in words if set("$`") & set(word.text)]:
            names = ["".join(found) for found in EXPANSION.findall(text)]
            rest = set("$`") & set(EXPANSION.sub("", text))
            is_literal = any(re.search(rf"\$\{{?{name}\b", self._literal) for name in names)
            is_of_task = is_of_srun and any(map(_OF_A_TASK.match, names))
            is_open = EXPANSION.fullmatch(text) and len(self._quotes(text)) != 1
            if rest or is_literal or is_of_task or is_open:
                return f"{text} in {self.name} is not known before it runs; write its value there"
        return ""

    @cached_property
    def _literal(self) -> str:
        """Everything in single quotes, or after a backslash."""
        quotes = [one[0] for one in _PIECES.finditer(self.text) if one[0][0] == "'"]
        return " ".join((*quotes, *re.findall(r"\\(\$\{?\w+)", self.text)))

    def _quotes(self, text: str) -> set[str]:
        """Return the quotes around a variable that is a whole word: in the command, or else in the
        script."""
        form = rf"(?<![^\s(])(\"?){re.escape(text)}\1(?![^\s)])"
        return set(re.findall(form, self.text[slice(*self._span)]) or re.findall(form, self.text))

    def in_shell(self, word: Word) -> Word:
        """Return a word of the command with its variables left to the shell."""
        is_open = bool(EXPANSION.search(word.text)) and word.blank is None
        return replace(word, is_open=is_open, is_split=is_open and self._quotes(word.text) == {""})

    def with_launch(self, command: str, words: Sequence[str]) -> str:
        """Return the text with another command in the place of the launch.

        Raise ``ConfigError`` if it does not read as these words; those with a ``$`` may differ.
        """
        begin, end = self._span
        text = f"{self.text[:begin]}{command} {self.text[end:]}"
        found = split_front(_launch(self._commands(text), self.name))[1]
        pairs = [(a, b) for a, b in zip_longest(found, words, fillvalue="") if a != b]
        if wrong := [b or a for a, b in pairs if "$" not in f"{a}{b}"]:
            raise ConfigError(
                f"{self.name} would not start {wrong[0]}; give the launch line itself"
            )
        return text


def launch_script(words: Sequence[str]) -> LaunchScript | None:
    """Return the script that ``sbatch run.sh`` or ``bash -c TEXT`` runs; None for a launch line.

    Raise ``ConfigError`` if it cannot be read.
    """
    place = _wrapper(words)
    return None if place is None else _script_at(words, place)


def _launch(command_lines: Sequence[Sequence[str]], name: str) -> tuple[str, ...]:
    """Return the training command: the last one, preferring those that state the model's sizes."""
    trains = [tuple(one) for one in command_lines if _trains(one)]
    sized = [one for one in trains if any(word in _SIZES for word in one)]
    if not trains:
        modules = [" ".join(one[:3]) for one in command_lines if "-m" in one]
        unread = f" (not read: {', '.join(modules)})" * bool(modules)
        raise UnreadError(
            f"{name}: its text names no training script{unread}, and Forerun does not execute it; "
            "give the launch line itself after --"
        )
    return (sized or trains)[-1]


def _trains(words: Sequence[str]) -> bool:
    """Return True for a command that may train: it runs a script, or a module under a launcher."""
    if next(iter(split_variables(words)[1]), "") in _NAMING:
        return False
    is_launched = bool(ranks_of(split_launcher(words)[0]).launcher)
    wrapper = _wrapper(words)
    is_wrapped = wrapper is not None and len(words) > wrapper + 1
    return is_launched or is_wrapped or any(word.endswith(".py") for word in words)
