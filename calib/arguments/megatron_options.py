"""Names of Megatron's arguments: which the model reads, and how a command line spells them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..records import read_package_json
from ..workload import CONFIG_SWITCHES, ArgumentValue, is_true

Values: TypeAlias = "dict[str, ArgumentValue]"
"""Values of arguments by their names in Megatron's namespace."""
NAMES = read_package_json(__package__, "megatron_names.json")
"""Word lists of Megatron-LM's arguments, by what is done with them; ``releases`` are those whose
parsers were read (``benchmarks/option_table.py`` lists what a checkout has beyond).

``harmless`` ones touch no time (paths, learning rates, logging), or only choose among kernels of
one operator (fusions, dropout), which the samples of a run show by themselves, or qualify an
argument that is listed itself (mamba_*, rl_*, fsdp_*).  ``harmless_when_validated`` are in the
namespace alone: of switches that are spelled otherwise, or added by validation.
"""
_DEFAULTS = dict(CONFIG_SWITCHES.values())
"""Defaults of switches that are fields of ``RunConfig``: modelled, whatever the lists say."""
MODELLED = frozenset((*NAMES["modelled"], *_DEFAULTS))
"""Arguments that ``from_namespace`` reads, by their names in Megatron's namespace."""
DERIVED = frozenset(NAMES["derived"])
"""Names that it reads as well, of validated arguments, of a ``TransformerConfig`` or a launcher."""
SWITCHED_OFF: tuple[str, ...] = tuple(NAMES["switched_off"])
"""Settings that are on by default and are left out where they are off."""
SPELLED: Mapping[str, tuple[str, ArgumentValue]] = {
    **{name: tuple(target) for name, target in NAMES["spelled"].items()},
    **{f"{no}_{name}": (name, False) for name in SWITCHED_OFF for no in ("no", "disable")},
    **{f"no_{name}": (name, False) for name, is_on in _DEFAULTS.items() if is_on},
}
"""Options named otherwise in the namespace: that name, and the value that a switch stands for."""
PARALLEL_SWITCHES: Mapping[str, str] = {
    "is_pipeline_before_data": "use_tp_pp_dp_mapping",
    "is_sequence_parallel": "sequence_parallel",
    "is_optimizer_distributed": "use_distributed_optimizer",
    "overlaps_grad_reduce": "overlap_grad_reduce",
    "overlaps_param_gather": "overlap_param_gather",
    "overlaps_tp": "tp_comm_overlap",
    "gathers_beside_update": "overlap_param_gather_with_optimizer_step",
    "pads_buckets": "ddp_pad_buckets_for_high_nccl_busbw",
}
"""Switches that are off by default, by field of ``Parallelism``."""
EXPERT_SWITCHES: Mapping[str, str] = {
    "is_padded_to_capacity": "moe_pad_expert_input_to_capacity",
    "is_grouped": "moe_grouped_gemm",
    "overlaps_shared": "moe_shared_expert_overlap",
    "has_shared_gate": "moe_shared_expert_gate",
    "is_balance_forced": "moe_router_force_load_balancing",
    "overlaps_exchange": "overlap_moe_expert_parallel_comm",
    "delays_weight_gradients": "delay_wgrad_compute",
}
"""The same by field of ``Experts``."""
UNMODELLED_SETTINGS: Mapping[str, Sequence[str]] = {
    **{name: () for name in NAMES["left_out"] if name not in MODELLED},
    **NAMES["left_out_unless"],
}
"""Settings that touch time or memory and that the model leaves out, with the values beyond
``_OFF`` that put them out of use."""
UNMODELLED_FACTOR = 2.0
"""The factor by which an option that is not modelled may change a step, as long as nothing better
is known."""
ASIDE = frozenset(NAMES["aside"])
"""Those of them that log or stand between steps, and deterministic mode, under which most public
steps of Megatron's own CI ran: named, wider by what they were off, and no reason to say no
number.  Beside them keys of trainers' files that are no options of training: who runs where, what
is logged and kept."""
HARMLESS = frozenset(NAMES["harmless"]) - MODELLED - SPELLED.keys()
_HARMLESS_WHEN_VALIDATED = frozenset(NAMES["harmless_when_validated"])
# Words that leave a setting out of use, whoever wrote it: a shell, YAML or Python.
_OFF = ("None", "False", "0", "0.0", "", "[]", "none")
_READ = MODELLED | DERIVED | set(UNMODELLED_SETTINGS) | set(SWITCHED_OFF)
# A YAML file may hold a list as the text that a shell would be given.
_BRACKETS = re.compile(r"[\[\],]")
SWITCHES = frozenset((*NAMES["switches"], *_DEFAULTS))
TOGETHER = {kind: frozenset(names) for kind, names in NAMES["said_together"].items()}
"""Arguments that mean something only together; several spellings of each mean the same."""
GROUPS = (
    *TOGETHER.values(),
    *(frozenset((n,)) for n in NAMES["layout"] if not any(n in g for g in TOGETHER.values())),
)
"""All arguments of a layout, with each what means something only beside it."""
LISTS = (
    *("cp_comm_type", "cuda_graph_scope", "offload_modules", "rampup_batch_size"),
    *("recompute_modules", "hierarchical_context_parallel_sizes"),
)
"""Arguments that take several words."""


