"""The whole launch line of any layout, with what differs from the running one."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress

from ..arguments.megatron_args import options, rewrite_command
from ..arguments.megatron_rules import environment, refusals
from ..arguments.taken_options import untaken
from ..plain_json import JsonObject
from ..records.launch import Launch
from ..shell import without_others
from ..workload.config import RunConfig, takes_options
from .bridge import bridge_program
from .launchers import start_of
from .loops import loop_program, trainer_program
from .words import Blank, Noted, Phrase, Word, phrases, plain, variables, with_blanks

_SCRIPT = Blank(name="SCRIPT", hint="the training script and its own arguments")
_OVERRIDE = re.compile(r"\+*(train|model|ddp|dist|optimizer|checkpoint|dataset)\.[\w.]+=")
"""A path of Bridge's ``ConfigContainer`` with its value."""


class HostKind(Enum):
    """Who reads the arguments of a run."""

    MEGATRON = "Megatron-LM"
    BRIDGE = "Megatron-Bridge"
    TRAINER = "Hugging Face Trainer"
    LOOP = "a loop of one's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One option before and after, as a shell reads it; empty where it is not there."""

    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A command that starts a layout.  Phrases are options with their values."""

    host: HostKind
    environment: Mapping[str, str]
    start: tuple[Phrase, ...]
    """torchrun, or what starts the ranks, with its options."""
    program: tuple[Phrase, ...]
    """The script with its arguments."""
    running: tuple[Phrase, ...] = ()
    """The same of the running layout, start and program; empty where it is not known."""
    notes: tuple[str, ...] = ()
    """What words cannot say."""
    refused: tuple[str, ...] = ()
    """Why the host would not take it; empty where it does."""

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        """Variables, start and program in order."""
        return (*variables(self.environment), *self.start, *self.program)

    @property
    def command(self) -> str:
        """One line for a shell."""
        return " ".join(phrase.shell for phrase in self.phrases)

    @property
    def is_new(self) -> tuple[bool, ...]:
        """For each phrase whether the running command has it not, or otherwise."""
        if not self.running:
            return (False,) * len(self.phrases)
        return tuple(_is_beyond(self.phrases, self.running))

    @property
    def changes(self) -> tuple[Change, ...]:
        """Options that are changed, added or removed, in the order of the command."""
        old = _by_name(compress(self.running, _is_beyond(self.running, self.phrases)))
        new = _by_name(compress(self.phrases, self.is_new))
        names = dict.fromkeys((*new, *old))
        return tuple(Change(before=old.get(n, ""), after=new.get(n, "")) for n in names)

    def diff(self, name: str) -> list[str]:
        """A unified difference from the running command, one option to a line."""
        old = [phrase.shell for phrase in self.running]
        new = [phrase.shell for phrase in self.phrases]
        return list(difflib.unified_diff(old, new, "running", name, n=1, lineterm=""))

    def to_json(self) -> JsonObject:
        """A JSON object; words and changes are as a shell reads them."""
        changes = self.changes
        return {
            "host": self.host.value,
            "environment": dict(self.environment),
            "words": [word.shell for phrase in self.phrases for word in phrase.words],
            "command": self.command,
            "changed": [[c.before, c.after] for c in changes if c.before and c.after],
            "added": [c.after for c in changes if not c.before],
            "removed": [c.before for c in changes if not c.after],
            "blanks": [blank.name for blank in self.blanks],
            "refused": list(self.refused),
            "notes": list(self.notes),
        }

    @property
    def blanks(self) -> tuple[Blank, ...]:
        """What the user has to set, once each."""
        words = (word for phrase in self.phrases for word in phrase.words)
        return tuple(dict.fromkeys(word.blank for word in words if word.blank is not None))


def launch_line(launch: Launch, running: RunConfig, config: RunConfig) -> LaunchLine:
    """How ``config`` is started, given how the running layout was.

    Words that the user gave stay as they are, but those that the layout changes.  A word that was
    masked becomes a variable that the user has to set; nothing is invented for it.  A variable that
    no shell sets is left out and named.

    >>> from ..workload.config import Batch, ModelShape, Parallelism
    >>> from dataclasses import replace
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> here = RunConfig(model=gpt, parallelism=Parallelism(dp=2), device="NVIDIA H100",
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> there = replace(here, parallelism=Parallelism(tp=2))
    >>> launch = Launch(launcher=("torchrun", "--nproc-per-node=2"), ranks_per_node=2,
    ...     argv=("t.py", "--micro-batch-size", "1", "--hub-token", "***"))
    >>> print(launch_line(launch, here, there).command)  # doctest: +NORMALIZE_WHITESPACE
    CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node=2 t.py --micro-batch-size 1
    --hub-token "${ARG_HUB_TOKEN:?the value of --hub-token, which is not kept}"
    --tensor-model-parallel-size 2
    """
    settable, left_out = without_others(launch.environment)
    launch = replace(launch, environment=settable)
    host = host_of(launch, running)
    program = _program(host, launch, running, config)
    start = start_of(launch, running.parallelism, config.parallelism)
    is_megatron = host in (HostKind.MEGATRON, HostKind.BRIDGE)
    return LaunchLine(
        host=host,
        environment=environment(config, settable) if is_megatron else settable,
        start=phrases(start.words),
        program=phrases(program.words),
        running=_running(launch, running),
        notes=(*program.notes, *start.notes, *left_out),
        refused=_refused(host, running, config) if is_megatron else (),
    )


def _refused(host: HostKind, running: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Why Megatron, or the program's own parser, would not take the layout."""
    clause = untaken(config, running) if host is HostKind.MEGATRON else ""
    return (*((clause,) if clause else ()), *refusals(config))


def host_of(launch: Launch, running: RunConfig) -> HostKind:
    """Who reads the arguments: as the process noted, else by framework and form of the words."""
    has_paths = any(_OVERRIDE.match(word) for word in launch.argv)
    if launch.host == "megatron.bridge" or has_paths:
        return HostKind.BRIDGE
    if running.framework.startswith("transformers"):
        return HostKind.TRAINER
    return HostKind.MEGATRON if takes_options(running) else HostKind.LOOP


def _program(host: HostKind, launch: Launch, running: RunConfig, config: RunConfig) -> Noted:
    if not launch.argv:
        return _unknown_program(host, config)
    if host is HostKind.MEGATRON:
        return Noted(words=with_blanks(rewrite_command(launch.argv, config, running=running)))
    change = {
        HostKind.BRIDGE: bridge_program,
        HostKind.TRAINER: trainer_program,
        HostKind.LOOP: loop_program,
    }[host]
    return change(with_blanks(launch.argv), running, config)


def _unknown_program(host: HostKind, config: RunConfig) -> Noted:
    script = Word(text="***", blank=_SCRIPT)
    note = "how the run was launched is not known; give the script and its other arguments"
    words = plain(options(config)) if host is HostKind.MEGATRON else ()
    return Noted(words=(script, *words), notes=(note,))


def _running(launch: Launch, running: RunConfig) -> tuple[Phrase, ...]:
    """The running command; where nobody noted its launcher, one that starts as many ranks."""
    if not launch.argv:
        return ()
    start = start_of(launch, running.parallelism, running.parallelism)
    return (
        *variables(launch.environment),
        *phrases(start.words),
        *phrases(with_blanks(launch.argv)),
    )


def _is_beyond(some: Sequence[Phrase], others: Sequence[Phrase]) -> Iterator[bool]:
    """For each phrase whether the others have it not, or fewer times."""
    left = Counter(phrase.shell for phrase in others)
    for phrase in some:
        left[phrase.shell] -= 1
        yield left[phrase.shell] < 0


def _by_name(found: Iterable[Phrase]) -> dict[str, str]:
    """Phrases by option, or by themselves where they have none; several of one name together."""
    out: dict[str, str] = {}
    for phrase in found:
        name = phrase.name or phrase.shell
        out[name] = f"{out[name]} {phrase.shell}" if name in out else phrase.shell
    return out
