"""The choices that make up a layout, each written once: its names, fields, words and arguments.

Short options, constraints, labels and their parser, axes of explanations, names of settings, and
paths of Megatron-Bridge are loops over ``CHOICES`` (docs/extending/layout_choice.md).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any, TypeAlias

from ..errors import ConfigError
from .argument_fields import arguments_of
from .argument_values import ArgumentValue, option_of, shown, whole
from .config import Batch, Recompute, RunConfig, takes_options
from .model_shape import ModelShape, at_least_one
from .parallelism import Engine, Parallelism, Sharding

AxisValue: TypeAlias = "int | str"
"""A degree, a size, or one of a choice's words."""
FieldValues: TypeAlias = "dict[str, Any]"
"""FieldValues of fields of a layout, by name."""

RECOMPUTE_MODULES = frozenset(
    {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"}
)
"""Modules that ``--recompute-modules`` accepts."""
WHOLE: FieldValues = {
    "is_optimizer_distributed": False,
    "overlaps_param_gather": False,
    "sharding": Sharding.OPTIMIZER,
    "num_optimizer_instances": 1,
}
"""Fields of a layout whose every replica has whole weights, gradients and states."""
OTHER = "other"
"""Axis of the fields that are no choice."""
FOLLOWS = "follows"
"""No axis: what follows from the others."""
_FSDP_STRATEGIES = {Sharding.GRADS: "optim_grads", Sharding.WEIGHTS: "optim_grads_params"}
_ZERO = ("0 zero0 ddp", "1 zero1", "2 zero2", "3 zero3 fsdp")
"""Other names of each sharding: stages of ZeRO, and PyTorch's."""
_SHARDINGS = {
    word: one.value
    for one, words in zip(Sharding, _ZERO, strict=True)
    for word in (one.value, *words.split())
}
_SWITCH = {"on": "on", "true": "on", "1": "on", "off": "off", "false": "off", "0": "off"}
_NUMBERED = re.compile(r"([a-z]+?)(\d+)$")
_SHARDED = re.compile(r"(ddp|fsdp|zero0|(?:zero[1-3]|hsdp)(?:x(\d+))?)$")
_LAYERS = re.compile(r"(?:\d+x\d+|\d+(?:x\d+)?(?:-\d+(?:x\d+)?)+)$")
_MOST_DIGITS = 4
"""Digits of a number of stages; more are a typing error, and would only fill memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of a layout; most functions have a usual form, which None stands for."""

    name: str
    """Short name, as in ``--tp``."""
    others: tuple[str, ...] = ()
    """Other spellings of the name."""
    fields: tuple[str, ...]
    """Its fields in a ``RunConfig`` and its parts; the first is its value."""
    axis: str = ""
    """Axis that has its fields, if not one of its own."""
    title: str = ""
    """Name in a sentence, if the name of its field does not say it."""
    help: str = ""
    """Description for the help of its option; empty: it has no option."""
    metavar: str = "N"
    parse: Callable[[str], AxisValue] = str
    """Function that returns the value of an option's word, or raises ``ConfigError``."""
    options: Callable[[Any], tuple[str, ...]] = lambda value: ()
    """Function that returns Megatron's options that set a value."""
    value: Callable[[RunConfig], AxisValue] | None = None
    """Function that returns a layout's value, in the form of ``parse``."""
    text: Callable[[RunConfig], str] | None = None
    """Function that returns a layout's value for people."""
    label: Callable[[RunConfig], str] | None = None
    """Function that returns its word in ``TP4 PP2 mbs2``; empty if that is left out."""
    prose: Callable[[RunConfig], str] | None = None
    """Function that returns the word as part of a sentence."""
    parse_word: Callable[[str, RunConfig], FieldValues | None] | None = None
    """Function that returns the fields that a word in small letters states in a change of a layout;
    None if the word is another choice's."""
    words: Mapping[str, FieldValues] = field(default_factory=dict)
    """Fields by word, in place of ``label`` and ``parse_word``, if its words are these few."""
    unsaid: Callable[[RunConfig, FieldValues], FieldValues] = lambda config, values: {}
    """Function that returns the fields of a label without its word, given a layout and the fields
    that the label has so far."""
    taken: Callable[[RunConfig], FieldValues] | None = None
    """Function that returns the fields that another layout takes over."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Megatron's arguments, and the sections of Megatron-Bridge's ``ConfigContainer`` with them."""
    default: ArgumentValue = None
    """Megatron's value of the first argument if none is given."""
    needs_option: bool = False
    """A program without the option of its first argument keeps the running value."""

    @property
    def axis_name(self) -> str:
        """Axis that has its fields."""
        return self.axis or self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All spellings of its name."""
        return (self.name, *self.others)

    @property
    def spellings(self) -> tuple[str, ...]:
        """Spellings on a command line, such as ``--vpp`` and ``--vp``."""
        return tuple(f"--{name}" for name in self.names)

    @property
    def option(self) -> str:
        """Option of its first argument."""
        return option_of(next(iter(self.arguments)))

    def read(self, config: RunConfig) -> AxisValue:
        """Return the value in a layout, in the form of ``parse``."""
        return self.value(config) if self.value else _field_of(config, self.fields[0])

    def values(self, config: RunConfig) -> FieldValues:
        """Return the fields that another layout takes over."""
        return self.taken(config) if self.taken else {n: _field_of(config, n) for n in self.fields}

    def word(self, config: RunConfig) -> str:
        """Return its word in the label of a layout; empty if that is left out."""
        if self.label is not None:
            return self.label(config)
        if all(_field_of(config, name) == value for name, value in self.unsaid(config, {}).items()):
            return ""
        first = self.fields[0]
        value = _field_of(config, first)
        return next((word for word, said in self.words.items() if said[first] == value), "")

    def fields_of_word(self, word: str, running: RunConfig) -> FieldValues | None:
        """Return the fields that a word in small letters states; None if it is another's."""
        if self.parse_word is not None:
            return self.parse_word(word, running)
        if self.words:
            return next((said for one, said in self.words.items() if one.lower() == word), None)
        numbered = _NUMBERED.match(word)
        if self.label is None or numbered is None or numbered[1] not in self.names:
            return None
        number = whole(self.fields[0], numbered[2])
        at_least_one(self.fields[0], number)
        return {self.fields[0]: number}


_OWNERS: Mapping[str, str] = {
    "seq_length": "model",
    "num_ranks": "parallelism",
    **{one.name: "batch" for one in fields(Batch)},
    **{one.name: "parallelism" for one in fields(Parallelism)},
}


def _field_of(config: RunConfig, name: str) -> Any:
    """Return a field of a layout, or of the part that has it."""
    return getattr(getattr(config, _OWNERS[name]) if name in _OWNERS else config, name)


def is_usually_split(config: RunConfig) -> bool:
    """Return True if a label with tp leaves sequence parallelism out, which saves memory and work
    on accelerators, and which experts need."""
    return config.device != "cpu" or config.model.experts is not None


def layers_text(config: RunConfig) -> str:
    """Return the layers of the chunks in short, such as ``16x3-14``; empty if they are even."""
    runs = [(number, len(list(run))) for number, run in groupby(config.parallelism.chunk_layers)]
    return "-".join(f"{number}x{count}" if count > 1 else f"{number}" for number, count in runs)


def _number(name: str, help: str, option: str = "", **others: Any) -> Choice:
    """Return a choice whose value is a number from 1."""

    def parse(word: str) -> AxisValue:
        number = whole(name, word)
        at_least_one(f"--{name}", number)
        return number

    option = option or option_of(next(iter(others["arguments"])))
    usual = {"fields": (name,), "parse": parse, "options": lambda value: (option, str(value))}
    return Choice(name=name, help=help, **usual | others)


_DECLARED = {
    field: one.name
    for part in (Parallelism, Batch, ModelShape, RunConfig)
    for field, one in arguments_of(part).items()
}
"""Megatron's argument of each field that is one."""


def _degree(name: str, help: str, option: str = "", **others: Any) -> Choice:
    """Return a choice whose value is a degree, which a label leaves out if it is 1."""
    (first, *_) = others.get("fields", (name,))
    usual = {
        "title": first.upper(),
        "label": lambda config: (
            f"{first.upper()}{n}" if (n := _field_of(config, first)) > 1 else ""
        ),
        "unsaid": lambda config, values: {first: 1},
        "default": 1,
        "needs_option": True,
    }
    return _number(name, help, option, **usual | others)


def _one_of(name: str, words: Mapping[str, str], remedy: str) -> Callable[[str], str]:
    def parse(word: str) -> str:
        if word.lower() not in words:
            raise ConfigError(f"--{name} {shown(word)} is not known; give {remedy}")
        return words[word.lower()]

    return parse


def _label_etp(config: RunConfig) -> str:
    par = config.parallelism
    is_said = config.model.experts is not None and par.expert_tp != par.tp
    return f"ETP{par.expert_tp}" if is_said else ""


def _sp_word(config: RunConfig) -> str:
    return "on" if config.parallelism.is_sequence_parallel else "off"


def _unsaid_sp(config: RunConfig, values: FieldValues) -> FieldValues:
    is_whole = values.get("tp", config.parallelism.tp) == 1
    return {} if is_whole else {"is_sequence_parallel": is_usually_split(config)}


def _pp_text(config: RunConfig) -> str:
    layers = layers_text(config) if config.parallelism.vp == 1 else ""
    return f"{config.parallelism.pp} ({layers})" if layers else str(config.parallelism.pp)


def _read_layers(word: str, running: RunConfig) -> FieldValues | None:
    if not _LAYERS.match(word):
        return None
    parts = [part.partition("x") for part in word.split("-")]
    if any(len(count) > _MOST_DIGITS for _, _, count in parts):
        raise ConfigError(f"{word} has more stages than any pipeline; give the layers of pp stages")
    layers = [int(number) for number, _, count in parts for _ in range(int(count or 1))]
    return {"chunk_layers": tuple(layers)}


def _parse_recompute(word: str) -> str:
    """Return ``none``, ``selective`` (``core_attn``), ``full``, or modules in alphabetical order.

    >>> _parse_recompute("mlp+core_attn"), _parse_recompute("core_attn")
    ('core_attn+mlp', 'selective')
    """
    low = word.lower()
    if low in [kind.value for kind in Recompute]:
        return low
    modules = {part.strip() for part in low.split("+")}
    if not modules <= RECOMPUTE_MODULES:
        raise ConfigError(
            f"--recompute {shown(word)} is not known; give none, selective, full, or modules "
            f"joined by +: {', '.join(sorted(RECOMPUTE_MODULES))}"
        )
    return Recompute.SELECTIVE.value if modules == {"core_attn"} else "+".join(sorted(modules))


def _recompute_options(word: str) -> tuple[str, ...]:
    if word == Recompute.NONE.value:
        return ("--recompute-granularity", word)
    if word == Recompute.FULL.value:
        # Megatron requires a method for full recompute; uniform blocks of one layer cover them all.
        method = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
        return ("--recompute-granularity", word, *method)
    modules = word.replace(Recompute.SELECTIVE.value, "core_attn").split("+")
    return ("--recompute-granularity", "selective", "--recompute-modules", *modules)


def _recompute_text(config: RunConfig) -> str:
    layers = f":{config.recompute_num_layers}" if config.recompute_num_layers else ""
    modules = config.recompute_modules if config.recompute is Recompute.SELECTIVE else ()
    return "+".join((config.recompute.value + layers, *modules))


def _recompute_prose(config: RunConfig) -> str:
    number = config.recompute_num_layers
    what = f"{number} layers of a chunk" if number else "all layers"
    if config.recompute is Recompute.SELECTIVE:
        what = "+".join(config.recompute_modules or ("core_attn",))
    return f"{what} computed again"


def _read_recompute(word: str, running: RunConfig) -> FieldValues | None:
    head, _, modules = word.partition("+")
    kind, _, layers = head.partition(":")
    if kind not in [one.value for one in Recompute]:
        return None
    return {
        "recompute": Recompute(kind),
        "recompute_modules": tuple(modules.split("+")) if modules else (),
        "recompute_num_layers": whole("layers", layers) if layers else 0,
    }


def _copies(config: RunConfig) -> str:
    number = config.parallelism.num_optimizer_instances
    return f"x{number}" if number > 1 else ""


def _label_sharding(config: RunConfig) -> str:
    par, copies = config.parallelism, _copies(config)
    if par.dp * par.cp == 1 or par.sharded is Sharding.NONE:
        return ""
    if par.shards_weights:
        return "HSDP" if copies else "FSDP"
    return ("ZeRO2" if par.sharded is Sharding.GRADS else "ZeRO1") + copies


def _sharding_options(value: str) -> tuple[str, ...]:
    sharding = Sharding(value)
    if sharding in _FSDP_STRATEGIES:
        strategy = ("--data-parallel-sharding-strategy", _FSDP_STRATEGIES[sharding])
        switches = ("--use-megatron-fsdp", "--use-distributed-optimizer", "--no-use-torch-fsdp2")
        return (*switches, *strategy)
    plain = ("--no-use-megatron-fsdp", "--no-use-custom-fsdp", "--no-use-torch-fsdp2")
    if sharding is Sharding.OPTIMIZER:
        return (*plain, "--use-distributed-optimizer")
    # Megatron overlaps the parameter gather only with a distributed optimizer.
    return (*plain, "--no-use-distributed-optimizer", "--no-overlap-param-gather")


def _read_sharding(word: str, running: RunConfig) -> FieldValues | None:
    match = _SHARDED.match(word)
    if match is None:
        return None
    par, name = running.parallelism, word.partition("x")[0]
    usual = 1 if name != "hsdp" else max(2, par.num_optimizer_instances)
    sharding = Sharding(_SHARDINGS[name.replace("hsdp", "fsdp")])
    is_new = par.overlaps_grad_reduce and not par.is_optimizer_distributed
    if sharding is Sharding.NONE:
        return WHOLE
    return {
        "is_optimizer_distributed": True,
        "overlaps_param_gather": par.overlaps_param_gather or is_new,
        "sharding": sharding,
        "num_optimizer_instances": int(match[2] or 0) or usual,
    }


def _is_single(config: RunConfig, values: FieldValues) -> bool:
    """Return True if the named layout has one replica, whose sharding a label does not tell."""
    dp, cp = (values.get(name, _field_of(config, name)) for name in ("dp", "cp"))
    return bool(dp * cp == 1)


def _overlap_text(config: RunConfig) -> str:
    names = {"overlaps_grad_reduce": "gradients", "overlaps_param_gather": "weights"}
    names["overlaps_tp"] = "tp"
    return "+".join(text for name, text in names.items() if _field_of(config, name)) or "none"


def _unsaid_overlap(config: RunConfig, values: FieldValues) -> FieldValues:
    """Return all that can overlap; a label tells on accelerators, of programs with options."""
    par = config.parallelism
    is_told = config.device != "cpu" and takes_options(config) and par.engine is Engine.MEGATRON
    if _is_single(config, values) or not is_told:
        return {}
    gathers = values.get("is_optimizer_distributed", par.is_optimizer_distributed)
    return {"overlaps_grad_reduce": True, "overlaps_param_gather": gathers}


def _overlap_prose(config: RunConfig) -> str:
    if config.parallelism.overlaps_grad_reduce:
        return "of the replicas' transfers, only gradients overlapped with the passes"
    return "transfers of the replicas not overlapped"


def _offload_text(config: RunConfig) -> str:
    return f"{100 * config.optimizer_offload_frac:.0f} %"


def _label_offload(config: RunConfig) -> str:
    frac, suffix = config.optimizer_offload_frac, "+overlap" * config.overlaps_optimizer_offload
    return f"offload:{100 * frac:.0f}{suffix}" if frac else ""


def _read_offload(word: str, running: RunConfig) -> FieldValues | None:
    if not word.startswith("offload:"):
        return None
    percent, plus, _ = word.removeprefix("offload:").partition("+overlap")
    frac = whole("offload", percent) / 100
    return {"optimizer_offload_frac": frac, "overlaps_optimizer_offload": bool(plus)}


CHOICES: tuple[Choice, ...] = (
    _number(
        "gpus",
        "number of ranks",
        "--gpus",
        fields=("num_ranks", "ranks_per_node"),
        title="number of ranks",
    ),
    _degree("tp", "tensor parallelism", arguments={_DECLARED["tp"]: "model"}),
    _degree(
        "pp",
        "pipeline stages",
        text=_pp_text,
        arguments={_DECLARED["pp"]: "model"},
    ),
    _degree(
        "vpp",
        "virtual stages of each",
        "--num-virtual-stages-per-pipeline-rank",
        others=("vp",),
        fields=("vp", "microbatch_group_size"),
        axis="vp",
        default=None,
        arguments={
            "num_layers_per_virtual_pipeline_stage": "",
            "virtual_pipeline_model_parallel_size": "model",
            "microbatch_group_size_per_vp_stage": "model",
        },
    ),
    _degree(
        "cp",
        "context parallelism",
        fields=("cp", "context_comm", "context_inner"),
        arguments={_DECLARED["cp"]: "model", "cp_comm_type": "model"},
    ),
    _degree("ep", "expert parallelism", arguments={_DECLARED["ep"]: "model"}),
    _number(
        "etp",
        "tensor parallelism of experts",
        axis="ep",
        title="ETP",
        value=lambda config: config.parallelism.expert_tp,
        label=_label_etp,
        arguments={_DECLARED["etp"]: "model"},
    ),
    _degree(
        "dp",
        "replicas",
        "--data-parallel-size",
        axis=FOLLOWS,
        unsaid=lambda config, values: {},
        needs_option=False,
    ),
    Choice(
        name="sp",
        fields=("is_sequence_parallel",),
        title="sequence parallel",
        help="sequence parallelism",
        metavar="on|off",
        parse=_one_of("sp", _SWITCH, "on or off"),
        options=lambda value: (f"--{'no-' * (value == 'off')}sequence-parallel",),
        value=_sp_word,
        prose=lambda c: "sequence parallel" if _sp_word(c) == "on" else "no sequence parallelism",
        words={"SP": {"is_sequence_parallel": True}, "noSP": {"is_sequence_parallel": False}},
        unsaid=_unsaid_sp,
        taken=lambda c: {"is_sequence_parallel": c.parallelism.tp > 1 and _sp_word(c) == "on"},
        arguments={_DECLARED["is_sequence_parallel"]: "model"},
        needs_option=True,
    ),
    _number(
        "mbs",
        "micro-batch, in samples",
        fields=("micro_batch_size",),
        title="micro-batch",
        label=lambda config: f"mbs{config.batch.micro_batch_size}",
        prose=lambda config: f"micro-batch {config.batch.micro_batch_size}",
        arguments={_DECLARED["micro_batch_size"]: "train"},
        needs_option=True,
    ),
    _number(
        "gbs",
        "samples of a step",
        fields=("global_batch_size",),
        axis=OTHER,
        title="global batch",
        arguments={_DECLARED["global_batch_size"]: "train"},
    ),
    _number(
        "seq",
        "tokens of a sample",
        fields=("seq_length",),
        axis=FOLLOWS,
        title="sequence length",
        arguments={_DECLARED["seq_length"]: "model dataset"},
    ),
    Choice(
        name="recompute",
        fields=("recompute", "recompute_num_layers", "recompute_modules"),
        help="what the backward phase computes again",
        metavar="none|selective|full|MODULE+MODULE",
        parse=_parse_recompute,
        options=_recompute_options,
        value=lambda c: "+".join(sorted(c.recompute_modules)) or c.recompute.value,
        text=_recompute_text,
        label=lambda c: "" if c.recompute is Recompute.NONE else _recompute_text(c),
        prose=_recompute_prose,
        parse_word=_read_recompute,
        unsaid=lambda config, values: _read_recompute("none", config) or {},
        arguments={
            "recompute_granularity": "model",
            "recompute_method": "model",
            "recompute_num_layers": "model",
            "recompute_modules": "model",
        },
        needs_option=True,
    ),
    Choice(
        name="sharding",
        others=("zero",),
        fields=(
            *("sharding", "is_optimizer_distributed"),
            *("regathers_weights", "prefetches_backward", "keeps_grads_whole"),
        ),
        title="sharding of the data-parallel ranks",
        help="what replicas share, by name or by the stage of ZeRO",
        metavar="none|optimizer|grads|weights|0..3",
        parse=_one_of(
            "sharding",
            _SHARDINGS,
            "none, optimizer, grads or weights, or a stage of ZeRO, 0 to 3",
        ),
        options=_sharding_options,
        value=lambda config: config.parallelism.sharded.value,
        text=lambda config: config.parallelism.sharded.value + _copies(config),
        label=_label_sharding,
        parse_word=_read_sharding,
        unsaid=lambda c, so_far: {"num_optimizer_instances": 1} if _is_single(c, so_far) else WHOLE,
        arguments={
            "use_distributed_optimizer": "ddp optimizer",
            "use_megatron_fsdp": "dist ddp",
            "data_parallel_sharding_strategy": "ddp",
            "use_torch_fsdp2": "dist",
        },
    ),
    Choice(
        name="offload",
        fields=("optimizer_offload_frac",),
        text=_offload_text,
        label=_label_offload,
        prose=lambda config: f"{_offload_text(config)} of the optimizer in the host's memory",
        parse_word=_read_offload,
        unsaid=lambda config, values: {"optimizer_offload_frac": 0.0},
        arguments={
            "optimizer_cpu_offload": "optimizer",
            "optimizer_offload_fraction": "optimizer",
            "overlap_cpu_optimizer_d2h_h2d": "optimizer",
            "use_precision_aware_optimizer": "optimizer",
        },
    ),
    Choice(
        name="overlap",
        fields=("overlaps_grad_reduce", "overlaps_param_gather", "overlaps_tp"),
        text=_overlap_text,
        prose=_overlap_prose,
        words={
            "noOverlap": {"overlaps_grad_reduce": False, "overlaps_param_gather": False},
            "gradOverlap": {"overlaps_grad_reduce": True, "overlaps_param_gather": False},
        },
        unsaid=_unsaid_overlap,
        arguments={
            "overlap_grad_reduce": "ddp",
            "overlap_param_gather": "ddp optimizer",
            "tp_comm_overlap": "model",
        },
    ),
    _number(
        "instances",
        "copies of what is sharded",
        fields=("num_optimizer_instances",),
        axis="sharding",
        # Megatron has instances only of a distributed optimizer.
        options=lambda value: (
            *("--num-distributed-optimizer-instances", str(value)),
            *(("--use-distributed-optimizer",) if value != 1 else ()),
        ),
        arguments={"num_distributed_optimizer_instances": "ddp"},
        default=1,
    ),
    Choice(
        name="p2p",
        fields=("overlaps_p2p", "overlaps_p2p_ends"),
        axis="vp",
        prose=lambda config: "messages between stages not overlapped",
        words={"noP2P": {"overlaps_p2p": False}},
        unsaid=lambda c, so_far: (
            {"overlaps_p2p": True} if so_far.get("vp", c.parallelism.vp) > 1 else {}
        ),
        arguments={"overlap_p2p_comm": "model", "overlap_p2p_comm_warmup_flush": "model"},
        default=True,
    ),
    Choice(
        name="layers",
        fields=("chunk_layers",),
        axis="pp",
        label=layers_text,
        prose=lambda config: f"layers {layers_text(config)}",
        parse_word=_read_layers,
        # As usual for so many stages, see ``changed`` of calib/advice/axes.py.
        unsaid=lambda config, values: {"chunk_layers": None},
        taken=lambda c: {"chunk_layers": c.parallelism.chunk_layers * (c.parallelism.vp == 1)},
        arguments={"pipeline_model_parallel_layout": "model"},
    ),
)
"""All choices, in the order of help and tables."""


def _ordered(*first: str) -> list[Choice]:
    """Return all choices, the named ones first."""
    places = {name: place for place, name in enumerate(first)}
    return sorted(CHOICES, key=lambda one: places.get(one.name, len(places)))


NAMED_CHOICES = tuple(one for one in CHOICES if one.help)
"""Choices with a short option, such as ``--tp``."""
_LABEL_ORDER = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "sp", "sharding", "overlap", "p2p")
LABELLED_CHOICES = tuple(
    one for one in _ordered(*_LABEL_ORDER, "layers") if one.label is not None or one.words
)
"""Choices with a word in a label, in its order."""
_OF_AXES = dict.fromkeys(one.axis_name for one in _ordered("gpus", "tp", "sp", "cp", "ep"))
AXES = (*(axis for axis in _OF_AXES if axis not in (OTHER, FOLLOWS)), OTHER)
"""Axes in tie-breaking order."""
_BY_NAME: Mapping[str, Choice] = {name: one for one in NAMED_CHOICES for name in one.names}


