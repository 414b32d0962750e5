"""Complete launch line of a layout, and its differences from the running one.

A Megatron-Bridge recipe takes Hydra overrides, ``path=value``.  Paths are those of its
``ConfigContainer`` (Megatron-Bridge of 2026-08: ``training/config.py``,
``docs/megatron-lm-to-megatron-bridge.md``, ``scripts/translate_mlm_to_bridge.py``).  A recipe has
values of its own, so switches that are off are written too.

A Hugging Face Trainer takes the fields of ``TrainingArguments`` (transformers 5.23).  The options
of a custom training loop are not known: a layout is told as a difference of settings.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress

from ..plain_json import JsonObject
from ..records.run_values import Launch
from ..shell import without_others
from ..workload.argument_values import ArgumentValue, Values
from ..workload.choices import CHOICES
from ..workload.config import Recompute, RunConfig, takes_options
from ..workload.parallelism import Sharding
from .launch_words import (
    AnnotatedWords,
    Blank,
    Phrase,
    Word,
    join_phrases,
    phrases,
    plain,
    set_option,
    start_of,
    variables,
    with_blanks,
)
from .megatron_args import options, rewrite_command
from .megatron_options import ARGUMENTS, EXPERT_SWITCHES, SWITCHES
from .megatron_rules import environment, refusals, required_values
from .megatron_values import layout_values, model_values
from .taken_options import unsupported_options_reason

_BATCH = "--per-device-train-batch-size"
_STEPS = "--gradient-accumulation-steps"
_TRAINER_MARKERS = frozenset({_BATCH, _STEPS, "--output-dir", "--num-train-epochs", "--max-steps"})
"""Options any of which shows that a script reads ``TrainingArguments`` from its command line."""
_SHARDED = "full_shard auto_wrap"


def trainer_program(argv: Sequence[Word], running: RunConfig, config: RunConfig) -> AnnotatedWords:
    """Return a Trainer's words with the layout's batch, accumulation, checkpointing and FSDP."""
    program_phrases = list(phrases(argv))
    named = {phrase.name for phrase in program_phrases}
    wanted = _trainer_values(running, config)
    in_code = {} if named & _TRAINER_MARKERS else wanted
    notes = []
    if in_code:
        values = ", ".join(f"{n[2:].replace('-', '_')}={v}" for n, v in in_code.items())
        notes.append(f"set in TrainingArguments, in the code: {values}")
    for name, value in wanted.items():
        if name in in_code:
            continue
        if value:
            program_phrases = set_option(program_phrases, name, Word(text=value), "_")
        else:
            program_phrases = [phrase for phrase in program_phrases if phrase.name != name]
    if config.parallelism.num_optimizer_instances > 1:
        notes.append("hybrid sharding needs version 1 and HYBRID_SHARD in --fsdp_config")
    return AnnotatedWords(words=join_phrases(program_phrases), notes=tuple(notes))


def _trainer_values(running: RunConfig, config: RunConfig) -> dict[str, str]:
    """Return the options that differ from the running layout; an empty value removes one."""
    changed_options: dict[str, str] = {}
    if running.batch.micro_batch_size != config.batch.micro_batch_size:
        changed_options[_BATCH] = str(config.batch.micro_batch_size)
    if running.num_microbatches != config.num_microbatches:
        changed_options[_STEPS] = str(config.num_microbatches)
    if running.recompute is not config.recompute:
        changed_options["--gradient-checkpointing"] = str(config.recompute is not Recompute.NONE)
    if _sharding(running) is not _sharding(config):
        changed_options["--fsdp"] = "" if _sharding(config) is Sharding.NONE else _SHARDED
    return changed_options


def _differences(running: RunConfig, config: RunConfig) -> list[str]:
    """Return the settings in which two layouts differ, in words."""
    before, after = _settings(running), _settings(config)
    return [f"{n} {value} -> {after[n]}" for n, value in before.items() if value != after[n]]


def _settings(config: RunConfig) -> dict[str, object]:
    par = config.parallelism
    return {
        "micro-batch": config.batch.micro_batch_size,
        "micro-batches of a step": config.num_microbatches,
        **{name: getattr(par, name) for name in ("tp", "pp", "cp", "ep")},
        "sharding": _sharding(config).value,
        "sharded copies": par.num_optimizer_instances,
        "activation checkpointing": "off" if config.recompute is Recompute.NONE else "on",
    }


def _sharding(config: RunConfig) -> Sharding:
    par = config.parallelism
    return par.sharded if par.sharded is Sharding.WEIGHTS else Sharding.NONE


_VP = "virtual_pipeline_model_parallel_size"
_OF_NO_CHOICE: Mapping[str, str] = {
    **dict.fromkeys(("distribute_saved_activations", "cross_entropy_loss_fusion"), "model"),
    **dict.fromkeys(("fine_grained_activation_offloading", "offload_modules"), "model"),
    **dict.fromkeys(("moe_expert_capacity_factor", "moe_token_dispatcher_type"), "model"),
    **dict.fromkeys(("gradient_accumulation_fusion", *EXPERT_SWITCHES.values()), "model"),
    **dict.fromkeys(("ddp_bucket_size", "ddp_pad_buckets_for_high_nccl_busbw"), "ddp"),
    **{"use_tp_pp_dp_mapping": "dist", "ckpt_format": "checkpoint"},
}
PATHS: Mapping[str, tuple[str, ...]] = {
    name: tuple(f"{one}.{name.removeprefix('ddp_')}" for one in sections.split())
    for stated in (*(one.arguments for one in CHOICES), _OF_NO_CHOICE)
    for name, sections in stated.items()
    if sections
}
"""Paths in a ``ConfigContainer``, by Megatron's argument."""
_UNSAID: Mapping[str, ArgumentValue] = {
    **dict.fromkeys(SWITCHES, False),
    **{next(iter(one.arguments)): one.default for one in CHOICES if one.default and one.arguments},
    **{name: True for name, one in ARGUMENTS.items() if one.is_usually_on},
    "ckpt_format": "torch_dist",
}
"""Values of arguments that are not given; of others None."""
_OVERLAPS = next(one.arguments.keys() for one in CHOICES if one.name == "overlap")


