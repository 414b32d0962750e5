"""The lint of one launch: flaws that the rules report, with modelled gains if available."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..arguments.megatron_rules import refusals
from ..arguments.taken_options import unsupported_options_reason
from ..plain_json import JsonObject
from ..shell import quoted
from ..workload.config import takes_options
from ..workload.config_json import Encoded, encoded
from . import _host_rules as host_rules
from . import _option_rules as option_rules
from . import _variable_rules as variable_rules
from ._gain import LEAST_MEMORY_FRAC, Gain
from .rule import Harm, Remedy, Rule, StatedLaunch

if TYPE_CHECKING:
    from .pricing import Pricing

RULES = (*option_rules.RULES, *host_rules.RULES, *variable_rules.RULES)
UNASKED = "no run was given; give the directory of one, or --device"
_LEAST_FRAC = 0.001
"""Smallest gain that is reported."""
_REPORTED_FRAC = 0.01
"""Smallest gain that is mentioned in a run's transcript."""
_ORDER = (Harm.DISTORTS, Harm.WASTES, Harm.RISKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw(Encoded):
    """One argument or variable that should be changed."""

    rule: Rule
    remedy: Remedy
    gain: Gain | None = None
    unpriced: str = ""
    """Reason why there is no gain; empty if there is one."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            rule=self.rule.name,
            harm=self.severity,
            what=self.remedy.what,
            why=self.rule.why,
            instead=self.remedy.instead,
            put=self.remedy.put,
            drop=self.remedy.drop,
            variables=self.remedy.variables,
            gain=self.gain,
            unpriced=self.unpriced or None,
            source=self.rule.source,
        )

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key: largest gain first, then distorting, wasteful and risky flaws."""
        return (self.gain.time_frac if self.gain else 0.0, _ORDER.index(self.rule.harm))

    @property
    def severity(self) -> str:
        """Name of the harm for machine-readable output."""
        return self.rule.harm.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint(Encoded):
    """All flaws of a launch, by rank."""

    flaws: tuple[Flaw, ...]

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(flaws=self.flaws, sure_frac=self.sure_frac)

    @property
    def best(self) -> Flaw | None:
        """Flaw with the largest sure gain of at least 1 %; None if there is none."""
        sure = (flaw for flaw in self.flaws if flaw.gain is not None and flaw.gain.is_sure)
        return next((one for one in sure if one.rank[0] <= -_REPORTED_FRAC), None)

    @property
    def sure_frac(self) -> float:
        """Lower bound on the total of sure gains: the largest of their bounds, since gains may
        overlap; 0 without any."""
        gains = (flaw.gain for flaw in self.flaws if flaw.gain is not None)
        return max((-gain.high_frac for gain in gains if gain.is_sure), default=0.0)

    def line(self, directory: str = "DIR") -> str:
        """Return the line on the launch in a run's transcript; empty if there is no large gain.

        ``directory`` is the value of ``--calibrate-dir``.
        """
        best = self.best
        if best is None or best.gain is None:
            return ""
        more = len(self.flaws) - 1
        also = f" lists {more} more" if more else " says more"
        shown = f"forerun doctor {quoted(directory)}{also}"
        return f"launch: {best.remedy.what} · {best.gain.text} · {shown}"


def lint(launch: StatedLaunch, pricing: Pricing | None = None, unpriced: str = UNASKED) -> Lint:
    """Return the flaws of a launch; ``unpriced`` is why there are no gains without a pricing.

    No remedy is slower, exceeds memory, or is unsupported by the program.  For a custom loop, whose
    arguments are not Megatron's, only environment variables are checked.
    """
    is_megatron = takes_options(launch.config)
    rules = RULES if is_megatron else variable_rules.RULES
    able = [
        (rule, remedy)
        for rule in rules
        if (remedy := rule.remedy(launch, pricing)) is not None and _is_taken(launch, remedy)
    ]
    return Lint(flaws=tuple(sorted(_flaws(able, pricing, unpriced), key=lambda flaw: flaw.rank)))


def _is_taken(launch: StatedLaunch, remedy: Remedy) -> bool:
    """Return True if the program takes the remedy's options, and Megatron its layout."""
    config, layout = launch.config, remedy.layout
    if any(phrase[0] in config.absent for phrase in remedy.put):
        return False
    if layout is None:
        return True
    is_refused = set(refusals(layout)) - set(refusals(config))
    return not is_refused and not unsupported_options_reason(layout, config)


def _flaws(
    able: Sequence[tuple[Rule, Remedy]], pricing: Pricing | None, unasked: str
) -> Iterator[Flaw]:
    layouts = [one.layout for _, one in able if one.layout is not None]
    candidates = iter(pricing.candidates(layouts) if pricing is not None and layouts else ())
    for rule, remedy in able:
        gain, unpriced = remedy.gain, rule.unpriced
        if pricing is None:
            unpriced = unpriced or unasked
        elif remedy.layout is not None:
            gain = pricing.gain(next(candidates))
            unpriced = unpriced if gain is not None else ""  # drop layouts that do not fit
        if gain is not None and _is_worth(gain):
            yield Flaw(rule=rule, remedy=remedy, gain=gain)
        elif unpriced:
            yield Flaw(rule=rule, remedy=remedy, unpriced=unpriced)


def _is_worth(gain: Gain) -> bool:
    frees_memory = gain.memory_frac < -LEAST_MEMORY_FRAC and gain.time_frac <= 0
    return frees_memory or gain.time_frac < -_LEAST_FRAC
