"""Names of Megatron's arguments: those that are modelled, and their command-line spellings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError
from ..records.files import read_package_json
from ..workload.argument_fields import Argument, arguments_of
from ..workload.argument_values import Arguments, ArgumentValue, is_true, name_of, shown
from ..workload.config import Batch, Cadence, RunConfig
from ..workload.model_shape import Experts, LatentAttention, ModelShape
from ..workload.parallelism import Parallelism
from ._megatron_model import OF_MODEL
from ._megatron_settings import OF_RUN, SETTINGS
from .option_words import options_of

NAMES = read_package_json(__package__, "megatron_names.json")
"""Lists of Megatron-LM's arguments that no field holds, by their treatment; ``releases`` are those
whose parsers were read.

``harmless`` ones do not affect time (paths, learning rates, logging), or only choose among kernels
of one operator (fusions, dropout), which a run's samples reflect anyway, or qualify an argument
that is listed itself (mamba_*, rl_*, fsdp_*); so do their negations (no_*, disable_*).  Some exist
only in the namespace: switches with another spelling on the command line, or added by validation.
"""
_PARTS = (ModelShape, Experts, LatentAttention, Parallelism, Batch, Cadence, RunConfig)
ARGUMENTS: Mapping[str, Argument] = {
    argument.name: argument for part in _PARTS for argument in arguments_of(part).values()
}
"""Arguments that are declared fields, by name."""
STATED = frozenset(name for name, argument in ARGUMENTS.items() if argument.unsaid is None)
"""Those that are always written."""
EXPERT_SWITCHES: Mapping[str, str] = {
    name: argument.name for name, argument in arguments_of(Experts).items() if argument.is_switch
}
"""Expert switches that are off by default, by field of ``Experts``."""
_SETTINGS = (*SETTINGS, OF_MODEL, OF_RUN)
_BEHIND = frozenset(one.behind for one in ARGUMENTS.values() if one.behind)
SWITCHES = _BEHIND.union(
    (name for name, argument in ARGUMENTS.items() if argument.is_switch),
    *((*setting.switches, *setting.old_switches) for setting in _SETTINGS),
)
"""Modelled arguments without a value."""
LISTS = frozenset(name for name, argument in ARGUMENTS.items() if argument.is_list).union(
    *(setting.lists for setting in _SETTINGS)
)
"""Arguments that take several words."""
MODELLED = _BEHIND.union(ARGUMENTS, *(setting.names for setting in _SETTINGS))
"""Arguments that ``from_namespace`` reads, by name in Megatron's namespace."""
DERIVED = (
    frozenset(name for argument in ARGUMENTS.values() for name in argument.others).union(
        *(setting.validated for setting in _SETTINGS)
    )
    - MODELLED
)
"""Further names that it reads: of validated arguments, ``TransformerConfig`` or a launcher."""


def _groups() -> Iterator[frozenset[str]]:
    yield from (setting.names for setting in SETTINGS)
    of_layout = (*arguments_of(Parallelism).values(), *arguments_of(Batch).values())
    of_layout += tuple(one for one in arguments_of(RunConfig).values() if one.is_of_layout)
    alone = [one for one in of_layout if not any(one.name in s.names for s in SETTINGS)]
    for key in sorted({one.behind or one.name for one in alone}):
        yield frozenset((key, *(one.name for one in alone if one.behind == key)))


GROUPS = tuple(_groups())
"""All arguments of a layout, in groups that are only meaningful together."""
SWITCHED_OFF: tuple[str, ...] = tuple(NAMES["switched_off"])
"""Settings that are on by default, and unmodelled if off."""
OPTIONS: Mapping[str, tuple[str, ArgumentValue]] = {
    **{
        name: (argument.option, False if argument.is_usually_on else None)
        for name, argument in ARGUMENTS.items()
        if argument.option
    },
    "fp4": ("fp4_format", None),
    "fp4_param": ("fp4_param_gather", None),
    "fp8": ("fp8_format", None),
    "nccl_ub": ("use_nccl_ub", None),
    "torch_fsdp2_reshard_after_forward": ("torch_fsdp2_no_reshard_after_forward", False),
    **{name: (f"disable_{name}", False) for name in SWITCHED_OFF},
}
"""Arguments whose option is spelled otherwise: that option, and the value that a switch sets."""
SPELLED: Mapping[str, tuple[str, ArgumentValue]] = {
    **{option: (name, constant) for name, (option, constant) in OPTIONS.items()},
    **{f"no_{name}": (name, False) for name in SWITCHED_OFF},
    "checkpoint_activations": ("recompute_granularity", "full"),
    "fp8_e4m3": ("fp8", "e4m3"),
    "fp8_hybrid": ("fp8", "hybrid"),
    "persistent_save_interval": ("save_interval", None),
}
"""Options with another name in the namespace: that name, and the value that a switch sets."""
UNMODELLED_SETTINGS: Mapping[str, Sequence[str]] = {
    **{n: () for n in (*NAMES["left_out"], *NAMES["left_out_aside"]) if n not in MODELLED},
    **NAMES["left_out_unless"],
}
"""Unmodelled settings that affect time or memory, with the values besides ``_OFF`` that disable
them."""
MOVES_ALONE = {quantity: frozenset(names) for quantity, names in NAMES["moves_alone"].items()}
"""Unmodelled settings and variables that move one quantity alone, ``time`` or ``memory``; every
other one may move both."""
UNMODELLED_FACTOR = 2.0
"""Assumed factor by which an unmodelled option may change a step, unless a better one is known."""
ASIDE = frozenset((*NAMES["aside"], *NAMES["left_out_aside"]))
"""Unmodelled settings that are reported and widen the interval by their measured error, but do not
prevent an estimate: those for logging or work between steps, and deterministic mode, in which most
public steps of Megatron's own CI ran.  Also keys of trainers' files that are no training options,
such as scheduling, logging and checkpoints."""
HARMLESS = frozenset(NAMES["harmless"])
_NEGATION = re.compile("^(no|disable)_")
# Values that disable a setting, as a shell, YAML or Python writes them.
_OFF = ("None", "False", "0", "0.0", "", "[]", "none")
_READ = MODELLED | DERIVED | set(UNMODELLED_SETTINGS) | set(SWITCHED_OFF)
# A YAML file may have a list as shell text.
_BRACKETS = re.compile(r"[\[\],]")
_ENVIRONMENT = re.compile(r"env(ironment)?(s|_?var(iable)?s?)?", re.IGNORECASE)
"""Names of a file's section of variables, such as ``ENV_VARS`` of Megatron's functional tests."""