def bridge_program(argv: Sequence[Word], running: RunConfig, config: RunConfig) -> AnnotatedWords:
    """Return the recipe's words with overrides for all differences from the running layout.

    Overrides that the user gave are changed in place; others are appended, where they take
    precedence.
    """
    now, then = _values(running), _values(config)
    differing = [n for n in now.keys() | then.keys() if _of(now, n) != _of(then, n)]
    overrides = {
        path: _hydra(_of(then, name))
        for name, paths in PATHS.items()
        for path in (paths if name in differing else ())
    }
    out: list[Word] = []
    for word in argv:
        path = word.text.partition("=")[0].lstrip("+")
        value = overrides.pop(path, None) if "=" in word.text else None
        out.append(word if value is None else Word(text=f"{path}={value}"))
    out += plain([f"{path}={value}" for path, value in overrides.items()])
    return AnnotatedWords(words=tuple(out), notes=tuple(_notes(differing)))


def _notes(differing: Sequence[str]) -> list[str]:
    notes = []
    unnamed = sorted(name for name in differing if name not in PATHS)
    if unnamed:
        notes.append(f"set in the recipe itself: {', '.join(unnamed)}")
    if _OVERLAPS & set(differing):
        notes.append("a recipe with comm_overlap has the last word on overlaps; set them there")
    return notes


def _values(config: RunConfig) -> Values:
    par = config.parallelism
    values: Values = {**layout_values(config), **required_values(config, {})}
    values["seq_length"] = config.model.seq_length
    switches = frozenset(EXPERT_SWITCHES.values()) | {"moe_token_dispatcher_type"}
    values |= {name: v for name, v in model_values(config).items() if name in switches}
    values.pop("num_layers_per_virtual_pipeline_stage", None)
    if par.vp > 1:
        values[_VP] = par.vp
    return values


