"""Explanation of a layout's step time, and of the difference of two layouts, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

from ..errors import ConfigError
from ..fit.estimates import Source
from ..plain_json import JsonObject
from ..regressors.robust import Z_90
from ..steps.estimate import StepEstimate, StepTerms
from ..steps.known_steps import similarity
from ..steps.model import FittedSteps
from ..timeline.terms import TERM_TEXTS, Term
from ..units import format_frac, format_time
from ..workload.choices import axis_value, layout_label
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encode_fields, encoded
from .axes import differing_axes, with_axes_of

_MOST_AXES = 8
"""Limit of choices that are changed separately; further ones change with the last.  Eight choices
have 256 combinations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Encoded):
    """One step of a walk between two layouts: the changed axes and their effect on step time."""

    axes: tuple[str, ...]
    """Changed axes; several if no layout in between can run."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    """Values of these axes."""
    label: str
    step_time_s: float
    change_s: float
    """Change against the previous layout."""
    low_s: float
    high_s: float
    """90 % interval of ``change_s``; errors that both layouts share have cancelled."""

    def to_json(self) -> JsonObject:
        """Return the JSON object, with the values of each axis together."""
        named = zip(self.axes, self.before, self.after, strict=True)
        axes = [{"axis": axis, "before": old, "after": new} for axis, old, new in named]
        return encode_fields(self, "before", "after") | encoded(axes=axes)

    @property
    def text(self) -> str:
        """The changes, as ``tp 2 -> 4``."""
        named = zip(self.axes, self.before, self.after, strict=True)
        return ", ".join(f"{axis} {old} -> {new}" if new else axis for axis, old, new in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Encoded):
    """Sequence of changes from one layout to another."""

    changes: tuple[Change, ...]
    """Changes in order; the last ends at the other layout."""
    alone: tuple[Change, ...]
    """Each choice changed on its own in the first layout, if that can run."""
    impossible: tuple[str, ...]
    """Axes whose choice cannot be changed on its own."""


def walk(start: RunConfig, end: RunConfig, steps: FittedSteps) -> Walk:
    """Return the walk from ``start`` to ``end`` with the most intermediate layouts that can run.

    Ties are broken by the order of ``AXES``.  Memory is not checked for intermediate layouts.
    """
    groups = _groups(differing_axes(start, end))
    between = _between(start, end, groups)
    path = _longest(between, len(groups))
    singles = [frozenset({place}) for place in range(len(groups))]
    able = [one for one in singles if one in between]
    layouts = [between[places] for places in (*path, *able)]
    first, *estimates = steps.estimates([start, *layouts])
    changes, before = [], (frozenset[int](), first)
    for places, estimate in zip(path, estimates[: len(path)], strict=True):
        changed = [axis for place in sorted(places - before[0]) for axis in groups[place]]
        changes.append(_change(changed, before[1], estimate))
        before = (places, estimate)
    alone = [
        _change([axis for place in places for axis in groups[place]], first, estimate)
        for places, estimate in zip(able, estimates[len(path) :], strict=True)
    ]
    impossible = [axis for n, axes in enumerate(groups) if singles[n] not in able for axis in axes]
    return Walk(changes=tuple(changes), alone=tuple(alone), impossible=tuple(impossible))


def _groups(axes: Sequence[str]) -> list[tuple[str, ...]]:
    apart, rest = axes[: _MOST_AXES - 1], axes[_MOST_AXES - 1 :]
    return [*((axis,) for axis in apart), *([tuple(rest)] if rest else [])]


def _between(
    start: RunConfig, end: RunConfig, groups: Sequence[Sequence[str]]
) -> dict[frozenset[int], RunConfig]:
    """Return the layouts between ``start`` and ``end`` that can run, and always ``end`` itself.

    Keys are the places of the groups of axes that are taken from ``end``.
    """
    out: dict[frozenset[int], RunConfig] = {}
    for number in range(1, len(groups)):
        for chosen in combinations(range(len(groups)), number):
            try:
                axes = [axis for place in chosen for axis in groups[place]]
                out[frozenset(chosen)] = with_axes_of(start, end, axes)
            except ConfigError:
                continue
    if groups:
        out[frozenset(range(len(groups)))] = end
    return out


def _longest(between: dict[frozenset[int], RunConfig], number: int) -> list[frozenset[int]]:
    """Return the longest path on which each layout has more choices of the end than the last."""
    best: dict[frozenset[int], list[frozenset[int]]] = {frozenset(): []}
    for places in sorted(between, key=lambda one: (len(one), sorted(one))):
        ways = [way for before, way in best.items() if before < places]
        # Break ties by the order of the axes.
        best[places] = [*min(ways, key=lambda way: (-len(way), list(map(sorted, way)))), places]
    return best[frozenset(range(number))]


def _change(axes: Sequence[str], before: StepEstimate, after: StepEstimate) -> Change:
    low_s, high_s = _change_s(before, after)
    return Change(
        axes=tuple(axes),
        before=tuple(axis_value(before.config, axis) for axis in axes),
        after=tuple(axis_value(after.config, axis) for axis in axes),
        label=layout_label(after.config),
        step_time_s=after.time_s,
        change_s=after.time_s - before.time_s,
        low_s=low_s,
        high_s=high_s,
    )


def _change_s(before: StepEstimate, after: StepEstimate) -> tuple[float, float]:
    """Return the ends of the 90 % interval of the second step minus the first."""
    ratio = after.over(before)
    return before.time_s * ratio.low - before.time_s, before.time_s * ratio.high - before.time_s


SCHEMA = 1
_SIGNED = (Term.NODES, Term.UNEXPLAINED)
"""Terms that may be negative."""
_MOST_FRAC, _MOST_NAMED = 0.8, 3
"""A sentence names at most this many terms, until they are this share of the total."""
_WORTH_FRAC = 0.1
"""Smallest share of a difference from which a term of opposite sign is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermTime(Encoded):
    """Seconds of one term of a layout, or of the difference of two, with a 90 % interval."""

    term: Term
    time_s: float
    low_s: float
    high_s: float
    source_frac: Mapping[Source, float]
    """Nonzero shares by provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained(Encoded):
    """A layout's step as a sum of terms."""

    estimate: StepEstimate
    terms: tuple[TermTime, ...]
    """Nonzero terms; they add up to the step."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            label=self.label,
            num_ranks=self.estimate.config.parallelism.num_ranks,
            step_time_s=self.estimate.time_s,
            low_s=self.estimate.low_s,
            high_s=self.estimate.high_s,
            critical_stage=self.estimate.critical_stage,
            source_frac=self.estimate.source_frac,
            terms=self.terms,
        )

    @property
    def label(self) -> str:
        """Short name of the layout."""
        return layout_label(self.estimate.config)

    @property
    def sentence(self) -> str:
        """The largest terms of the step, in a sentence."""
        total_s = self.estimate.time_s
        spent = [t for t in self.terms if t.time_s > 0 or t.term not in _SIGNED]
        named = _named(spent, total_s)
        parts = [f"{TERM_TEXTS[t.term]} {format_frac(t.time_s / total_s)}" for t in named]
        return f"{self.label} takes {format_time(total_s)}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Encoded):
    """Step of one layout minus that of another, term by term."""

    one: Explained
    other: Explained
    time_s: float
    low_s: float
    high_s: float
    """90 % interval; errors that both steps share have cancelled."""
    terms: tuple[TermTime, ...]
    """Terms of the difference: those of ``one`` less those of ``other``.  They add up to
    ``time_s``."""
    level: float
    """Factor by which the terms of both are stretched: the run's own level, which explains no
    difference."""
    walk: Walk
    """Walk from ``other`` to ``one``."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            time_s=self.time_s,
            low_s=self.low_s,
            high_s=self.high_s,
            time_frac=self.time_frac,
            is_told_apart=self.is_distinguishable,
            terms=self.terms,
            walk=self.walk,
        )

    @property
    def is_distinguishable(self) -> bool:
        """True if 0 lies outside the interval."""
        return self.low_s > 0 or self.high_s < 0

    @property
    def sentence(self) -> str:
        """The faster of the two and the deciding terms, in a sentence."""
        frac = self.time_s / self.other.estimate.time_s
        if not self.time_s:
            return f"{self.one.label} and {self.other.label} take the same time"
        if self.is_distinguishable:
            faster = "faster" if frac < 0 else "slower"
            text = f"{self.one.label} is {format_frac(abs(frac))} {faster} than {self.other.label}"
        else:
            low, high = (s / self.other.estimate.time_s for s in (self.low_s, self.high_s))
            ends = f"{format_frac(low, signed=True)} to {format_frac(high, signed=True)}"
            text = f"{self.one.label} is indistinguishable from {self.other.label} "
            text += f"({format_frac(frac, signed=True)}; 90 %: {ends})"
        sign = math.copysign(1.0, self.time_s)
        along = [term for term in self.terms if term.time_s * sign > 0]
        named = _named(along, sum(abs(term.time_s) for term in along))
        text += f", mainly by {', '.join(map(_signed, named))}"
        against = min(self.terms, key=lambda term: term.time_s * sign)
        if against.time_s * sign < -_WORTH_FRAC * abs(self.time_s):
            text += f"; against it {_signed(against)}"
        return text

    @property
    def time_frac(self) -> float:
        """The difference as a share of the other layout's step."""
        return self.time_s / self.other.estimate.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Encoded):
    """Explanation of a step, or of a difference of two."""

    schema: ClassVar[int] = SCHEMA

    one: Explained
    difference: Difference | None = None

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            schema=self.schema,
            sentence=self.sentence,
            layout=self.one,
            other=self.difference and self.difference.other,
            difference=self.difference,
        )

    @property
    def sentence(self) -> str:
        """The explanation in one sentence."""
        return self.difference.sentence if self.difference else self.one.sentence


