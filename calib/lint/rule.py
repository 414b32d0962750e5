"""The launch to lint, the rules, and the remedies that they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from ..arguments.launchers import split_variables, variables_of
from ..arguments.megatron_command import split_launcher
from ..arguments.option_words import options_of
from ..arguments.taken_options import TRANSFORMER_ENGINE
from ..records.files import read_package_json
from ..workload.config import RunConfig
from ._gain import Gain

if TYPE_CHECKING:
    from .pricing import Pricing


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLaunch:
    """A launch as stated by its command; anything else is unknown."""

    config: RunConfig
    """Running layout; ``absent`` are options that its program does not take."""
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Options as written, with their values; the last occurrence counts."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command sets, without those exported by a shell or scheduler."""

    def says(self, *options: str) -> bool:
        """Return True if one of the options is given."""
        return any(option in self.given for option in options)

    def text(self, option: str, default: str = "") -> str:
        """Return the first value of an option; ``default`` if there is none."""
        words = self.given.get(option, ())
        return words[0] if words else default

    def number(self, option: str) -> int | None:
        """Return the integer value of an option; None if it is missing or not an integer."""
        word = self.text(option)
        return int(word) if word.removeprefix("-").isdecimal() else None

    def written(self, option: str) -> str:
        """Return an option with its values, as written."""
        return " ".join((option, *self.given.get(option, ())))

    @property
    def is_on_gpu(self) -> bool:
        """False if ranks are CPU processes."""
        return self.config.device != "cpu"

    @property
    def has_engine(self) -> bool:
        """True if layers are Transformer Engine's, the default on a GPU."""
        is_there = TRANSFORMER_ENGINE not in self.config.absent
        return self.is_on_gpu and is_there and self.text("--transformer-impl") != "local"


def stated_launch(
    words: Sequence[str], config: RunConfig, variables: Mapping[str, str] | None = None
) -> StatedLaunch:
    """Return the launch of a command line, with or without a launcher, whose layout is ``config``.

    ``variables`` are set in addition; those in the command line take precedence.
    """
    front, rest = split_variables(words)
    launcher, arguments = split_launcher(rest)
    return StatedLaunch(
        config=config,
        given={option: tuple(words) for option, words in options_of(arguments) if option},
        variables={**(variables or {}), **front, **variables_of(launcher)},
    )


class Harm(Enum):
    """Kind of harm that an argument does."""

    WASTES = "wastes"
    """The argument costs time or memory."""
    DISTORTS = "distorts the measurement"
    """Recorded steps differ from those of the run without it."""
    RISKS = "risks"
    """The run may not start, or may not do what the argument says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change of a launch."""

    what: str
    """The argument as written, or a note that it is missing."""
    put: tuple[tuple[str, ...], ...] = ()
    """Options with values, which replace any of the same name."""
    drop: tuple[str, ...] = ()
    """Options to remove."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables to set; those with empty values are unset."""
    layout: RunConfig | None = None
    """Layout after the change, if the model distinguishes it; else None."""
    gain: Gain | None = None
    """Gain, if computed by the rule itself; else None."""

    @property
    def instead(self) -> str:
        """The change in words.

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
"""Function that returns the remedy of a rule; its pricing is None without a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as ``rules.json`` states it and ``docs/lint.md`` lists it."""

    name: str
    when: str
    """Condition under which it applies."""
    why: str
    """Reason, in one short sentence."""
    source: str
    """Reference to the program's source or documentation; Megatron-LM's are of core_v0.16.1."""
    harm: Harm
    unpriced: str
    """Reason why the model does not predict its gain; empty if it does."""
    drop: str = ""
    put: tuple[tuple[str, ...], ...] = ()
    """Options with values that replace those dropped or missing."""
    what: str = ""
    """Description of the flaw, if the option as written does not suffice."""
    holds: Callable[[StatedLaunch], bool]
    """Condition under which the change is needed; a dropped option must be given, too."""
    then: Callable[[StatedLaunch], RunConfig] | None
    """Function that returns the layout after the remedy."""
    find: Find | None
    """Function that returns the remedy, if it is not fixed."""

    def remedy(self, launch: StatedLaunch, pricing: Pricing | None = None) -> Remedy | None:
        """Return the remedy; None if the rule does not apply to the launch."""
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
    """Return the rules of one group of ``rules.json``, with their functions by name.

    A rule without an entry in ``holds`` applies on any GPU.
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
    """Return the note on an option that is missing."""
    return f"{' '.join(words)} is not given"
