"""The step of a layout: its time with an interval, where the time goes, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..fit import Source
from ..layers import collective_uses, stage_operators
from ..regressors import Z_90
from ..timeline import GroupTimes, Item, Part, Span, Term, item_name, term_of, term_of_role
from ..workload import (
    Collective,
    CollectiveCall,
    Encoded,
    GroupRole,
    OperatorKind,
    Phase,
    RunConfig,
)
from .known import same_layout, similarity
from .slices import Place, Slice

_ROUNDING = 1e-12
"""Relative; sums in another order differ by this at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Seconds of a step that the critical stage spends on one kind of work, before overlap."""

    name: str
    phase: str
    """Phase of an operator; empty for a collective."""
    count: int
    time_s: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate(Encoded):
    """Median step time, its 90 % interval, and the parts of the critical stage."""

    JSON: ClassVar[str] = "time_s low_s high_s critical_stage parts_s source_frac"

    config: RunConfig
    time_s: float
    low_s: float
    high_s: float
    sigma_log: float
    """A 90 % interval is ``Z_90`` of it to either side, in logs."""
    error_log: Mapping[str, float]
    """Change of log step time when one thing that is not known is off by one deviation; the same
    name is the same thing in every estimate of one model."""
    own_sigma_log: float
    """Deviation of this layout alone."""
    critical_stage: int
    parts_s: Mapping[Part, float]
    """Seconds of the critical stage; they add up to ``time_s``."""
    contributions: tuple[Contribution, ...]
    source_frac: Mapping[Source, float]
    """Share of the work of the critical stage by where its time comes from."""
    spans: tuple[Span, ...] = ()
    """For a trace, of one layout that was asked for alone; the last ends after ``time_s``."""
    slices: Mapping[Place, tuple[Slice, ...]] = field(default_factory=dict, repr=False)
    """What the spans are made of, by place; empty where there are no spans."""

    def drawn(self, spans: Iterable[Span], slices: Mapping[Place, Iterable[Slice]]) -> StepEstimate:
        """With spans, and what they are made of, whose time is scaled to that of the step."""
        held = tuple(spans)
        factor = self.time_s / max(span.end_s for span in held)
        return replace(
            self,
            spans=tuple(span.scaled(factor) for span in held),
            slices={at: tuple(one.scaled(factor) for one in own) for at, own in slices.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The step of a layout as a sum: one answer with its ``StepEstimate``."""

    estimate: StepEstimate
    terms_s: Mapping[Term, float]
    """Seconds of the critical stage; they add up to the step."""
    error_s: Mapping[Term, Mapping[str, float]]
    """Change of each when one thing that is not known is off by one deviation, by the names of the
    estimate's ``error_log``; over all terms they add up to its change of the step.  What this
    layout has alone, ``own_sigma_log``, is of ``UNEXPLAINED`` and not among them."""
    source_frac: Mapping[Term, Mapping[Source, float]]
    """Shares of each term by where its time comes from."""


def step_terms(
    estimate: StepEstimate,
    terms_s: Mapping[Term, float],
    error_s: Mapping[Term, Mapping[str, float]],
    *,
    is_measured: bool,
    is_fitted: bool,
) -> StepTerms:
    """The terms with what is beside them: all that the step has more, or less, than they say.

    ``is_measured``: the step itself was; ``is_fitted``: any step.
    """
    errors: dict[str, float] = {n: estimate.time_s * e for n, e in estimate.error_log.items()}
    for own in error_s.values():
        for name, error in own.items():
            errors[name] = errors.get(name, 0.0) - error
    beside_s = estimate.time_s - sum(terms_s.values())
    if abs(beside_s) < _ROUNDING * estimate.time_s:
        beside_s = 0.0
    sources = _term_sources(estimate)
    told = Source.FITTED if is_fitted else Source.PRIOR
    sources[Term.NODES] = {told: 1.0}
    sources[Term.UNEXPLAINED] = {Source.MEASURED if is_measured else told: 1.0}
    return StepTerms(
        estimate=estimate,
        terms_s={**terms_s, Term.UNEXPLAINED: beside_s},
        error_s={**error_s, Term.UNEXPLAINED: errors},
        source_frac={term: sources.get(term, {}) for term in Term},
    )


