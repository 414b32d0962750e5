"""What a rule of the lint is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ..workload.config import Dispatcher, RunConfig
from .stated_launch import StatedLaunch


class Harm(Enum):
    """What is wrong with an argument."""

    WASTES = "wastes"
    """Time or memory."""
    DISTORTS = "distorts the measurement"
    """Steps that are recorded are not those of the run without it."""
    RISKS = "risks"
    """The run may not start, or not do what the argument says."""


class Part(Enum):
    """What a run does beside its steps."""

    EVALUATIONS = "evaluations"
    SAVES = "saves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A change of time, with its 90 % interval; below 0 is less."""

    time_frac: float
    low_frac: float
    high_frac: float
    of_run: bool = False
    """Of the whole run in place of a step."""
    memory_nbytes: int = 0
    """Change of the peak of a rank."""
    memory_frac: float = 0.0
    """The same over that peak."""

    @property
    def is_sure(self) -> bool:
        """Whether the interval excludes that it gains nothing."""
        return self.high_frac < 0


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
    spares: Part | None = None
    """What takes no time of training any more."""
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


Find = Callable[[StatedLaunch], Iterable[Remedy]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as ``docs/lint.md`` lists it."""

    name: str
    harm: Harm
    when: str
    """What it finds."""
    why: str
    """One short sentence."""
    source: str
    """Where the host's own source or documents say so; Megatron-LM's are of core_v0.16.1."""
    unpriced: str = ""
    """Why its gain is no part of the model, or not of any; empty where the model decides."""
    is_planned: bool = False
    """A plan of the same run looks for it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedRule(Rule):
    """A rule that holds of the words alone."""

    find: Find


def missing(option: str) -> str:
    """What is said of an option that should be there."""
    return f"{option} is not given"


def with_parallelism(launch: StatedLaunch, **fields: bool) -> RunConfig:
    """What runs with other fields of ``Parallelism``."""
    config = launch.config
    return replace(config, parallelism=replace(config.parallelism, **fields))


def with_experts(launch: StatedLaunch, **fields: bool | Dispatcher) -> RunConfig:
    """What runs with other fields of ``Experts``, of a model that has some."""
    config, experts = launch.config, launch.config.model.experts
    if experts is None:
        return config
    return replace(config, model=replace(config.model, experts=replace(experts, **fields)))
