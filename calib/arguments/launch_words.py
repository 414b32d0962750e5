"""Words of a command line: what is blank in them, what changed, and how a shell is told them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ..records import Launch
from ..shell import assigned, quoted, required
from ..workload import Parallelism
from .passed_on import MASK

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
        assignment = _ASSIGNED.match(first)
        if assignment and not first.startswith("-"):
            return assignment[0].rstrip("=").lstrip("+~")
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
    word_groups: list[list[Word]] = []
    for word in words:
        begins = is_option(word.text) or _ASSIGNED.match(word.text) is not None
        if begins or not word_groups or not is_option(word_groups[-1][0].text):
            word_groups.append([word])
        else:
            word_groups[-1].append(word)
    return tuple(Phrase(words=tuple(one)) for one in word_groups)


def joined(command_phrases: Sequence[Phrase]) -> tuple[Word, ...]:
    """The words of phrases in their order."""
    return tuple(word for phrase in command_phrases for word in phrase.words)


def put(command_phrases: Sequence[Phrase], name: str, value: Word, dash: str) -> list[Phrase]:
    """With an option's value in the user's spelling where it is there, else at the end.

    ``dash`` is what stands between the parts of a name that is added.
    """
    if any(phrase.name == name for phrase in command_phrases):
        return [
            phrase.having(value) if phrase.name == name else phrase for phrase in command_phrases
        ]
    return [*command_phrases, Phrase(words=(Word(text="--" + name[2:].replace("-", dash)), value))]


def plain(words: Sequence[str]) -> tuple[Word, ...]:
    """Words with nothing blank in them."""
    return tuple(Word(text=text) for text in words)


def variables(environment: Mapping[str, str]) -> tuple[Phrase, ...]:
    """What stands in front of a command, by name.

    >>> [one.shell for one in variables({"B": "1", "A": "x y"})]
    ["A='x y'", 'B=1']
    """
    assignment_words = (
        Word(text=f"{name}={environment[name]}", is_variable=True) for name in sorted(environment)
    )
    return tuple(Phrase(words=(word,)) for word in assignment_words)


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
        assignment = _ASSIGNED.match(text)
        if is_option(text):
            option = text.partition("=")[0]
        elif assignment:
            yield assignment[0].rstrip("="), text
            continue
        yield option, text


def _blank(option: str, seen: Counter[str]) -> Blank:
    name = "_".join(filter(None, ("ARG", _NOT_OF_A_NAME.sub("_", option.upper()).strip("_"))))
    seen[name] += 1
    number = f"_{seen[name]}" if seen[name] > 1 or not option else ""
    what = f"the value of {option}" if option else "an argument"
    return Blank(name=name + number, hint=f"{what}, which is not kept")


_PORT = 29500
"""torchrun's own default."""
_HERE = ("localhost", "127.0.0.1", "::1")
_ONE_NODE = frozenset({"--standalone"})
MEETING = frozenset(
    {
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"),
        *("--master-addr", "--master-port", "--node-rank"),
    }
)
"""Options by which nodes find each other."""
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_ACCELERATE = frozenset({"--main-process-ip", "--main-process-port", "--machine-rank"})
_RANK = Blank(name="NODE_RANK", hint="the number of this node, 0 for the first")
_ADDRESS = Blank(name="MASTER_ADDR", hint="the address of the first node")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    num_nodes: int
    ranks_per_node: int


def start_of(launch: Launch, running: Parallelism, wanted: Parallelism) -> Noted:
    """How the wanted number of ranks is started: as the user's launch was where that is known.

    Nodes keep their number of ranks.  With more nodes than before, where they meet is a blank.

    >>> launch = Launch(launcher=("torchrun", "--nproc-per-node", "8"), ranks_per_node=8)
    >>> found = start_of(launch, Parallelism(dp=8), Parallelism(dp=16))
    >>> [word.text for word in found.words][:5]
    ['torchrun', '--nproc-per-node', '8', '--nnodes', '2']
    """
    now = _Nodes(num_nodes=launch.num_nodes, ranks_per_node=launch.ranks_per_node)
    is_known = bool(launch.launcher) and now.num_nodes * now.ranks_per_node == running.num_ranks
    launcher_words = _words_of(launch.launcher)
    if (
        is_known
        and wanted.num_ranks == running.num_ranks
        and not _names_one_node(launcher_words, now)
    ):
        return Noted(words=launcher_words)
    nodes, notes = _nodes(wanted, ranks_on_each(launch, running, wanted))
    kind = _kind(launch.launcher)
    if kind is None:
        if launch.argv:
            notes = (
                *notes,
                ("how the run was started is not known; this command starts it with torchrun"),
            )
        launcher_words = plain(("torchrun", "--standalone"))
    change = _accelerate if kind == "accelerate" else _torchrun
    # Behind the module that reads it, a word is the module's.
    end = len(launcher_words) - 2 * _ends_in_module(launcher_words)
    return Noted(
        words=(*change(launcher_words[:end], now, nodes), *launcher_words[end:]), notes=notes
    )