def _term_sources(estimate: StepEstimate) -> dict[Term, dict[Source, float]]:
    """By term; a stage waits for passes, so the bubble rests on what they rest on."""
    parts: dict[Term, list[Contribution]] = {}
    for found in estimate.contributions:
        role = found.name.partition(":")[2]
        if role:
            term = term_of_role(GroupRole(role))
        else:
            term = term_of(OperatorKind(found.name), Phase(found.phase))
        parts.setdefault(term, []).append(found)
        if found.phase != Phase.STEP.value and term is not Term.DP:
            parts.setdefault(Term.BUBBLE, []).append(found)
    parts[Term.LAUNCHES] = parts.get(Term.HOST, [])
    return {term: _shares(found) for term, found in parts.items()}


def paired_sigma_log(one: StepEstimate, other: StepEstimate) -> float:
    """Standard deviation of the log ratio of two steps of one model; 0 for the same layout.

    An error that lengthens both alike cancels: errors of one name are subtracted before they are
    squared, and what the constants leave is shared as far as the layouts are alike.
    """
    if same_layout(one.config) == same_layout(other.config):
        return 0.0
    squares = sum(log**2 for log in error_ratio(one, other).values())
    ours, theirs = one.own_sigma_log, other.own_sigma_log
    alike = float(similarity([one.config], [other.config])[0, 0])
    return math.sqrt(squares + ours**2 + theirs**2 - 2 * alike * ours * theirs)


def error_ratio(one: StepEstimate, other: StepEstimate) -> dict[str, float]:
    """Change of the log ratio of two steps by what is not known."""
    names = {*one.error_log, *other.error_log}
    return {n: one.error_log.get(n, 0.0) - other.error_log.get(n, 0.0) for n in sorted(names)}


def step_estimate(
    config: RunConfig,
    found: GroupTimes,
    row: int,
    *,
    items_s: Mapping[Item, float],
    sources: Mapping[Item, Source],
    scale: float,
    error_log: Mapping[str, float],
    own_sigma_log: float,
) -> StepEstimate:
    """The estimate of one layout of a group; ``scale`` is what is known of this layout alone."""
    time_s = scale * float(found.total_s[row, 0])
    sigma = math.sqrt(sum(log**2 for log in error_log.values()) + own_sigma_log**2)
    critical = found.critical_stage(row)
    contributions = _contributions(config, critical, items_s, sources)
    return StepEstimate(
        config=config,
        time_s=time_s,
        low_s=time_s * math.exp(-Z_90 * sigma),
        high_s=time_s * math.exp(Z_90 * sigma),
        sigma_log=sigma,
        error_log=error_log,
        own_sigma_log=own_sigma_log,
        critical_stage=critical,
        parts_s={part: scale * value for part, value in found.parts_s(row).items()},
        contributions=contributions,
        source_frac=_shares(contributions),
    )


def _contributions(
    config: RunConfig, stage: int, items_s: Mapping[Item, float], sources: Mapping[Item, Source]
) -> tuple[Contribution, ...]:
    def of(item: Item, phase: str, count: int) -> Contribution:
        timed = item if item in items_s else _as_send(item)
        return Contribution(
            name=item_name(item),
            phase=phase,
            count=count,
            time_s=count * items_s[timed],
            source=sources[timed],
        )

    work = stage_operators(config, stage)
    num_microbatches = config.num_microbatches
    out: list[Contribution] = []
    for operator, count in (*work.forward, *work.backward, *work.recompute, *work.step):
        repeats = count * (1 if operator.phase is Phase.STEP else num_microbatches)
        out.append(of(operator, operator.phase.value, repeats))
    for use in collective_uses(config, stage=stage):
        repeats = use.count * (num_microbatches if use.placement.is_per_microbatch else 1)
        out.append(of(use.call, "", repeats))
    return tuple(out)


def _as_send(item: Item) -> Item:
    """The other end of a message, which is the one that is timed."""
    is_call = isinstance(item, CollectiveCall)
    return replace(item, collective=Collective.SEND) if is_call else item


def _shares(contributions: Sequence[Contribution]) -> dict[Source, float]:
    total = sum(c.time_s for c in contributions)
    sums = dict.fromkeys(Source, 0.0)
    for c in contributions:
        sums[c.source] += c.time_s
    return {source: time_s / total if total else 0.0 for source, time_s in sums.items()}