def target_of(option: str) -> tuple[str, ArgumentValue]:
    """Return the argument that an option sets, and its value if the option alone sets that.

    >>> target_of("--disable-bias-linear"), target_of("--num-layers")
    (('add_bias_linear', False), ('num_layers', None))
    """
    name = name_of(option)
    return SPELLED.get(name, (name, None))


@dataclass(slots=True, kw_only=True)
class ArgumentTable:
    """Arguments by name in the namespace, unknown ones in order, and variables of the launch."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def put(self, written: str, value: object) -> None:
        """Add one argument as written; ``value`` is True for a switch."""
        target, constant = target_of(written)
        if constant is not None:
            if is_true(value):
                self.values[target] = constant
        elif target in _READ:
            if target in LISTS and isinstance(value, str):
                value = _BRACKETS.sub(" ", value).split()
            self.values[target] = value
        elif not _is_harmless(name_of(written)):
            self.unknown.append(written)


def read_words(argv: Sequence[str]) -> ArgumentTable:
    """Return the options of a command line without launcher; stray words count as unknown, and so
    do expansions after a switch or a value, which may hold further options."""
    table = ArgumentTable()
    for option, words in options_of(argv):
        target, constant = target_of(option)
        first = 0 if not option or constant is not None or target in SWITCHES else 1
        stray = [word for word in words[first:] if not option or is_expansion(word)]
        table.unknown += stray
        words = words[:first] + [word for word in words[first:] if word not in stray]
        if option:
            table.put(option, True if not words else words[0] if len(words) == 1 else words)
    return table


def is_expansion(word: str) -> bool:
    """Return True for a word that a shell replaces by another text."""
    return word.startswith(("$", "`"))


_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.uint8": "fp8",
}
"""Words of Megatron's options for types, by their names in a namespace that was checked."""


def read_mapping(mapping: Mapping[str, object]) -> ArgumentTable:
    """Return the arguments of a parsed YAML or JSON file, by option (``--num-layers``) or by name.

    Each key of every section counts, and those of a section of variables as words in front of a
    command do.  Raise ``ConfigError`` if sections differ in an argument.
    """
    table, sections = ArgumentTable(), [mapping]
    seen: dict[str, object] = {}
    for section in sections:
        for written, value in section.items():
            key, name = str(written), name_of(str(written))
            if isinstance(value, Mapping) and name not in ASIDE:
                if _ENVIRONMENT.fullmatch(key):
                    table.variables |= {str(n): str(v) for n, v in value.items() if v is not None}
                else:
                    sections.append(value)
                continue
            if value is None or value == [] or (key.startswith("-") and value is False):
                continue
            value = _DTYPES.get(str(value), value)
            if str(value) in _OFF and not is_known(name):
                continue  # an unknown setting that is off needs no report
            if seen.setdefault(name, value) != value and not _is_harmless(name):
                raise ConfigError(
                    f"sections of the file differ in {name}, {shown(seen[name])} and "
                    f"{shown(value)}; leave one out"
                )
            if isinstance(value, str):  # functional tests escape what is special to a shell
                value = value.replace("\\", "").strip("'\"")
            table.put(key, value)
    if str(table.values.get("activation_func", "")).lower() == "swiglu":
        table.values["swiglu"] = True
    if "_target_" in seen and table.values.get("num_query_groups"):
        # The file of a class of Megatron core, which has no switch for groups.
        table.values.setdefault("group_query_attention", True)
    return table


def unmodelled_settings(given: Arguments) -> tuple[str, ...]:
    """Return names of unmodelled settings that are in use."""
    words = {name: str(given.get(name)) for name in UNMODELLED_SETTINGS}
    used = [name for name, word in words.items() if word not in (*_OFF, *UNMODELLED_SETTINGS[name])]
    return (*used, *(name for name in SWITCHED_OFF if given.get(name) is False))


def moves(name: str, quantity: str) -> bool:
    """Return True if an unmodelled setting may move ``time`` or ``memory``.

    >>> [moves(name, "memory") for name in ("use_sharp", "optimizer")]
    [False, True]
    """
    return all(one == quantity or name not in names for one, names in MOVES_ALONE.items())


def is_known(name: str) -> bool:
    """Return True for a Megatron name, with underscores, that is read, unmodelled or harmless."""
    return name in _READ or name in SPELLED or _is_harmless(name)


def _is_harmless(name: str) -> bool:
    if name.partition("_")[0] in ("calibrate", "forerun"):  # ours
        return True
    return _NEGATION.sub("", name) in HARMLESS
