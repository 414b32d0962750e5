"""The lint of one launch: what every rule finds, with its gain where the model knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..arguments import refusals, untaken
from ..shell import quoted
from ..workload import Encoded, takes_options
from . import host_rules, option_rules, variable_rules
from .gain import LEAST_MEMORY_FRAC, Gain
from .rule import Harm, Remedy, Rule, StatedLaunch

if TYPE_CHECKING:
    from .pricing import Pricing

RULES = (*option_rules.RULES, *host_rules.RULES, *variable_rules.RULES)
UNASKED = "no run was given; give the directory of one, or --device"
_LEAST_FRAC = 0.001
"""Less is not worth a line."""
_REPORTED_FRAC = 0.01
"""What is worth a line among others of a run."""
_ORDER = (Harm.DISTORTS, Harm.WASTES, Harm.RISKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw(Encoded):
    """One argument or variable that should be otherwise."""

    JSON: ClassVar[str] = (
        "rule=rule.name harm=severity what=remedy.what why=rule.why instead=remedy.instead "
        "put=remedy.put drop=remedy.drop variables=remedy.variables gain unpriced? "
        "source=rule.source"
    )

    rule: Rule
    remedy: Remedy
    gain: Gain | None = None
    unpriced: str = ""
    """Why there is no gain; empty where there is one."""

    @property
    def rank(self) -> tuple[float, int]:
        """Largest gain first, then what distorts, what wastes, what risks."""
        return (self.gain.time_frac if self.gain else 0.0, _ORDER.index(self.rule.harm))

    @property
    def severity(self) -> str:
        """The name of the harm, as programs read it."""
        return self.rule.harm.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint(Encoded):
    """All flaws, by their rank."""

    JSON: ClassVar[str] = "flaws sure_frac"

    flaws: tuple[Flaw, ...]

    @property
    def best(self) -> Flaw | None:
        """The largest gain that is worth a line beside a plan: at least 1 %, and surely some."""
        sure = (flaw for flaw in self.flaws if flaw.gain is not None and flaw.gain.is_sure)
        return next((one for one in sure if one.rank[0] <= -_REPORTED_FRAC), None)

    @property
    def sure_frac(self) -> float:
        """What the gains that are sure come to together at least: the surest of them alone, since
        one may hold what another gains; 0 without any."""
        gains = (flaw.gain for flaw in self.flaws if flaw.gain is not None)
        return max((-gain.high_frac for gain in gains if gain.is_sure), default=0.0)

    def line(self, directory: str = "DIR") -> str:
        """What a run says of its launch, empty where nothing is worth it; ``directory`` is what
        ``--calibrate-dir`` was."""
        best = self.best
        if best is None or best.gain is None:
            return ""
        more = len(self.flaws) - 1
        also = f" lists {more} more" if more else " says more"
        shown = f"forerun doctor {quoted(directory)}{also}"
        return f"launch: {best.remedy.what} · {best.gain.text} · {shown}"


def lint(launch: StatedLaunch, pricing: Pricing | None = None) -> Lint:
    """What is wrong with a launch.

    Nothing is offered that is slower, that does not fit, or that the program does not take.  Of a
    loop of the user's own, whose words are not Megatron's, variables alone are looked at.
    """
    is_megatron = takes_options(launch.config)
    rules = RULES if is_megatron else variable_rules.RULES
    able = [
        (rule, remedy)
        for rule in rules
        if (remedy := rule.remedy(launch, pricing)) is not None and _is_taken(launch, remedy)
    ]
    return Lint(flaws=tuple(sorted(_flaws(able, pricing), key=lambda flaw: flaw.rank)))


def _is_taken(launch: StatedLaunch, remedy: Remedy) -> bool:
    """Whether the program takes what is offered, and Megatron the layout."""
    config, layout = launch.config, remedy.layout
    if any(phrase[0] in config.absent for phrase in remedy.put):
        return False
    if layout is None:
        return True
    is_refused = set(refusals(layout)) - set(refusals(config))
    return not is_refused and not untaken(layout, config)


def _flaws(able: Sequence[tuple[Rule, Remedy]], pricing: Pricing | None) -> Iterator[Flaw]:
    layouts = [one.layout for _, one in able if one.layout is not None]
    candidates = iter(pricing.candidates(layouts) if pricing is not None and layouts else ())
    for rule, remedy in able:
        gain, unpriced = remedy.gain, rule.unpriced
        if pricing is None:
            unpriced = unpriced or UNASKED
        elif remedy.layout is not None:
            gain = pricing.gain(next(candidates))
            unpriced = unpriced if gain is not None else ""  # what does not fit is no remedy
        if gain is not None and _is_worth(gain):
            yield Flaw(rule=rule, remedy=remedy, gain=gain)
        elif unpriced:
            yield Flaw(rule=rule, remedy=remedy, unpriced=unpriced)


def _is_worth(gain: Gain) -> bool:
    frees_memory = gain.memory_frac < -LEAST_MEMORY_FRAC and gain.time_frac <= 0
    return frees_memory or gain.time_frac < -_LEAST_FRAC
