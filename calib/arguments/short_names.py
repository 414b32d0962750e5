"""Short option names for the axes of a layout, such as ``--tp 4``, shared by all commands.

Each stands for Megatron's own options, can be read back from a ``RunConfig``, and names an axis of
``LayoutConstraint``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..errors import ConfigError
from ..workload import Recompute, RunConfig, Sharding, at_least_one, shown, whole
from .megatron_settings import RECOMPUTE_MODULES
from .option_words import option_words, options_of

AxisValue: TypeAlias = "int | str"
"""A degree, a size, or one of an axis's words."""

_SHARDINGS: Mapping[Sharding, tuple[str, ...]] = {
    Sharding.NONE: ("0", "zero0", "ddp"),
    Sharding.OPTIMIZER: ("1", "zero1"),
    Sharding.GRADS: ("2", "zero2"),
    Sharding.WEIGHTS: ("3", "zero3", "fsdp"),
}
"""Other names: ZeRO stages, and PyTorch's names."""
_FSDP_STRATEGIES = {Sharding.GRADS: "optim_grads", Sharding.WEIGHTS: "optim_grads_params"}
_INSTANCES = "--num-distributed-optimizer-instances"
_ON, _OFF = ("on", "true", "1"), ("off", "false", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutName:
    """One axis of a layout: its names, parser, and conversion to Megatron's options."""

    name: str
    metavar: str
    help: str
    read: Callable[[RunConfig], AxisValue]
    """Function that returns the axis's value in a layout, in the form of ``parse``."""
    parse: Callable[[str], AxisValue]
    """Function that returns the value of a word, or raises ``ConfigError``."""
    options: Callable[[AxisValue], tuple[str, ...]]
    """Function that returns Megatron's options that set a value."""
    others: tuple[str, ...] = ()
    """Other spellings of the name."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Spellings on a command line, such as ``--vpp`` and ``--vp``."""
        return tuple(f"--{name}" for name in (self.name, *self.others))


def expand(argv: Sequence[str]) -> list[str]:
    """Replace short options by Megatron's; all others stay as they are.

    >>> expand(["--tp=2", "--recompute", "mlp+core_attn", "--swiglu"])[:3]
    ['--tensor-model-parallel-size', '2', '--recompute-granularity']
    """
    return [word for option, words in options_of(argv) for word in _expanded(option, words)]


def split_degrees(argv: Sequence[str]) -> tuple[LayoutConstraint, list[str]]:
    """Return the degrees that options name, as a constraint, and all options but these and the
    number of ranks.

    >>> keep, rest = split_degrees(["--tp=8", "--bf16", "--gpus", "64"])
    >>> str(keep), rest
    ('tp=8', ['--bf16'])
    """
    axes: list[AxisConstraint] = []
    rest: list[str] = []
    by_option = {axis.options(1)[0]: axis for axis in map(layout_name, _DEGREES)}
    for option, words in options_of(expand(argv)):
        axis = by_option.get(option)
        if axis is None or len(words) != 1:
            rest += option_words(option, words) if option else words
        elif axis.name != "gpus":
            axes.append(AxisConstraint(name=axis.name, values=(axis.parse(words[0]),)))
    return LayoutConstraint(axes=tuple(axes)), rest


def layout_name(word: str) -> LayoutName:
    """Return the axis of a name; raise ``ConfigError`` with the nearest names if unknown.

    >>> layout_name("zero").name
    'sharding'
    """
    axis = _BY_NAME.get(word.strip().lower().removeprefix("--"))
    if axis is None:
        near = difflib.get_close_matches(word, _BY_NAME, n=3, cutoff=0.4) or _BY_NAME
        raise ConfigError(
            f"{shown(word)} is not an axis of a layout; choose from {', '.join(near)}"
        )
    return axis


def _expanded(option: str, words: Sequence[str]) -> Iterator[str]:
    axis = _BY_NAME.get(option[2:]) if option else None
    if axis is None:
        yield from option_words(option, words) if option else words
        return
    if len(words) != 1:
        count_text = f"{len(words)} values" if words else "no value"
        raise ConfigError(f"{option} has {count_text}; write {option} {axis.metavar}")
    yield from axis.options(axis.parse(words[0]))


def _number(
    name: str,
    option: str,
    help: str,
    read: Callable[[RunConfig], int],
    *,
    others: tuple[str, ...] = (),
) -> LayoutName:
    def parse(word: str) -> AxisValue:
        number = whole(name, word)
        at_least_one(f"--{name}", number)
        return number

    return LayoutName(
        name=name,
        metavar="N",
        help=help,
        read=read,
        parse=parse,
        options=lambda value: (option, str(value)),
        others=others,
    )


def _recompute_word(config: RunConfig) -> str:
    return "+".join(sorted(config.recompute_modules)) or config.recompute.value


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


def _recompute_options(value: AxisValue) -> tuple[str, ...]:
    word = str(value)
    if word == Recompute.FULL.value:
        # Megatron requires a method for full recompute; uniform blocks of one layer cover them all.
        method = ("--recompute-method", "uniform", "--recompute-num-layers", "1")
        return ("--recompute-granularity", word, *method)
    if word in (Recompute.NONE.value, Recompute.SELECTIVE.value):
        modules = () if word == Recompute.NONE.value else ("--recompute-modules", "core_attn")
        return ("--recompute-granularity", word, *modules)
    granularity = ("--recompute-granularity", Recompute.SELECTIVE.value)
    return (*granularity, "--recompute-modules", *word.split("+"))


def _parse_sharding(word: str) -> str:
    """Return the sharding with this name or alias.

    >>> _parse_sharding("fsdp"), _parse_sharding("1"), _parse_sharding("none")
    ('weights', 'optimizer', 'none')
    """
    low = word.lower()
    for sharding, names in _SHARDINGS.items():
        if low == sharding.value or low in names:
            return sharding.value
    raise ConfigError(
        f"--sharding {shown(word)} is not known; give none, optimizer, grads or weights, "
        "or a stage of ZeRO, 0 to 3"
    )


def _sharding_options(value: AxisValue) -> tuple[str, ...]:
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


def _parse_switch(word: str) -> str:
    low = word.lower()
    if low in _ON or low in _OFF:
        return "on" if low in _ON else "off"
    raise ConfigError(f"--sp {shown(word)} is not known; give on or off")


LAYOUT_NAMES: tuple[LayoutName, ...] = (
    _number("gpus", "--gpus", "number of ranks", lambda c: c.parallelism.num_ranks),
    _number("tp", "--tensor-model-parallel-size", "tensor parallelism", lambda c: c.parallelism.tp),
    _number("pp", "--pipeline-model-parallel-size", "pipeline stages", lambda c: c.parallelism.pp),
    _number(
        "vpp",
        "--num-virtual-stages-per-pipeline-rank",
        "virtual stages of each",
        lambda c: c.parallelism.vp,
        others=("vp",),
    ),
    _number("cp", "--context-parallel-size", "context parallelism", lambda c: c.parallelism.cp),
    _number("ep", "--expert-model-parallel-size", "expert parallelism", lambda c: c.parallelism.ep),
    _number(
        "etp",
        "--expert-tensor-parallel-size",
        "tensor parallelism of experts",
        lambda c: c.parallelism.expert_tp,
    ),
    _number("dp", "--data-parallel-size", "replicas", lambda c: c.parallelism.dp),
    LayoutName(
        name="sp",
        metavar="on|off",
        help="sequence parallelism",
        read=lambda c: "on" if c.parallelism.is_sequence_parallel else "off",
        parse=_parse_switch,
        options=lambda value: (
            "--sequence-parallel" if value == "on" else "--no-sequence-parallel",
        ),
    ),
    _number(
        "mbs", "--micro-batch-size", "micro-batch, in samples", lambda c: c.batch.micro_batch_size
    ),
    _number("gbs", "--global-batch-size", "samples of a step", lambda c: c.batch.global_batch_size),
    _number("seq", "--seq-length", "tokens of a sample", lambda c: c.model.seq_length),
    LayoutName(
        name="recompute",
        metavar="none|selective|full|MODULE+MODULE",
        help="what the backward phase computes again",
        read=_recompute_word,
        parse=_parse_recompute,
        options=_recompute_options,
    ),
    LayoutName(
        name="sharding",
        metavar="none|optimizer|grads|weights|0..3",
        help="what replicas share, by name or by the stage of ZeRO",
        read=lambda c: c.parallelism.sharded.value,
        parse=_parse_sharding,
        options=_sharding_options,
        others=("zero",),
    ),
    replace(
        _number(
            "instances",
            _INSTANCES,
            "copies of what is sharded",
            lambda c: c.parallelism.num_optimizer_instances,
        ),
        # Megatron has instances only of a distributed optimizer.
        options=lambda value: (
            *(_INSTANCES, str(value)),
            *(("--use-distributed-optimizer",) if value != 1 else ()),
        ),
    ),
)
"""All axes, in help order."""
_DEGREES = ("gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "dp")
_BY_NAME: Mapping[str, LayoutName] = {
    name: axis for axis in LAYOUT_NAMES for name in (axis.name, *axis.others)
}


_ANY = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisConstraint:
    """One axis, by its name in ``LAYOUT_NAMES``, and its allowed values."""

    name: str
    values: tuple[AxisValue, ...]

    def __str__(self) -> str:
        return f"{self.name}={_ANY.join(map(str, self.values))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstraint:
    """Constraint that every named axis has one of the values given for it.

    >>> LayoutConstraint.parse("tp=8,pp=1|2").axes[1]
    AxisConstraint(name='pp', values=(1, 2))
    """

    axes: tuple[AxisConstraint, ...] = ()

    @staticmethod
    def parse(text: str) -> LayoutConstraint:
        """Parse ``NAME=VALUE[|VALUE...],...``; raise ``ConfigError`` if it is malformed."""
        axes: list[AxisConstraint] = []
        for part in text.split(","):
            word, equals, values = part.partition("=")
            if not (word.strip() and equals and values.strip()):
                raise ConfigError(
                    f"{shown(part)} is not NAME=VALUE; write an axis and its values, such as "
                    "tp=8 or pp=1|2"
                )
            axis = layout_name(word)
            if axis.name in [one.name for one in axes]:
                raise ConfigError(f"{axis.name} is named twice; write {axis.name}=A|B for either")
            axis_values = (axis.parse(value.strip()) for value in values.split(_ANY))
            axes.append(AxisConstraint(name=axis.name, values=tuple(dict.fromkeys(axis_values))))
        return LayoutConstraint(axes=tuple(axes))

    def __str__(self) -> str:
        return ",".join(map(str, self.axes))

    def values_of(self, name: str) -> tuple[AxisValue, ...] | None:
        """Return the allowed values of an axis; None if it is free."""
        return next((one.values for one in self.axes if one.name == name), None)

    def without(self, *names: str) -> LayoutConstraint:
        """Return the constraint with the named axes free."""
        return LayoutConstraint(axes=tuple(one for one in self.axes if one.name not in names))

    def allows(self, config: RunConfig) -> bool:
        """Return True if a layout satisfies the constraint."""
        return all(layout_name(one.name).read(config) in one.values for one in self.axes)

    def with_axis_value(self, name: str, value: AxisValue) -> LayoutConstraint | None:
        """Return the constraint with one axis fixed to a value; None if it excludes the value.

        >>> str(LayoutConstraint.parse("tp=8").with_axis_value("sharding", "optimizer"))
        'tp=8,sharding=optimizer'
        """
        wanted = self.values_of(name)
        if wanted is not None and value not in wanted:
            return None
        rest = tuple(one for one in self.axes if one.name != name)
        return LayoutConstraint(axes=(*rest, AxisConstraint(name=name, values=(value,))))