def _of(values: Values, name: str) -> ArgumentValue | None:
    return values.get(name, _UNSAID.get(name))


def _hydra(value: ArgumentValue | None) -> str:
    """Return a value in Hydra's grammar.

    >>> [_hydra(value) for value in (None, True, ["mlp", "moe"], "Et*3|t*2L", 4)]
    ['null', 'true', '[mlp,moe]', "'Et*3|t*2L'", '4']
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    return text if text.replace("_", "").replace(".", "").isalnum() else f"'{text}'"


_SCRIPT = Blank(name="SCRIPT", hint="the training script and its own arguments")
_OVERRIDE = re.compile(r"\+*(train|model|ddp|dist|optimizer|checkpoint|dataset)\.[\w.]+=")
"""An override of Bridge's ``ConfigContainer``, up to its ``=``."""


class HostKind(Enum):
    """The program that reads a run's arguments."""

    MEGATRON = "Megatron-LM"
    BRIDGE = "Megatron-Bridge"
    TRAINER = "Hugging Face Trainer"
    LOOP = "a loop of one's own"


_OF_MEGATRON = (HostKind.MEGATRON, HostKind.BRIDGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One option before and after, in shell syntax; empty if absent."""

    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A command that starts a layout, as phrases: options with their values."""

    host: HostKind
    environment: Mapping[str, str]
    start: tuple[Phrase, ...]
    """torchrun, or another launcher, with its options."""
    program: tuple[Phrase, ...]
    """The script with its arguments."""
    running: tuple[Phrase, ...] = ()
    """The running layout's command: variables, start and program; empty if unknown."""
    notes: tuple[str, ...] = ()
    """Steps that the command line cannot express."""
    refused: tuple[str, ...] = ()
    """Reasons why the host would refuse the layout; empty if it accepts it."""

    @property
    def phrases(self) -> tuple[Phrase, ...]:
        """All phrases in order: variables, start and program."""
        return (*variables(self.environment), *self.start, *self.program)

    @property
    def command(self) -> str:
        """The command as one line for a shell."""
        return " ".join(phrase.shell for phrase in self.phrases)

    @property
    def is_new(self) -> tuple[bool, ...]:
        """One flag per phrase: True if the running command lacks it or has another value."""
        if not self.running:
            return (False,) * len(self.phrases)
        return tuple(_is_missing_in(self.phrases, self.running))

    def mapped(self, change: Callable[[Word], Word]) -> LaunchLine:
        """Return the line with each word changed, in the running command as well."""
        names = ("start", "program", "running")
        parts = {
            name: tuple(Phrase(words=tuple(map(change, one.words))) for one in getattr(self, name))
            for name in names
        }
        return replace(self, **parts)

    @property
    def changes(self) -> tuple[Change, ...]:
        """Options that are changed, added or removed, in command order; removed ones last."""
        old = _by_name(compress(self.running, _is_missing_in(self.running, self.phrases)))
        new = _by_name(compress(self.phrases, self.is_new))
        names = dict.fromkeys((*new, *old))
        return tuple(Change(before=old.get(n, ""), after=new.get(n, "")) for n in names)

    def diff(self, name: str) -> list[str]:
        """Return a unified diff against the running command, one option per line."""
        old = [phrase.shell for phrase in self.running]
        new = [phrase.shell for phrase in self.phrases]
        return list(difflib.unified_diff(old, new, "running", name, n=1, lineterm=""))

    def to_json(self) -> JsonObject:
        """Return a JSON object; words and changes are in shell syntax."""
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
        """Variables that the user has to set, without duplicates."""
        words = (word for phrase in self.phrases for word in phrase.words)
        return tuple(dict.fromkeys(word.blank for word in words if word.blank is not None))


def launch_line(launch: Launch, running: RunConfig, config: RunConfig) -> LaunchLine:
    """Return the command that starts ``config``, given the launch of the running layout.

    The user's words stay as they are, except those that the layout changes.  A masked word becomes
    a variable that the user has to set; its value is never guessed.  An environment variable that
    no shell can set is left out and named in a note.

    >>> from ..workload.config import Batch
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
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
    settable, unsettable_notes = without_others(launch.environment)
    launch = replace(launch, environment=settable)
    host = host_of(launch, running)
    program = _program(host, launch, running, config)
    start = start_of(launch, running.parallelism, config.parallelism)
    return LaunchLine(
        host=host,
        environment=environment(config, settable) if host in _OF_MEGATRON else settable,
        start=phrases(start.words),
        program=phrases(program.words),
        running=_running(launch, running),
        notes=(*program.notes, *start.notes, *unsettable_notes),
        refused=(
            *_refused(host, running, config),
            *((start.refused,) if start.refused else ()),
        ),
    )


def _refused(host: HostKind, running: RunConfig, config: RunConfig) -> tuple[str, ...]:
    """Return the reasons why no command starts the layout, or Megatron would refuse it."""
    if host is HostKind.LOOP and (settings := _differences(running, config)):
        return (f"set in the code: {', '.join(settings)}",)
    clause = unsupported_options_reason(config, running) if host is HostKind.MEGATRON else ""
    return (*((clause,) if clause else ()), *(refusals(config) if host in _OF_MEGATRON else ()))


def host_of(launch: Launch, running: RunConfig) -> HostKind:
    """Return the program that reads the arguments, as recorded, else by framework and words."""
    has_paths = any(_OVERRIDE.match(word) for word in launch.argv)
    if launch.host == "megatron.bridge" or has_paths:
        return HostKind.BRIDGE
    if running.framework.startswith("transformers"):
        return HostKind.TRAINER
    return HostKind.MEGATRON if takes_options(running) else HostKind.LOOP


def _program(
    host: HostKind, launch: Launch, running: RunConfig, config: RunConfig
) -> AnnotatedWords:
    if not launch.argv:
        return _unknown_program(host, config)
    if host is HostKind.MEGATRON:
        return AnnotatedWords(
            words=with_blanks(rewrite_command(launch.argv, config, running=running))
        )
    change = {
        HostKind.BRIDGE: bridge_program,
        HostKind.TRAINER: trainer_program,
        HostKind.LOOP: lambda argv, running, config: AnnotatedWords(words=argv),
    }[host]
    return change(with_blanks(launch.argv), running, config)


def _unknown_program(host: HostKind, config: RunConfig) -> AnnotatedWords:
    script = Word(text="***", blank=_SCRIPT)
    note = "how the run was launched is not known; give the script and its other arguments"
    words = plain(options(config)) if host is HostKind.MEGATRON else ()
    return AnnotatedWords(words=(script, *words), notes=(note,))


def _running(launch: Launch, running: RunConfig) -> tuple[Phrase, ...]:
    """Return the running command; if its launcher is unknown, one that starts as many ranks."""
    if not launch.argv:
        return ()
    start = start_of(launch, running.parallelism, running.parallelism)
    return (
        *variables(launch.environment),
        *phrases(start.words),
        *phrases(with_blanks(launch.argv)),
    )


def _is_missing_in(some: Sequence[Phrase], others: Sequence[Phrase]) -> Iterator[bool]:
    """Yield for each phrase True if the others lack it or have it fewer times."""
    remaining_counts = Counter(phrase.shell for phrase in others)
    for phrase in some:
        remaining_counts[phrase.shell] -= 1
        yield remaining_counts[phrase.shell] < 0


def _by_name(command_phrases: Iterable[Phrase]) -> dict[str, str]:
    """Return phrases by option, or by their text if they have none; repeated ones are joined."""
    out: dict[str, str] = {}
    for phrase in command_phrases:
        name = phrase.name or phrase.shell
        out[name] = f"{out[name]} {phrase.shell}" if name in out else phrase.shell
    return out
