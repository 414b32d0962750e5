"""Commands of a shell script, by static analysis: nothing is executed.

Assignments, arrays, quotes, plain expansions (``$A``, ``${A}``, ``${A:-word}``, ``${A[@]}``,
``$((A * 2))``), called functions and branches are evaluated in order, a branch if its condition can
be decided from the text.  Whatever only execution can determine (a command's output, another
branch, a loop) stays as written.
"""

from __future__ import annotations

import ast
import enum
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath

from ..errors import ConfigError
from .launchers import is_of_library

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(rf"{_NAME.pattern}|\d+|[#@*]")
_ASSIGNED = re.compile(r"((?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=")
_DIRECTIVE = re.compile(r"^#(?:SBATCH|PBS|FLUX:)\s+(--?[\w-]+)[= ]?(\S*)")
_HERE_DOCUMENT = re.compile(r"<<(?!<)-?[ \t]*([\"']?)([\w.]+)\1")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>\||<<<|<>|[<>])(?!\()(&(?:\d+-?|-))?&?[ \t]*")
_ENDS = " \t\r\n;|&<>"
"""Characters that end a word."""
_MOST_NESTED = 4
"""Scripts within scripts; a text that holds itself has no end."""
SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_WRAPPING = "sbatch"
BATCH = (_WRAPPING, "qsub", "salloc")
_LOOPS = {"while": False, "until": True}
"""Loops, with the value of the condition that skips them entirely."""
_PATTERN = re.compile(r"(?:\s|#.*\n)*\(?[ \t]*([^()\s][^()\n]*?)[ \t]*\)")
"""The words of a ``case`` in front of their commands."""
_INDEX = re.compile(r"\[([^]@*]+)\]")
_NUMBERED = re.compile(r"\$\{?(\d|#)\}?")
_SLICE = re.compile(r"(?:\[[@*]\])?: ?(\d+)(?:: ?(\d+))?")
"""Elements from a number on, and how many; arguments count from 1."""
_OPENS, _CLOSES = ("for", "select"), ("fi", "done", "esac", "}")
_ALONE = ("then", "do", "else", "{")
"""Words after which a command begins without a separator."""
_PROCESS = ("<(", ">(")
_SEPARATORS = (";", "|", "&", "\n")
_SLURM = {
    "--nodes": "SLURM_NNODES", "-N": "SLURM_NNODES", "--ntasks": "SLURM_NTASKS",
    "-n": "SLURM_NTASKS", "--ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "--gpus-per-node": "SLURM_GPUS_PER_NODE", "--cpus-per-task": "SLURM_CPUS_PER_TASK",
    "--gres": "SLURM_GPUS_ON_NODE",
}  # fmt: skip
"""The variables that Slurm sets from a directive (sbatch's manual, output environment)."""
_ALSO = {"SLURM_NNODES": "SLURM_JOB_NUM_NODES", "SLURM_GPUS_PER_NODE": "SLURM_GPUS_ON_NODE"}
_TASKS = ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
"""Variables by which an ``srun`` of a job starts as many tasks as the job has."""
_MOST_CHARACTERS = 1 << 20
_MOST_CALLED = _MOST_CHARACTERS // 8
"""Most characters of functions, by their calls; calls of calls may be without end."""
_MATHS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip

Value = tuple[str, ...]
"""The value of a variable: one text, or the elements of an array."""
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt,
    "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_EQUAL, _OTHER = ("=", "=="), "!="
_UNSETTLED = frozenset("$`*?[\\")
"""Characters of patterns, and of expansions that only execution can resolve."""
_BRACKETS = {"[": "]", "[[": "]]"}


def commands(text: str, variables: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """Return the words of each command in order, outside loops and branches that may be skipped.

    Redirections are left out.  ``variables`` are set beforehand, the script's arguments by their
    number.  Variables of libraries (``launchers.is_of_library``) that the script sets for a command
    or exports precede it.  Raise ``ConfigError`` for an unterminated quote or array, or a script
    over 1 MiB.

    >>> commands('N=4\\nARGS=(--lr 1 "$N")\\ntorchrun --nnodes $N t.py "${ARGS[@]}" --out $D')
    [('torchrun', '--nnodes', '4', 't.py', '--lr', '1', '4', '--out', '$D')]
    >>> commands('export NCCL_ALGO=Ring A=1\\nNCCL_PROTO=LL python a.py\\npython b.py')
    [('NCCL_ALGO=Ring', 'NCCL_PROTO=LL', 'python', 'a.py'), ('NCCL_ALGO=Ring', 'python', 'b.py')]
    """
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError("the script is larger than 1 MiB; give its launch line after --")
    known = {name: (value,) for name, value in (variables or {}).items()}
    known = _with_tasks({**_of_directives(text), **known})
    if "#" in known:
        known["@"] = known["*"] = _numbered(known)
    return list(_Reader(text=text, known=known).commands())


def inline_script(words: Sequence[str]) -> tuple[tuple[str, ...], str] | None:
    """Return the words before ``bash -c TEXT`` and the text; None if the words have no such part.

    >>> inline_script(["srun", "bash", "-lc", "python t.py"])
    (('srun',), 'python t.py')
    """
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return None
        if PurePath(word).name in SHELLS:
            rest = words[place + 1 :]
            flag = next((n for n, w in enumerate(rest) if re.fullmatch(r"-\w*c", w)), len(rest))
            is_inline = all(w.startswith("-") for w in rest[:flag]) and flag + 1 < len(rest)
            return (tuple(words[:place]), rest[flag + 1]) if is_inline else None
    return None


def of_options(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that Slurm sets from options of ``sbatch`` or its directives.

    >>> of_options(["--nodes=4", "-n", "32", "--gpus-per-node=a100:8"])["SLURM_GPUS_PER_NODE"]
    '8'
    """
    variables: dict[str, str] = {}
    for place, word in enumerate(words):
        option, joined, value = word.partition("=")
        value = value if joined else next(iter(words[place + 1 :]), "")
        if option == "--gres":
            value = next((one for one in value.split(",") if one.startswith("gpu:")), "")
        if (name := _SLURM.get(option, "")) and value:
            variables[name] = variables[_ALSO.get(name, name)] = value.rpartition(":")[2]
    return variables


def _with_tasks(known: dict[str, Value]) -> dict[str, Value]:
    """Add the tasks of a job that names only those of a node, as Slurm does."""
    nodes, per_node = (
        "".join(known.get(name, one))
        for name, one in (("SLURM_NNODES", "1"), ("SLURM_NTASKS_PER_NODE", ""))
    )
    if nodes.isdecimal() and per_node.isdecimal():
        known.setdefault("SLURM_NTASKS", (str(int(nodes) * int(per_node)),))
    return known


def _numbered(known: Mapping[str, Value]) -> Value:
    """Return the script's arguments in order."""
    count = int("".join(known["#"]))
    return tuple("".join(known.get(str(n), ())) for n in range(1, count + 1))


def _of_directives(text: str) -> dict[str, Value]:
    directives = filter(None, map(_DIRECTIVE.match, text.splitlines()))
    words = [word for one in directives for word in (f"{one[1]}={one[2]}" if one[2] else one[1],)]
    return {name: (value,) for name, value in of_options(words).items()}


class _Branch(enum.Enum):
    """State of a branch while the script is read."""

    TAKEN = "taken"
    NOT_YET = "not yet"
    """Neither this branch nor an earlier one is taken."""
    OVER = "over"
    """An earlier branch was taken."""
    UNSETTLED = "unsettled"
    """Only execution can decide."""


@dataclass(slots=True, kw_only=True)
class _Reader:
    text: str
    known: dict[str, Value]
    place: int = 0
    branches: list[_Branch] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    sign: str = "\n"
    """The separator after the last command."""
    guard: bool | None = True
    """True if ``&&`` or ``||`` lets the next command run; None if only execution can decide."""
    status: bool | None = True
    """True if the last command that ran in such a list succeeded; None if unknown."""
    front: dict[str, str] = field(default_factory=dict)
    """Variables set in front of the command."""
    exported: dict[str, str] = field(default_factory=dict)
    is_export: bool = False
    """True if the command's assignments apply to all later commands."""
    subjects: list[str] = field(default_factory=list)
    """The word of each ``case`` that is open."""
    ends: list[str] = field(default_factory=list)
    """Last lines of the here-documents that begin after this line."""
    document: str | None = None
    """The here-document of the last command."""
    depth: int = 0
    """Scripts and calls around this one."""
    functions: dict[str, str] = field(default_factory=dict)
    """Commands of each function of the script."""
    opened: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, begin and branches around each function that is being read."""
    num_called: int = 0
    """Characters of the functions called so far."""

    def commands(self) -> Iterator[tuple[str, ...]]:
        while self.place < len(self.text):
            begin = self.place
            self._line()
            words, self.words = tuple(self.words), []
            document, self.document = self.document, None
            front = self._front(words)
            first = words[0] if words else ""
            if self._is_structure(words, begin):
                pass
            elif first in self.functions and not self._is_passed_over():
                yield from self._call(words)
            elif first == "shift":
                self._shift(words)
            elif words and first not in _ALONE and self._is_taken(is_read=True):
                yield from ((*front, *one) for one in self._inner(words, document))
            self._let_next(words)
            if self.sign == ";;" and self.subjects and self.branches:
                self.branches[-1] = _closed(self.branches[-1])
                self._match()

    def _is_structure(self, words: tuple[str, ...], begin: int) -> bool:
        """Enter or leave a branch, loop or function; False if the words, from ``begin`` on, are
        those of a command."""
        first = words[0] if words else ""
        if first in ("if", "elif"):
            self._choose(words[1:], is_first=first == "if")
        elif first in _LOOPS:
            is_skipped = self._condition(words[1:], "do") is _LOOPS[first]
            self.branches.append(_Branch.OVER if is_skipped else _Branch.UNSETTLED)
        elif first == "else" and self.branches:
            self.branches[-1] = _otherwise(self.branches[-1])
        elif first == "case":
            self.subjects.append("".join(words[1:-1]))
            self.branches.append(_Branch.NOT_YET)
            self._match()
        elif function := _function(words):
            begin = self.text.find("{", begin) + 1 or len(self.text)
            self.opened.append((function, begin, len(self.branches)))
            self.branches.append(_Branch.OVER)
        elif first in _OPENS:
            self.branches.append(_Branch.UNSETTLED)
        elif first in _CLOSES:
            self._close(first)
        else:
            return False
        return True

    def _close(self, word: str) -> None:
        """End a branch, and the function that it belongs to."""
        self.branches = self.branches[:-1]
        self.subjects = self.subjects[: -1 if word == "esac" else None]
        if self.opened and self.opened[-1][2] == len(self.branches):
            name, begin, _ = self.opened.pop()
            if not self._is_passed_over():
                self.functions[name] = self.text[begin : self.text.rfind("}", begin, self.place)]

    def _call(self, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Return the commands of a function, after which its variables are known; none if the call
        may be skipped."""
        text = self.functions[words[0]]
        self.num_called += len(text) + 1
        if self.depth == _MOST_NESTED or self.num_called > _MOST_CALLED:
            return [words]
        around = self._without_arguments()
        self._set_arguments(words[1:])
        inner = _Reader(
            text=text,
            known=self.known,
            branches=[] if self._is_taken(is_read=True) else [_Branch.UNSETTLED],
            exported=self.exported,
            depth=self.depth + 1,
            functions=self.functions,
            num_called=self.num_called,
        )
        result = list(inner.commands())
        self.exported, self.num_called = inner.exported, inner.num_called
        self._without_arguments()
        self.known |= around
        return result

    def _set_arguments(self, arguments: Sequence[str]) -> None:
        whole = tuple(arguments)
        self.known |= {str(n): (one,) for n, one in enumerate(whole, 1)}
        self.known |= {"#": (str(len(whole)),), "@": whole, "*": whole}

    def _without_arguments(self) -> dict[str, Value]:
        """Return the arguments and forget them."""
        names = [name for name in self.known if name.isdecimal() or name in ("#", "@", "*")]
        return {name: self.known.pop(name) for name in names}

    def _match(self) -> None:
        """Enter the commands of a ``case`` if the word of the case fits one of theirs."""
        pattern = _PATTERN.match(self.text, self.place)
        if pattern is None:
            return
        self.place, self.sign = pattern.end(), "\n"
        if self.branches[-1] is _Branch.NOT_YET:
            words = [word.strip(" \"'") for word in pattern[1].split("|")]
            is_open = bool(set(self.subjects[-1] + pattern[1]) & set("$`"))
            is_same = any(fnmatchcase(self.subjects[-1], word) for word in words)
            chosen = _Branch.TAKEN if is_same else _Branch.NOT_YET
            self.branches[-1] = _Branch.UNSETTLED if is_open else chosen

    def _inner(self, words: tuple[str, ...], document: str | None) -> list[tuple[str, ...]]:
        """Return the commands of a command's own script, or the command if it has none."""
        script = _script_of(words, document)
        if script is None or self.depth == _MOST_NESTED:
            return [words]
        before, text, variables = script
        known = {**self.known, **_of_directives(text), **{n: (v,) for n, v in variables.items()}}
        try:
            known = _with_tasks(known)
            depth, functions = self.depth + 1, dict(self.functions)
            reader = _Reader(text=text, known=known, depth=depth, functions=functions)
            inner = list(reader.commands())
        except ConfigError:  # a text that is no script of a shell
            return [words]
        return [(*before, *one) for one in inner]

    def _shift(self, words: Sequence[str]) -> None:
        """Drop the first arguments of the script, or all if the branch may be skipped."""
        count = int(words[1]) if words[1:] and words[1].isdecimal() else 1
        arguments = self.known.get("@", ())[count:]
        if self._is_passed_over():
            return
        self._without_arguments()
        if self._is_taken(is_read=False):
            self._set_arguments(arguments)

    def _let_next(self, words: Sequence[str]) -> None:
        """Record if ``&&`` or ``||`` after a command lets the next one run."""
        if words and self.guard is not False:
            outcome = holds(words)
            self.status = outcome if self.guard or outcome == self.status else None
        if self.sign not in ("&&", "||"):
            self.guard = True
        elif words:
            is_and = self.sign == "&&"
            self.guard = None if self.status is None else self.status == is_and

    def _choose(self, words: Sequence[str], *, is_first: bool) -> None:
        """Enter a branch whose condition starts with these words."""
        condition = self._condition(words, "then")
        chosen = {True: _Branch.TAKEN, False: _Branch.NOT_YET, None: _Branch.UNSETTLED}[condition]
        if is_first:
            self.branches.append(chosen)
        elif self.branches:
            is_open = self.branches[-1] is _Branch.NOT_YET
            self.branches[-1] = chosen if is_open else _closed(self.branches[-1])

    def _condition(self, words: Sequence[str], end: str) -> bool | None:
        """Return the value of a list of conditions up to the word ``end``."""
        conditions, sign = [("", holds(words))], self.sign
        while self.place < len(self.text):
            self._line()
            words, self.words = tuple(self.words), []
            if words[:1] == (end,):
                break
            if words:
                conditions.append((sign, holds(words)))
            sign = self.sign
        return joined(conditions)

    def _is_taken(self, *, is_read: bool) -> bool:
        """Return True if a command runs; with ``is_read``, also if its guard is unknown."""
        is_inside = all(branch is _Branch.TAKEN for branch in self.branches)
        return is_inside and (self.guard is not False if is_read else self.guard is True)

    def _is_passed_over(self) -> bool:
        skipped = (_Branch.NOT_YET, _Branch.OVER)
        return self.guard is False or any(branch in skipped for branch in self.branches)

    def _front(self, words: Sequence[str]) -> list[str]:
        """Return a command's variables of libraries, as words; store exports for later commands."""
        if words[:1] == ("export",):
            self.front = {n: "".join(self.known[n]) for n in words[1:] if n in self.known}
        if words[:1] == ("unset",):
            self.exported = {n: v for n, v in self.exported.items() if n not in words[1:]}
        is_export = self.is_export or words[:1] == ("export",)
        library_variables = {
            name: value for name, value in self.front.items() if is_of_library(name)
        }
        if is_export and self._is_taken(is_read=False):
            self.exported |= library_variables
        self.front, self.is_export = {}, False
        names = _TASKS if words[:1] == ("srun",) else ()
        tasks = {name: "".join(self.known[name]) for name in names if name in self.known}
        variables = self.exported | tasks | library_variables
        return [f"{name}={value}" for name, value in variables.items()]

    def _line(self) -> None:
        """Read words up to the end of one command, and assignments in front of it."""
        while self.place < len(self.text):
            char = self.text[self.place]
            if char in _SEPARATORS:
                pair = self.text[self.place : self.place + 2]
                sign = pair if pair in ("&&", "||", ";;") else char
                self.place += len(sign)
                self._take_documents(char)
                is_going_on = not self.words and self.sign in ("&&", "||") and char == "\n"
                if self.words or sign == ";;" or (char == "\n" and not is_going_on):
                    self.sign = sign
                    return
                self._front(())
                if sign == ";":  # after an assignment
                    self.guard = True
            elif char in " \t\r" or self.text.startswith("\\\n", self.place):
                self.place += 2 if char == "\\" else 1
            elif char == "#":
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            elif not self.words and (assigned := _ASSIGNED.match(self.text, self.place)):
                self._assign(assigned)
            elif here := _HERE_DOCUMENT.match(self.text, self.place):
                self.place = here.end()
                self.ends.append(here[2])
            elif redirection := _REDIRECTION.match(self.text, self.place):
                self.place = redirection.end()
                if not redirection[1]:
                    self._word(_ENDS)
            else:
                self.words += self._word(_ENDS)
                is_case = self.words[:1] == ["case"] and self.words[-1] == "in"
                if is_case or (len(self.words) == 1 and self.words[0] in _ALONE):
                    self.sign = "\n"
                    return

    def _take_documents(self, separator: str) -> None:
        """Read the here-documents that begin after the end of a line."""
        while separator == "\n" and self.ends:
            end = re.compile(rf"^\t*{re.escape(self.ends.pop(0))}$", re.MULTILINE)
            last = end.search(self.text, self.place)
            self.document = self.text[self.place : last.start() if last else len(self.text)]
            self.place = last.end() if last else len(self.text)

    def _assign(self, assigned: re.Match[str]) -> None:
        self.place, self.sign = assigned.end(), ""
        name, is_more = assigned[2], bool(assigned[3])
        self.is_export |= (assigned[1] or "").startswith(("export", "declare -x"))
        before = self.known.get(name, ()) if is_more else ()
        if self.text.startswith("(", self.place):
            self.place += 1
            value = (*before, *self._elements())
        else:
            value = ("".join(before) + " ".join(self._word(_ENDS, is_split=False)),)
        if self._is_passed_over():
            return
        # The branch may be skipped, so its assignments are unknown.
        self.known[name] = value if self._is_taken(is_read=False) else (f"${name}",)
        self.front[name] = "".join(value)

    def _elements(self) -> Iterator[str]:
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == ")":
                self.place += 1
                return
            if char in " \t\r\n" or self.text.startswith("\\\n", self.place):
                self.place += 2 if char == "\\" else 1
            elif char == "#":
                end = self.text.find("\n", self.place)
                self.place = len(self.text) if end < 0 else end
            else:
                yield from self._word(" \t\r\n)")
        raise ConfigError("an array of the script has no end; correct it")

    def _word(self, ends: str, *, is_split: bool = True) -> list[str]:
        """Return one word, or several by an unquoted expansion."""
        parts, quote = [""], ""
        while self.place < len(self.text):
            char = self.text[self.place]
            if char == "'" and not quote:
                end = self.text.find("'", self.place + 1)
                if end < 0:
                    raise ConfigError("a quote of the script has no end; correct it")
                parts[-1] += self.text[self.place + 1 : end]
                self.place = end + 1
            elif char == '"':
                quote = "" if quote else char
                self.place += 1
            elif char == "\\":
                parts[-1] += self.text[self.place + 1 : self.place + 2].strip("\n")
                self.place += 2
            elif char in "$`" or (not quote and self.text[self.place : self.place + 2] in _PROCESS):
                self._expand(parts, is_split=is_split and not quote)
            elif not quote and char in ends:
                break
            else:
                parts[-1] += char
                self.place += 1
        if quote:
            raise ConfigError("a quote of the script has no end; correct it")
        return [part for part in parts if part] if is_split else parts

    def _expand(self, parts: list[str], *, is_split: bool) -> None:
        written, value = self._expansion()
        if value is None:
            parts[-1] += written
            return
        pieces = [w for one in value for w in (one.split() if is_split else [one])]
        if value and len(value) == 1 and not is_split:
            parts[-1] += value[0]
        elif pieces:
            parts[-1] += pieces[0]
            parts += pieces[1:]

    def _expansion(self) -> tuple[str, Value | None]:
        """Return the text of an expansion and its value; None if only execution can decide."""
        begin = self.place
        if self.text.startswith("$((", begin):
            end = self.text.find("))", begin)
            self.place = end + 2 if end >= 0 else len(self.text)
            written = self.text[begin : self.place]
            return written, self._sum(written[3:-2])
        if self.text[begin] == "`" or self.text.startswith(("$(", *_PROCESS), begin):
            self.place = _closing(self.text, begin)
            return self.text[begin : self.place], None
        if self.text.startswith("${", begin):
            self.place = _closing(self.text, begin)
            written = self.text[begin : self.place]
            return written, self._braced(written[2:-1])
        name = _PARAMETER.match(self.text, begin + 1)
        if name and name[0].isdecimal():
            self.place = begin + 2
            return self.text[begin : self.place], self._value(name[0][0])
        self.place = name.end() if name else min(begin + 2, len(self.text))
        return self.text[begin : self.place], self.known.get(name[0]) if name else None

    def _value(self, name: str) -> Value | None:
        """Return the value of a variable, of an argument that is not given an empty text; None if
        it is not known."""
        is_absent = name.isdecimal() and "#" in self.known
        return self.known.get(name, ("",) if is_absent else None)

    def _braced(self, inner: str) -> Value | None:
        name = _PARAMETER.match(inner)
        if name is None:
            return None
        rest, value = inner[name.end() :], self.known.get(name[0])
        if rest in ("", "[@]", "[*]"):
            return self._value(name[0])
        is_list = name[0] in ("@", "*") or rest.startswith("[")
        if value is not None and is_list and (part := _SLICE.fullmatch(rest)):
            first = int(part[1]) - (name[0] in ("@", "*"))
            return value[max(first, 0) :][: int(part[2]) if part[2] else None]
        if (index := _INDEX.fullmatch(rest)) and value and not set("".join(value)) & set("$`"):
            place = "".join(self._sum(index[1]) or ())
            return value[int(place) : int(place) + 1] if place.isdecimal() else None
        if rest[:2] in (":-", ":=") or rest[:1] in ("-", "="):
            usual = rest.lstrip(":")[1:].strip("\"'")
            nested = _Reader(text=usual, known=self.known)._word("") if usual else []
            value = value if value is not None else tuple(nested) or ("",)
            if rest.lstrip(":")[0] == "=" and self._is_taken(is_read=False):
                self.known[name[0]] = value
            return value
        return None

    def _sum(self, inner: str) -> Value | None:
        text = _NUMBERED.sub(lambda m: "".join(self._value(m[1]) or ("?",)), inner)
        text = _NAME.sub(lambda m: "".join(self.known.get(m[0], ("?",))), text.replace("$", ""))
        text = re.sub(r"[{}]", "", text)
        try:
            return (str(_computed(ast.parse(text.strip(), mode="eval").body)),)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _function(words: Sequence[str]) -> str:
    """Return the name of the function whose definition begins with these words; empty if none."""
    name = words[1] if words[:1] == ("function",) and len(words) > 1 else ""
    if not name and words and (words[0].endswith("()") or words[1:2] == ("()",)):
        name = words[0]
    return name.removesuffix("()")


def _script_of(
    words: tuple[str, ...], document: str | None
) -> tuple[tuple[str, ...], str, dict[str, str]] | None:
    """Return the words before a script within a command, its text, and the variables that options
    set for it; None without one."""
    if words[0] == "eval":
        return (), " ".join(words[1:]), {}
    if (inline := inline_script(words)) is not None:
        return *inline, {}
    program = next((w for w in words if PurePath(w).name in (*SHELLS, *BATCH)), "")
    before = words[: words.index(program)] if program else ()
    if document is not None and (program or document.startswith("#!")):
        return before, document, {}
    if PurePath(program).name == _WRAPPING:
        for word, after in zip(words, (*words[1:], ""), strict=True):
            name, joined, value = word.partition("=")
            if name == "--wrap" and (joined or after):
                return before, value if joined else after, of_options(words)
    return None


def _otherwise(branch: _Branch) -> _Branch:
    return _Branch.TAKEN if branch is _Branch.NOT_YET else _closed(branch)


def _closed(branch: _Branch) -> _Branch:
    """Return the state of the branch after this one."""
    return _Branch.OVER if branch is _Branch.TAKEN else branch


def _closing(text: str, begin: int) -> int:
    """Return the index after the end of a command substitution, or of an expansion in braces."""
    if text[begin] == "`":
        end = text.find("`", begin + 1)
        return end + 1 if end >= 0 else len(text)
    opens, closes = text[begin + 1], {"(": ")", "{": "}"}[text[begin + 1]]
    depth = 0
    for place in range(begin + 1, len(text)):
        depth += (text[place] == opens) - (text[place] == closes)
        if not depth:
            return place + 1
    return len(text)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _MATHS:
        return int(_MATHS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError("no whole numbers")


def holds(words: Sequence[str]) -> bool | None:
    """Return True if a command succeeds, None if only execution can decide.

    ``words`` contains no empty words, since the reader of scripts drops them.

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
    """Return the value of a list of conditions, each with its ``&&`` or ``||``, left to right.

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
