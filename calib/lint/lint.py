"""The lint of one launch: what every rule finds, with its gain where the model knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..arguments.megatron_rules import refusals
from ..arguments.taken_options import untaken
from ..plain_json import JsonObject
from ..shell import quoted
from ..units import format_bytes, format_change
from ..workload.config import takes_options
from . import environment_rules
from .rule import Gain, Harm, Remedy, Rule
from .rules import RULES
from .stated_launch import StatedLaunch

if TYPE_CHECKING:
    from ..advice.plan import Candidate
    from .pricing import Pricing

UNASKED = "no run was given; give the directory of one, or --device"
_LEAST_FRAC = 0.001
"""Less is not worth a line."""
_LEAST_MEMORY_FRAC = 0.05
"""The same of the peak of a rank."""
_TOLD_FRAC = 0.01
"""What is worth a line among others of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One argument or variable that should be otherwise."""

    rule: Rule
    remedy: Remedy
    gain: Gain | None = None
    unpriced: str = ""
    """Why there is no gain; empty where there is one."""

    @property
    def harm(self) -> Harm:
        """What is wrong with it."""
        return self.rule.harm

    def to_json(self) -> JsonObject:
        """A JSON object."""
        remedy = self.remedy
        return {
            "rule": self.rule.name,
            "harm": self.harm.name.lower(),
            "what": remedy.what,
            "why": self.rule.why,
            "instead": remedy.instead,
            "put": [list(phrase) for phrase in remedy.put],
            "drop": list(remedy.drop),
            "variables": dict(remedy.variables),
            "gain": asdict(self.gain) if self.gain is not None else None,
            "unpriced": self.unpriced or None,
            "source": self.rule.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """All that was found, largest gain first, then what distorts, what wastes, what risks."""

    flaws: tuple[Flaw, ...]

    @property
    def best(self) -> Flaw | None:
        """The largest gain that is worth a line beside a plan: at least 1 %, and surely some."""
        told = (f for f in self.flaws if _is_told(f.gain) and not f.rule.is_planned)
        return next(told, None)

    @property
    def sure_frac(self) -> float:
        """What the gains that are sure come to together at least: the surest of them alone, since
        one may hold what another gains; 0 without any."""
        found = (f.gain for f in self.flaws if f.gain is not None and f.gain.is_sure)
        return max((-gain.high_frac for gain in found), default=0.0)

    def line(self, directory: str = "DIR") -> str:
        """What a run says of its launch, empty where nothing is worth it; ``directory`` is what
        ``--calibrate-dir`` was."""
        best = self.best
        if best is None or best.gain is None:
            return ""
        more = len(self.flaws) - 1
        also = f" lists {more} more" if more else " says more"
        shown = f"forerun doctor {quoted(directory)}{also}"
        return f"launch: {best.remedy.what} · {gain_text(best.gain)} · {shown}"

    def to_json(self) -> JsonObject:
        """A JSON object."""
        return {"flaws": [flaw.to_json() for flaw in self.flaws], "sure_frac": self.sure_frac}


def gain_text(gain: Gain) -> str:
    """A gain in words, its interval in brackets.

    >>> gain_text(Gain(time_frac=-0.06, low_frac=-0.08, high_frac=-0.04))
    'about 6 % less per step (4 to 8)'
    """
    time = format_change(
        gain.time_frac,
        gain.low_frac,
        gain.high_frac,
        of="of the run" if gain.of_run else "per step",
        digits=0 if gain.time_frac <= -0.02 else 1,
    )
    text = f"about {time}" if gain.is_sure else time
    if gain.memory_frac > -_LEAST_MEMORY_FRAC:
        return text
    return f"{text}, {format_bytes(-gain.memory_nbytes)} less memory"


def lint(launch: StatedLaunch, pricing: Pricing | None = None) -> Lint:
    """What is wrong with a launch.

    Nothing is offered that is slower, that does not fit, or that the program does not take.  Of a
    loop of the user's own, whose words are not Megatron's, variables alone are looked at.
    """
    is_megatron = takes_options(launch.config)
    rules = RULES if is_megatron else environment_rules.RULES
    found: list[tuple[Rule, Remedy]] = [(r, one) for r in rules for one in r.find(launch)]
    if pricing is not None and is_megatron:
        from .model_rules import RULES as ASKED  # what it asks with is slow to import

        found += [(r, one) for r in ASKED for one in r.find(launch, pricing)]
    able = [(rule, one) for rule, one in found if _is_taken(launch, one)]
    flaws = [flaw for flaw in _flaws(launch, able, pricing) if flaw is not None]
    return Lint(flaws=tuple(sorted(flaws, key=_rank)))


def _is_taken(launch: StatedLaunch, remedy: Remedy) -> bool:
    """Whether the program takes what is offered, and Megatron the layout."""
    config, layout = launch.config, remedy.layout
    if any(phrase[0] in config.absent for phrase in remedy.put):
        return False
    if layout is None:
        return True
    is_refused = set(refusals(layout)) - set(refusals(config))
    return not is_refused and not untaken(layout, config)


def _flaws(
    launch: StatedLaunch, found: Sequence[tuple[Rule, Remedy]], pricing: Pricing | None
) -> Iterator[Flaw | None]:
    layouts = [one.layout for _, one in found if one.layout is not None]
    candidates = iter(pricing.candidates(layouts) if pricing is not None and layouts else ())
    for rule, remedy in found:
        if pricing is None:
            unpriced = rule.unpriced or UNASKED
            yield Flaw(rule=rule, remedy=remedy, unpriced=unpriced)
        elif remedy.layout is not None:
            yield _priced(rule, remedy, next(candidates), pricing)
        elif remedy.spares is not None and not pricing.interval(remedy.spares):
            yield Flaw(
                rule=rule,
                remedy=remedy,
                unpriced=(f"the interval of {remedy.spares.value} is not given"),
            )
        else:
            spared = remedy.spares and pricing.apart(remedy.spares)
            yield _worth(rule, remedy, remedy.gain or spared)


def _priced(rule: Rule, remedy: Remedy, one: Candidate, pricing: Pricing) -> Flaw | None:
    """None where the model says that it is no gain, or that it does not fit."""
    if not pricing.has_room(one):
        return None
    gain = Gain(
        time_frac=one.time_frac,
        low_frac=one.time_frac_low,
        high_frac=one.time_frac_high,
        memory_nbytes=one.memory.total_nbytes - pricing.own.memory.total_nbytes,
        memory_frac=one.memory.total_nbytes / pricing.own.memory.total_nbytes - 1,
    )
    return _worth(rule, remedy, gain)


def _worth(rule: Rule, remedy: Remedy, gain: Gain | None) -> Flaw | None:
    unpriced = Flaw(rule=rule, remedy=remedy, unpriced=rule.unpriced) if rule.unpriced else None
    if gain is None:
        return unpriced
    is_room = gain.memory_frac < -_LEAST_MEMORY_FRAC and gain.time_frac <= 0
    is_worth = is_room or gain.time_frac < -_LEAST_FRAC
    return Flaw(rule=rule, remedy=remedy, gain=gain) if is_worth else unpriced


def _is_told(gain: Gain | None) -> bool:
    return gain is not None and gain.is_sure and gain.time_frac <= -_TOLD_FRAC


_ORDER = (Harm.DISTORTS, Harm.WASTES, Harm.RISKS)


def _rank(flaw: Flaw) -> tuple[float, int]:
    return (flaw.gain.time_frac if flaw.gain is not None else 0.0, _ORDER.index(flaw.harm))