def choice(word: str) -> Choice:
    """Return the choice with a short name; raise ``ConfigError`` with the nearest one if unknown.

    >>> choice("zero").name
    'sharding'
    """
    found = _BY_NAME.get(word.strip().lower().removeprefix("--"))
    if found is None:
        near = difflib.get_close_matches(word, _BY_NAME, n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]}?" if near else f"choose from {', '.join(_BY_NAME)}"
        raise ConfigError(f"{shown(word)} is not an axis of a layout; {remedy}")
    return found


def layout_label(config: RunConfig) -> str:
    """Return degrees above 1, sharding, micro-batch, recompute: ``TP4 PP2 DP2 ZeRO1 mbs2 full``.

    ``x2`` behind the sharding means two copies, each over a part of the replicas.  Overlap is named
    unless everything overlaps that can.
    """
    return " ".join(word for one in LABELLED_CHOICES if (word := one.word(config)))


def layout_words(config: RunConfig) -> str:
    """Return a layout in words: ``PP2 DP2, micro-batch 1, all layers computed again``."""
    told = [(one, word) for one in LABELLED_CHOICES if (word := one.word(config))]
    degrees = " ".join(word for one, word in told if one.prose is None)
    return ", ".join((degrees or "no parallelism", *(o.prose(config) for o, _ in told if o.prose)))


def axis_value(config: RunConfig, axis: str) -> str:
    """Return a layout's value on an axis, as text; empty for ``other``."""
    one = next((one for one in CHOICES if axis in one.names), None)
    return "" if one is None else one.text(config) if one.text else str(one.read(config))