@dataclass(slots=True, kw_only=True)
class ArgumentTable:
    """Arguments by their names in the namespace, and those that are not known, in order."""

    values: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def put(self, written: str, value: object) -> None:
        """Take one argument as it was written; ``value`` is True for a switch."""
        name = written.lstrip("-").replace("-", "_")
        target, constant = SPELLED.get(name, (name, None))
        if constant is not None:
            if is_true(value):
                self.values[target] = constant
        elif target in _READ:
            if target in SWITCHES and str(value).startswith("$"):
                value = True  # what follows a switch is a variable that holds further options
            if target in LISTS and isinstance(value, str):
                value = _BRACKETS.sub(" ", value).split()
            self.values[target] = value
        elif not _is_harmless(name):
            self.unknown.append(written)


def read_words(argv: Sequence[str]) -> ArgumentTable:
    """The options of a command line without its launcher; stray words count as unknown."""
    table = ArgumentTable()
    for option, words in options_of(argv):
        if not option:
            table.unknown += words
            continue
        table.put(option, True if not words else words[0] if len(words) == 1 else words)
    return table


def read_mapping(mapping: Mapping[str, object]) -> ArgumentTable:
    """Arguments of a parsed YAML or JSON file, by option (``--num-layers``) or by name.

    ``MODEL_ARGS`` of Megatron's own functional tests and the sections ``language_model`` and
    ``model_parallel`` of its ``--yaml-cfg`` are looked into.
    """
    table = ArgumentTable()
    inner = mapping.get("MODEL_ARGS")
    for key, value in _flat(inner if isinstance(inner, Mapping) else mapping):
        if value is None or (key.startswith("-") and value is False):
            continue
        if str(value) in _OFF and not is_known(key.lstrip("-").replace("-", "_")):
            continue  # what is not in use is no reason for anything
        # Functional tests escape what a shell would take for its own.
        table.put(key, value.replace("\\", "").strip("'\"") if isinstance(value, str) else value)
    if str(mapping.get("activation_func", "")).lower() == "swiglu":
        table.values["swiglu"] = True
    return table


def options_of(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words behind it; words before the first have the option ``""``."""
    option, words = "", []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            if option or words:
                yield option, words
            option, joined, value = word.partition("=")
            words = [value] if joined else []
        else:
            words.append(word)
    if option or words:
        yield option, words


def unmodelled_settings(args: object) -> tuple[str, ...]:
    """Names of the settings in use that the model leaves out, from an argument namespace."""
    words = {name: str(getattr(args, name, None)) for name in UNMODELLED_SETTINGS}
    used = [name for name, word in words.items() if word not in (*_OFF, *UNMODELLED_SETTINGS[name])]
    return (*used, *(name for name in SWITCHED_OFF if getattr(args, name, None) is False))


def is_known(name: str) -> bool:
    """True for a name of Megatron's, with underscores, that is read, left out or harmless."""
    return name in _READ or name in SPELLED or _is_harmless(name)


def _flat(mapping: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if key in ("language_model", "model_parallel") and isinstance(value, Mapping):
            yield from value.items()
        else:
            yield str(key), value


def _is_harmless(name: str) -> bool:
    names = (name, f"no_{name}", f"disable_{name}")
    return name in _HARMLESS_WHEN_VALIDATED or any(n in HARMLESS for n in names)