def _kind(launcher: Sequence[str]) -> str | None:
    for word in launcher:
        name = PurePath(word).name
        if name in ("torchrun", "torch.distributed.run", "torch.distributed.launch"):
            return "torchrun"
        if name == "accelerate" or word.startswith("accelerate."):
            return "accelerate"
    return None


def _words_of(launcher: Sequence[str]) -> tuple[Word, ...]:
    """Without the interpreter of a script of ``bin``, which names it itself."""
    words = with_blanks(launcher)
    is_script = len(launcher) > 1 and PurePath(launcher[0]).name.startswith("python")
    return words[1:] if is_script and not launcher[1].startswith("-") else words


def ranks_on_each(launch: Launch, running: Parallelism, wanted: Parallelism) -> int:
    """Ranks that the wanted layout has on each host; 0 where nothing says it.

    A domain of NVLink counts as one node of a layout, and its hosts are started one by one: as
    the launch has started them, unless other nodes are wanted.
    """
    is_same = wanted.ranks_per_node in (0, running.ranks_per_node)
    is_whole = launch.num_nodes * launch.ranks_per_node == running.num_ranks
    if launch.launcher and is_same and is_whole:
        return launch.ranks_per_node
    return wanted.ranks_per_node


def _nodes(wanted: Parallelism, per_node: int) -> tuple[_Nodes, tuple[str, ...]]:
    """Nodes of the wanted ranks; a single one where nothing tells how many share one."""
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
    """True under ``torchrun ... -m package``, as with ``-m forerun.launch``."""
    texts = [word.text for word in launcher_words]
    return texts[-2:-1] in (["-m"], ["--module"]) and texts[-1] not in _MODULES


def _names_one_node(words: Sequence[Word], nodes: _Nodes) -> bool:
    """True where the words are those of one node among several: the others' differ."""
    names = {phrase.name for phrase in phrases(words)}
    return nodes.num_nodes > 1 and bool(names & {"--node-rank", "--machine-rank"})


def _torchrun(launcher_words: Sequence[Word], now: _Nodes, nodes: _Nodes) -> tuple[Word, ...]:
    launcher_phrases = put(
        phrases(launcher_words), "--nproc-per-node", Word(text=str(nodes.ranks_per_node)), "-"
    )
    if nodes.num_nodes > 1 or any(one.name == "--nnodes" for one in launcher_phrases):
        launcher_phrases = put(launcher_phrases, "--nnodes", Word(text=str(nodes.num_nodes)), "-")
    if nodes.num_nodes == 1:
        return joined(_alone(launcher_phrases, MEETING, now))
    launcher_phrases = [one for one in launcher_phrases if one.name not in _ONE_NODE]
    if any(one.name == "--node-rank" for one in launcher_phrases):
        launcher_phrases = put(launcher_phrases, "--node-rank", Word(text=MASK, blank=_RANK), "-")
    address = _value(launcher_phrases, "--rdzv-endpoint") or _value(
        launcher_phrases, "--master-addr"
    )
    if not address or address.partition(":")[0] in _HERE:
        launcher_phrases = [one for one in launcher_phrases if one.name not in MEETING]
        launcher_phrases = put(launcher_phrases, "--rdzv-backend", Word(text="c10d"), "-")
        launcher_phrases = put(launcher_phrases, "--rdzv-id", Word(text="forerun"), "-")
        meeting = Word(text=f"{MASK}:{_PORT}", blank=_ADDRESS)
        launcher_phrases = put(launcher_phrases, "--rdzv-endpoint", meeting, "-")
    return joined(launcher_phrases)


def _accelerate(launcher_words: Sequence[Word], now: _Nodes, nodes: _Nodes) -> tuple[Word, ...]:
    num_ranks = nodes.num_nodes * nodes.ranks_per_node
    launcher_phrases = put(
        phrases(launcher_words), "--num-processes", Word(text=str(num_ranks)), "_"
    )
    launcher_phrases = put(launcher_phrases, "--num-machines", Word(text=str(nodes.num_nodes)), "_")
    if nodes.num_nodes == 1:
        return joined(_alone(launcher_phrases, _ACCELERATE, now))
    if _value(launcher_phrases, "--main-process-ip") in ("", *_HERE):
        launcher_phrases = put(
            launcher_phrases, "--main-process-ip", Word(text=MASK, blank=_ADDRESS), "_"
        )
    if not _value(launcher_phrases, "--main-process-port"):
        launcher_phrases = put(launcher_phrases, "--main-process-port", Word(text=str(_PORT)), "_")
    return joined(put(launcher_phrases, "--machine-rank", Word(text=MASK, blank=_RANK), "_"))


def _alone(
    launcher_phrases: Sequence[Phrase], meeting: frozenset[str], now: _Nodes
) -> list[Phrase]:
    """Without what joins nodes, where there were some; a port of one node is the user's choice."""
    return [one for one in launcher_phrases if now.num_nodes == 1 or one.name not in meeting]


def _value(launcher_phrases: Sequence[Phrase], name: str) -> str:
    return next((phrase.value for phrase in launcher_phrases if phrase.name == name), "")