def explain(config: RunConfig, other: RunConfig | None, steps: FittedSteps) -> Explanation:
    """Explain the step of a layout or, with ``other``, its difference from that layout's step."""
    if other is None:
        return Explanation(one=_explained(*steps.by_term([config])))
    one, second = steps.by_term([config, other])
    against = _difference(one, second, walk(other, config, steps))
    return Explanation(one=against.one, difference=against)


def _explained(step_terms: StepTerms) -> Explained:
    unshared_sigma_s = step_terms.estimate.time_s * step_terms.estimate.unshared_sigma_log
    terms = []
    for term in Term:
        time_s = step_terms.terms_s[term]
        sigma_s = math.hypot(
            *step_terms.error_s[term].values(),
            unshared_sigma_s if term is Term.UNEXPLAINED else 0.0,
        )
        if time_s or term is Term.UNEXPLAINED:
            terms.append(_term_time(term, time_s, sigma_s, step_terms.source_frac[term]))
    return Explained(estimate=step_terms.estimate, terms=tuple(terms))


def _term_time(
    term: Term,
    time_s: float,
    sigma_s: float,
    sources: Mapping[Source, float],
    *,
    is_signed: bool = False,
) -> TermTime:
    low_s = time_s - Z_90 * sigma_s
    if not (is_signed or term in _SIGNED):
        low_s = max(0.0, low_s)
    return TermTime(
        term=term,
        time_s=time_s,
        low_s=low_s,
        high_s=time_s + Z_90 * sigma_s,
        source_frac={source: frac for source, frac in sources.items() if frac},
    )


