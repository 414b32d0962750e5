"""Words of a command line: their blanks, their changes for a layout, and their shell syntax."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import PurePath

from ..records.run_values import Launch
from ..shell import assigned, quoted, required
from ..workload.parallelism import Parallelism
from .launchers import MODULES, leaves_tasks_open, ranks_of, with_tasks
from .option_words import grouped, is_option, owners
from .passed_on import MASK

_ASSIGNED = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/-]*=")
_NOT_OF_A_NAME = re.compile(r"[^A-Z0-9]+")
EXPANSION = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
"""A variable that a shell replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blank:
    """A value that only the user knows; a shell stops with the hint if the variable is not set."""

    name: str
    hint: str

    @property
    def text(self) -> str:
        """The expansion in shell syntax."""
        return required(self.name, self.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word; each ``***`` in its text stands for the blank, if it has one."""

    text: str
    blank: Blank | None = None
    is_variable: bool = False
    """True for ``NAME=value`` in front of a command."""
    is_open: bool = False
    """True if a shell replaces the variables in the text."""
    is_split: bool = False
    """True if it also splits their values into words."""

    @property
    def shell(self) -> str:
        """The word in ``sh`` syntax.

        >>> Word(text="a b").shell, Word(text="--pin=***", blank=Blank(name="PIN", hint="x")).shell
        ("'a b'", '--pin="${PIN:?x}"')
        >>> print(Word(text="$HEAD:1 2", is_open=True).shell)
        "$HEAD"':1 2'
        """
        if self.is_variable:
            name, _, value = self.text.partition("=")
            return assigned(name, value)
        if self.is_split:
            return self.text
        if self.is_open:
            ends = [0, *(edge for m in EXPANSION.finditer(self.text) for edge in m.span()), None]
            parts = [self.text[a:b] for a, b in pairwise(ends)]
            return "".join(
                f'"{part}"' if is_variable else part and quoted(part)
                for part, is_variable in zip(parts, cycle((False, True)))
            )
        if self.blank is None:
            return quoted(self.text)
        return self.blank.text.join(part and quoted(part) for part in self.text.split(MASK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """An option with its values, or a word that belongs to no option."""

    words: tuple[Word, ...]

    @property
    def name(self) -> str:
        """The option, with dashes for underscores, or the key of an assignment; otherwise empty."""
        first = self.words[0].text
        assignment = _ASSIGNED.match(first)
        if assignment and not first.startswith("-"):
            return assignment[0].rstrip("=").lstrip("+~")
        return first.partition("=")[0].replace("_", "-") if is_option(first) else ""

    @property
    def value(self) -> str:
        """The text after the option or the ``=``; empty if there is none."""
        _, joined, value = self.words[0].text.partition("=")
        return value if joined else " ".join(word.text for word in self.words[1:])

    def with_value(self, value: Word) -> Phrase:
        """Return the phrase with another value, after an ``=`` if there was one.

        >>> one, other = phrases(plain(("--lr", "1", "--wd=2")))
        >>> one.with_value(Word(text="3")).shell, other.with_value(Word(text="3")).shell
        ('--lr 3', '--wd=3')
        """
        name, joined, _ = self.words[0].text.partition("=")
        if joined:
            return Phrase(words=(Word(text=f"{name}={value.text}", blank=value.blank),))
        return Phrase(words=(Word(text=name), value))

    @property
    def shell(self) -> str:
        """The phrase in ``sh`` syntax."""
        return " ".join(word.shell for word in self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotatedWords:
    """Words of a launch line, and notes for the user."""

    words: tuple[Word, ...]
    notes: tuple[str, ...] = ()
    """Steps and facts that the words cannot express, one sentence each."""
    refused: str = ""
    """Why no command can be made of the words; empty if one can."""


def phrases(words: Sequence[Word]) -> tuple[Phrase, ...]:
    """Group each option with its values; assignments (``a.b=1``) and leading words stand alone.

    >>> [one.shell for one in phrases(plain(("t.py", "--lr", "1", "--bf16", "train.x=2")))]
    ['t.py', '--lr 1', '--bf16', 'train.x=2']
    """
    out: list[Phrase] = []
    for group in grouped(words, lambda word: word.text):
        starts = (place for place, word in enumerate(group) if _ASSIGNED.match(word.text))
        end = next(starts, len(group)) if is_option(group[0].text) else 0
        out += [Phrase(words=tuple(group[:end]))] if end else []
        out += [Phrase(words=(word,)) for word in group[end:]]
    return tuple(out)


def join_phrases(command_phrases: Sequence[Phrase]) -> tuple[Word, ...]:
    """Return the words of phrases, in order."""
    return tuple(word for phrase in command_phrases for word in phrase.words)


def set_option(
    command_phrases: Sequence[Phrase], name: str, value: Word, dash: str
) -> list[Phrase]:
    """Return the phrases with an option set: in the user's spelling if present, else appended.

    ``dash`` separates the parts of the name if it is appended.
    """
    if any(phrase.name == name for phrase in command_phrases):
        return [
            phrase.with_value(value) if phrase.name == name else phrase
            for phrase in command_phrases
        ]
    return [*command_phrases, Phrase(words=(Word(text="--" + name[2:].replace("-", dash)), value))]


def plain(words: Sequence[str]) -> tuple[Word, ...]:
    """Return words without blanks."""
    return tuple(Word(text=text) for text in words)


def variables(environment: Mapping[str, str]) -> tuple[Phrase, ...]:
    """Return the assignments in front of a command, sorted by name.

    >>> [one.shell for one in variables({"B": "1", "A": "x y"})]
    ["A='x y'", 'B=1']
    """
    assignment_words = (
        Word(text=f"{name}={environment[name]}", is_variable=True) for name in sorted(environment)
    )
    return tuple(Phrase(words=(word,)) for word in assignment_words)


def with_blanks(words: Sequence[str]) -> tuple[Word, ...]:
    """Return the words of a masked command; a masked value becomes a variable that the user sets.

    Variable names are derived from the option, one per word, and start with ``ARG``, so that they
    never match a common variable.

    >>> [word.shell for word in with_blanks(["t.py", "--pin", "***"])]
    ['t.py', '--pin', '"${ARG_PIN:?the value of --pin, which is not kept}"']
    """
    seen: Counter[str] = Counter()
    out: list[Word] = []
    for option, text in owners(words):
        assignment = _ASSIGNED.match(text)
        name = assignment[0].rstrip("=") if assignment else option
        out.append(Word(text=text, blank=_blank(name, seen) if MASK in text else None))
    return tuple(out)


def _blank(option: str, seen: Counter[str]) -> Blank:
    name = "_".join(filter(None, ("ARG", _NOT_OF_A_NAME.sub("_", option.upper()).strip("_"))))
    seen[name] += 1
    number = f"_{seen[name]}" if seen[name] > 1 or not option else ""
    what = f"the value of {option}" if option else "an argument"
    return Blank(name=name + number, hint=f"{what}, which is not kept")


_PORT = 29500
"""torchrun's default port."""
_HERE = ("localhost", "127.0.0.1", "::1")
_ONE_NODE = frozenset({"--standalone"})
MEETING = frozenset(
    {
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
        *("--master-addr", "--master-port", "--node-rank"),
    }
)
"""Rendezvous options, by which nodes find each other."""
_ACCELERATE = frozenset({"--main-process-ip", "--main-process-port", "--machine-rank"})
_RANK = Blank(name="NODE_RANK", hint="the number of this node, 0 for the first")
_ADDRESS = Blank(name="MASTER_ADDR", hint="the address of the first node")
_JOB, _HEAD = (
    Blank(name=name, hint=f"{what}, which Slurm sets for a batch script")
    for name, what in (("SLURM_JOB_ID", "the job"), ("SLURMD_NODENAME", "its first node"))
)
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    num_nodes: int
    ranks_per_node: int


def start_of(launch: Launch, running: Parallelism, wanted: Parallelism) -> AnnotatedWords:
    """Return the words that start the wanted number of ranks, like the user's launch if known.

    The number of ranks per node stays.  With more than one node, an unknown or local rendezvous
    address becomes a blank.

    >>> launch = Launch(launcher=("torchrun", "--nproc-per-node", "8"), ranks_per_node=8)
    >>> found = start_of(launch, Parallelism(dp=8), Parallelism(dp=16))
    >>> [word.text for word in found.words][:5]
    ['torchrun', '--nproc-per-node', '8', '--nnodes', '2']
    """
    now = _Nodes(num_nodes=launch.num_nodes, ranks_per_node=launch.ranks_per_node)
    is_known = bool(launch.launcher) and now.num_nodes * now.ranks_per_node == running.num_ranks
    launcher = launch.launcher
    kind = ranks_of(launcher).launcher
    is_same = is_known and wanted.num_ranks == running.num_ranks
    is_unchanged = is_same and not _names_one_node(plain(launcher), now)
    if is_unchanged and not leaves_tasks_open(launcher):
        return AnnotatedWords(words=_words_of(launcher))
    nodes, notes = _nodes(wanted, ranks_on_each(launch, running, wanted))
    launcher_words = _words_of(with_tasks(launcher, nodes.num_nodes, nodes.ranks_per_node))
    if not (launcher and (ranks_of(launcher).launcher or not _PYTHON.match(launcher[0]))):
        if launch.argv:
            notes = (
                *notes,
                ("how the run was started is not known; this command starts it with torchrun"),
            )
        kind, launcher_words = "torchrun", plain(("torchrun", "--standalone"))
    if kind in _CHANGES and not is_unchanged:
        change = _CHANGES[kind]
        # Options after ``-m package`` would be read by that module.
        end = len(launcher_words) - 2 * _ends_in_module(launcher_words)
        launcher_words = (*change(launcher_words[:end], now, nodes), *launcher_words[end:])
    stated = ranks_of([word.text for word in launcher_words])
    is_right = stated.num_ranks in (wanted.num_ranks, 0 if is_same else wanted.num_ranks)
    refused = (
        f"{PurePath(launcher_words[0].text).name} is not known to start {wanted.num_ranks} ranks "
        "by these options; write its line for as many, and give that"
    )
    is_right &= stated.num_nodes in (0, nodes.num_nodes)
    return AnnotatedWords(words=launcher_words, notes=notes, refused=refused * (not is_right))


def _words_of(launcher: Sequence[str]) -> tuple[Word, ...]:
    """Return the launcher's words; omit Python before a script in ``bin``, which names it."""
    words = with_blanks(launcher)
    is_script = len(launcher) > 1 and PurePath(launcher[0]).name.startswith("python")
    return words[1:] if is_script and not launcher[1].startswith("-") else words


def ranks_on_each(launch: Launch, running: Parallelism, wanted: Parallelism) -> int:
    """Return the ranks per host in the wanted layout; 0 if unknown.

    An NVLink domain counts as one node of a layout, but each of its hosts is started separately.
    So the launch's number applies, unless the wanted layout has other nodes.
    """
    is_same = wanted.ranks_per_node in (0, running.ranks_per_node)
    is_whole = launch.num_nodes * launch.ranks_per_node == running.num_ranks
    if launch.launcher and is_same and is_whole:
        return launch.ranks_per_node
    return wanted.ranks_per_node


def _nodes(wanted: Parallelism, per_node: int) -> tuple[_Nodes, tuple[str, ...]]:
    """Return the nodes for the wanted ranks, and notes; a single node if ``per_node`` is 0."""
    per_node = per_node or wanted.num_ranks
    if wanted.num_ranks <= per_node:
        return _Nodes(num_nodes=1, ranks_per_node=wanted.num_ranks), ()
    num_nodes, rest = divmod(wanted.num_ranks, per_node)
    if not rest:
        return _Nodes(num_nodes=num_nodes, ranks_per_node=per_node), ()
    note = (
        f"{wanted.num_ranks} ranks do not fill nodes of {per_node}; set the number of nodes and of "
        "ranks on each yourself"
    )
    return _Nodes(num_nodes=1, ranks_per_node=wanted.num_ranks), (note,)


def _ends_in_module(launcher_words: Sequence[Word]) -> bool:
    """Return True for ``torchrun ... -m package``, such as ``-m forerun.launch``."""
    texts = [word.text for word in launcher_words]
    return texts[-2:-1] in (["-m"], ["--module"]) and texts[-1] not in MODULES


def _names_one_node(words: Sequence[Word], nodes: _Nodes) -> bool:
    """Return True if the words name one node among several, so that the others' words differ."""
    names = {phrase.name for phrase in phrases(words)}
    return nodes.num_nodes > 1 and bool(names & {"--node-rank", "--machine-rank"})


def _torchrun(launcher_words: Sequence[Word], now: _Nodes, nodes: _Nodes) -> tuple[Word, ...]:
    given = phrases(launcher_words)
    names = {phrase.name for phrase in given}
    wanted = {"--nproc-per-node": Word(text=str(nodes.ranks_per_node))}
    if nodes.num_nodes > 1 or "--nnodes" in names:
        wanted["--nnodes"] = Word(text=str(nodes.num_nodes))
    if nodes.num_nodes == 1:
        return _changed(given, MEETING if now.num_nodes > 1 else frozenset(), wanted, "-")
    address = _value(given, "--rdzv-endpoint") or _value(given, "--master-addr")
    # One command for all nodes, which therefore can name none of them.
    is_by_slurm = any(PurePath(word.text).name == "srun" for word in launcher_words)
    is_by_rank = is_by_slurm and "--node-rank" in names
    if not address or address.partition(":")[0] in _HERE or is_by_rank:
        head = _HEAD if is_by_slurm else _ADDRESS
        wanted |= {
            "--rdzv-backend": Word(text="c10d"),
            "--rdzv-id": Word(text=MASK, blank=_JOB) if is_by_slurm else Word(text="forerun"),
            "--rdzv-endpoint": Word(text=f"{MASK}:{_PORT}", blank=head),
        }
        return _changed(given, _ONE_NODE | MEETING, wanted, "-")
    if "--node-rank" in names:
        wanted["--node-rank"] = Word(text=MASK, blank=_RANK)
    return _changed(given, _ONE_NODE, wanted, "-")


def _accelerate(launcher_words: Sequence[Word], now: _Nodes, nodes: _Nodes) -> tuple[Word, ...]:
    given = phrases(launcher_words)
    wanted = {
        "--num-processes": Word(text=str(nodes.num_nodes * nodes.ranks_per_node)),
        "--num-machines": Word(text=str(nodes.num_nodes)),
    }
    if nodes.num_nodes == 1:
        return _changed(given, _ACCELERATE if now.num_nodes > 1 else frozenset(), wanted, "_")
    if _value(given, "--main-process-ip") in ("", *_HERE):
        wanted["--main-process-ip"] = Word(text=MASK, blank=_ADDRESS)
    if not _value(given, "--main-process-port"):
        wanted["--main-process-port"] = Word(text=str(_PORT))
    wanted["--machine-rank"] = Word(text=MASK, blank=_RANK)
    return _changed(given, frozenset(), wanted, "_")


def _changed(
    given: Sequence[Phrase], dropped: frozenset[str], wanted: Mapping[str, Word], dash: str
) -> tuple[Word, ...]:
    """Return a launcher's words without the dropped options, and with the wanted ones."""
    out = [phrase for phrase in given if phrase.name not in dropped]
    for name, value in wanted.items():
        out = set_option(out, name, value, dash)
    return join_phrases(out)


def _value(launcher_phrases: Sequence[Phrase], name: str) -> str:
    return next((phrase.value for phrase in launcher_phrases if phrase.name == name), "")


_CHANGES = {"torchrun": _torchrun, "accelerate": _accelerate}
"""Functions that set a launcher's nodes and ranks, by its name."""
