"""The launch that a lint looks at, what a rule of it is, and what one finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ..arguments import (
    TRANSFORMER_ENGINE,
    options_of,
    split_launcher,
    split_variables,
    variables_of,
)
from ..records import read_package_json
from ..workload import RunConfig
from .gain import Gain

if TYPE_CHECKING:
    from .pricing import Pricing


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLaunch:
    """A launch as its command states it; nothing is known of what the command does not say."""

    config: RunConfig
    """What runs; ``absent`` is what its program does not take."""
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The program's options as written, with the words behind each; the last of two counts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that the command sets; what a shell or a scheduler exports is not among them."""

    def says(self, *options: str) -> bool:
        """Whether one of the options is there."""
        return any(option in self.given for option in options)

    def text(self, option: str, default: str = "") -> str:
        """The first word behind an option; the default where there is none."""
        words = self.given.get(option, ())
        return words[0] if words else default

    def number(self, option: str) -> int | None:
        """The whole number behind an option; None where it is not given, or is none."""
        word = self.text(option)
        return int(word) if word.removeprefix("-").isdecimal() else None

    def written(self, option: str) -> str:
        """An option with its words, as a user knows it."""
        return " ".join((option, *self.given.get(option, ())))

    @property
    def is_on_gpu(self) -> bool:
        """False where ranks are processes of a CPU."""
        return self.config.device != "cpu"

    @property
    def has_engine(self) -> bool:
        """Whether layers are Transformer Engine's, as they are by default on a GPU."""
        is_there = TRANSFORMER_ENGINE not in self.config.absent
        return self.is_on_gpu and is_there and self.text("--transformer-impl") != "local"


def stated_launch(
    words: Sequence[str], config: RunConfig, variables: Mapping[str, str] | None = None
) -> StatedLaunch:
    """The launch of a command line, with or without a launcher, whose layout is known.

    ``variables`` are known beside those that the words set.
    """
    front, rest = split_variables(words)
    launcher, arguments = split_launcher(rest)
    return StatedLaunch(
        config=config,
        given={option: tuple(words) for option, words in options_of(arguments) if option},
        variables={**(variables or {}), **front, **variables_of(launcher)},
    )


class Harm(Enum):
    """What is wrong with an argument."""

    WASTES = "wastes"
    """Time or memory."""
    DISTORTS = "distorts the measurement"
    """Steps that are recorded are not those of the run without it."""
    RISKS = "risks"
    """The run may not start, or not do what the argument says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to write otherwise."""

    what: str
    """The argument as written, or that it is not there."""
    put: tuple[tuple[str, ...], ...] = ()
    """Options with their words that take the place of any of the same name."""
    drop: tuple[str, ...] = ()
    """Options that are left out."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables to set; empty ones are unset."""
    layout: RunConfig | None = None
    """What runs then, where the model can tell the two apart."""
    gain: Gain | None = None
    """Where the rule has worked it out itself."""

    @property
    def instead(self) -> str:
        """What to write.

        >>> Remedy(what="", put=(("--a", "1"),), drop=("--b",), variables={"C": ""}).instead
        '--a 1; leave out --b; unset C'
        """
        put = " ".join(word for phrase in self.put for word in phrase)
        dropped = ", ".join(self.drop)
        variables = [
            f"{n}={value}" if value else f"unset {n}" for n, value in self.variables.items()
        ]
        return "; ".join(filter(None, (put, dropped and f"leave out {dropped}", *variables)))


Find = Callable[[StatedLaunch, "Pricing | None"], Remedy | None]
"""Makes a remedy; the model is None where none was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as ``rules.json`` states it and ``docs/lint.md`` lists it."""

    name: str
    when: str
    """What it finds."""
    why: str
    """One short sentence."""
    source: str
    """Where the host's own source or documents say so; Megatron-LM's are of core_v0.16.1."""
    harm: Harm
    unpriced: str
    """Why its gain is no part of the model, or not of any; empty where the model decides."""
    drop: str = ""
    put: tuple[tuple[str, ...], ...] = ()
    """Phrases that take the place of what is dropped or missing."""
    what: str = ""
    """What is wrong where the option as written does not say it."""
    holds: Callable[[StatedLaunch], bool]
    """Where what is put or dropped is wrong; what is dropped is then also given."""
    then: Callable[[StatedLaunch], RunConfig] | None
    """The layout that runs after the remedy."""
    find: Find | None
    """Makes the remedy where it is no fixed option."""

    def remedy(self, launch: StatedLaunch, pricing: Pricing | None = None) -> Remedy | None:
        """What to write otherwise; None where the launch is right."""
        if self.find is not None:
            return self.find(launch, pricing)
        if (self.drop and not launch.says(self.drop)) or not self.holds(launch):
            return None
        option = self.drop or self.put[0][0]
        given = launch.written(option) if launch.says(option) else missing(*self.put[0])
        return Remedy(
            what=self.what or given,
            put=self.put,
            drop=(self.drop,) if self.drop else (),
            layout=self.then(launch) if self.then is not None else None,
        )


def rules_of(
    group: str,
    *,
    holds: Mapping[str, Callable[[StatedLaunch], bool]],
    then: Mapping[str, Callable[[StatedLaunch], RunConfig]],
    find: Mapping[str, Find],
) -> tuple[Rule, ...]:
    """The rules of one group of ``rules.json``, with what tells where each holds, by its name.

    A rule that nothing is said of holds on any GPU.
    """
    texts = read_package_json(__package__, "rules.json")
    return tuple(
        Rule(
            **{
                **row,
                "harm": Harm[row.get("harm", "WASTES")],
                "unpriced": texts["unpriced"].get(row.get("unpriced"), row.get("unpriced", "")),
                "put": tuple(map(tuple, row.get("put", ()))),
            },
            holds=holds.get(row["name"], _is_on_gpu),
            then=then.get(row["name"]),
            find=find.get(row["name"]),
        )
        for row in texts[group]
    )


def _is_on_gpu(launch: StatedLaunch) -> bool:
    return launch.is_on_gpu


def missing(*words: str) -> str:
    """What is said of an option that should be there."""
    return f"{' '.join(words)} is not given"
