"""Short option names for the axes of a layout, such as ``--tp 4``, and constraints on layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..workload.argument_values import shown
from ..workload.choices import NAMED_CHOICES, AxisValue, choice
from ..workload.config import RunConfig
from .option_words import option_words, options_of

_BY_NAME = {name: one for one in NAMED_CHOICES for name in one.names}
_DEGREES = ("gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "dp")
_ANY = "|"


def expand(argv: Sequence[str]) -> list[str]:
    """Replace short options by Megatron's; all others stay as they are.

    >>> expand(["--tp=2", "--recompute", "mlp+core_attn", "--swiglu"])[:3]
    ['--tensor-model-parallel-size', '2', '--recompute-granularity']
    """
    return [word for option, words in options_of(argv) for word in _expanded(option, words)]


def _expanded(option: str, words: Sequence[str]) -> Iterator[str]:
    one = _BY_NAME.get(option[2:]) if option else None
    if one is None:
        yield from option_words(option, words) if option else words
        return
    if len(words) != 1:
        count_text = f"{len(words)} values" if words else "no value"
        raise ConfigError(f"{option} has {count_text}; write {option} {one.metavar}")
    yield from one.options(one.parse(words[0]))


def split_degrees(argv: Sequence[str]) -> tuple[LayoutConstraint, list[str]]:
    """Return the degrees that options name, as a constraint, and all options but these and the
    number of ranks.

    >>> keep, rest = split_degrees(["--tp=8", "--bf16", "--gpus", "64"])
    >>> str(keep), rest
    ('tp=8', ['--bf16'])
    """
    axes: dict[str, tuple[AxisValue, ...]] = {}
    rest: list[str] = []
    by_option = {choice(name).options(1)[0]: name for name in _DEGREES}
    for option, words in options_of(expand(argv)):
        name = by_option.get(option)
        if name is None or len(words) != 1:
            rest += option_words(option, words) if option else words
        elif name != "gpus":
            axes[name] = (choice(name).parse(words[0]),)
    return LayoutConstraint(axes=axes), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstraint:
    """Constraint that every named axis has one of the values given for it.

    >>> LayoutConstraint.parse("tp=8,pp=1|2").axes
    {'tp': (8,), 'pp': (1, 2)}
    """

    axes: Mapping[str, tuple[AxisValue, ...]] = field(default_factory=dict)
    """Allowed values, by short name."""

    @staticmethod
    def parse(text: str) -> LayoutConstraint:
        """Parse ``NAME=VALUE[|VALUE...],...``; raise ``ConfigError`` if it is malformed."""
        axes: dict[str, tuple[AxisValue, ...]] = {}
        for part in text.split(","):
            word, equals, values = part.partition("=")
            if not (word.strip() and equals and values.strip()):
                raise ConfigError(
                    f"{shown(part)} is not NAME=VALUE; write an axis and its values, such as "
                    "tp=8 or pp=1|2"
                )
            one = choice(word)
            if one.name in axes:
                raise ConfigError(f"{one.name} is named twice; write {one.name}=A|B for either")
            parsed = (one.parse(value.strip()) for value in values.split(_ANY))
            axes[one.name] = tuple(dict.fromkeys(parsed))
        return LayoutConstraint(axes=axes)

    def __str__(self) -> str:
        return ",".join(f"{n}={_ANY.join(map(str, values))}" for n, values in self.axes.items())

    def without(self, *names: str) -> LayoutConstraint:
        """Return the constraint with the named axes free."""
        return LayoutConstraint(axes={n: v for n, v in self.axes.items() if n not in names})

    def allows(self, config: RunConfig) -> bool:
        """Return True if a layout satisfies the constraint."""
        return all(choice(name).read(config) in values for name, values in self.axes.items())

    def with_axis_value(self, name: str, value: AxisValue) -> LayoutConstraint | None:
        """Return the constraint with one axis fixed to a value; None if it excludes the value.

        >>> str(LayoutConstraint.parse("tp=8").with_axis_value("sharding", "optimizer"))
        'tp=8,sharding=optimizer'
        """
        if value not in self.axes.get(name, (value,)):
            return None
        return LayoutConstraint(axes={**self.without(name).axes, name: (value,)})