def _levelled(whole: StepTerms, factor: float) -> StepTerms:
    """Return the terms scaled by the level common to both layouts, which explains no difference."""
    named = [term for term in Term if term is not Term.UNEXPLAINED]
    terms_s = {term: factor * whole.terms_s[term] for term in named}
    error_s = {term: {n: factor * e for n, e in whole.error_s[term].items()} for term in named}
    rest: dict[str, float] = dict(whole.error_s[Term.UNEXPLAINED])
    for term, errors in error_s.items():
        for name, error in errors.items():
            rest[name] = rest.get(name, 0.0) + whole.error_s[term][name] - error
    terms_s[Term.UNEXPLAINED] = whole.estimate.time_s - sum(terms_s.values())
    return replace(whole, terms_s=terms_s, error_s={**error_s, Term.UNEXPLAINED: rest})


def _shared_level(*pair: StepTerms) -> float:
    """Return the factor by which both steps exceed their terms, or both fall short; else 1."""
    factors = [
        one.estimate.time_s / (one.estimate.time_s - one.terms_s[Term.UNEXPLAINED]) for one in pair
    ]
    return max(1.0, min(factors)) if max(factors) > 1.0 else max(factors)


def _difference(one: StepTerms, other: StepTerms, way: Walk) -> Difference:
    level = _shared_level(one, other)
    one, other = (_levelled(terms, level) for terms in (one, other))
    mine, its = one.estimate, other.estimate
    ours_s, theirs_s = mine.time_s * mine.unshared_sigma_log, its.time_s * its.unshared_sigma_log
    alike = 1.0
    if mine.config != its.config:
        alike = float(similarity([mine.config], [its.config])[0, 0])
    unshared_sigma_s = math.sqrt(max(0.0, ours_s**2 + theirs_s**2 - 2 * alike * ours_s * theirs_s))
    terms = []
    for term in Term:
        time_s = one.terms_s[term] - other.terms_s[term]
        ours, theirs = one.error_s[term], other.error_s[term]
        sigma_s = math.hypot(
            *(ours.get(name, 0.0) - theirs.get(name, 0.0) for name in sorted({*ours, *theirs})),
            unshared_sigma_s if term is Term.UNEXPLAINED else 0.0,
        )
        if one.terms_s[term] or other.terms_s[term] or term is Term.UNEXPLAINED:
            sources = _joined(one, other, term)
            terms.append(_term_time(term, time_s, sigma_s, sources, is_signed=True))
    low_s, high_s = _change_s(its, mine)
    return Difference(
        one=_explained(one),
        other=_explained(other),
        time_s=mine.time_s - its.time_s,
        low_s=low_s,
        high_s=high_s,
        terms=tuple(terms),
        level=level,
        walk=way,
    )


def _joined(one: StepTerms, other: StepTerms, term: Term) -> dict[Source, float]:
    """Return source shares of both layouts together, weighted by seconds."""
    ours_s, theirs_s = abs(one.terms_s[term]), abs(other.terms_s[term])
    total_s = ours_s + theirs_s or 1.0
    ours, theirs = one.source_frac[term], other.source_frac[term]
    return {
        source: (ours_s * ours.get(source, 0.0) + theirs_s * theirs.get(source, 0.0)) / total_s
        for source in Source
    }


def _named(terms: Sequence[TermTime], total_s: float) -> list[TermTime]:
    """Return the largest terms, until they are most of a total."""
    ordered = sorted(terms, key=lambda term: -abs(term.time_s))
    named: list[TermTime] = []
    for term in ordered[:_MOST_NAMED]:
        if sum(abs(one.time_s) for one in named) >= _MOST_FRAC * total_s:
            break
        named.append(term)
    return named


def _signed(term: TermTime) -> str:
    sign = "+" if term.time_s > 0 else "-"
    return f"{TERM_TEXTS[term.term]} {sign}{format_time(abs(term.time_s))}"
