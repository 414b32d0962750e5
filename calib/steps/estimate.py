"""The step of a layout: its time with an interval, its breakdown, and the provenance of each
part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..fit.estimates import Source
from ..layers.stage_work import collective_uses, stage_operators
from ..plain_json import JsonObject
from ..regressors.estimate import Estimate
from ..timeline.evaluation import GroupTimes
from ..timeline.items import Item, Part
from ..timeline.simulation import Span
from ..timeline.terms import Term, term_of, term_of_role
from ..workload.collectives import Collective, CollectiveCall
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encoded
from ..workload.operators import Phase
from .known_steps import same_layout, similarity
from .slices import ItemTime, Place, Slice

_ROUNDING = 1e-12
"""Relative tolerance for sums in a different order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate(Estimate, Encoded):
    """Step time of a layout, and the breakdown of its critical stage."""

    config: RunConfig
    critical_stage: int
    parts_s: Mapping[Part, float]
    """Seconds of the critical stage; they add up to ``time_s``."""
    contributions: tuple[ItemTime, ...]
    """Work of the critical stage, before overlap."""
    source_frac: Mapping[Source, float]
    """Share of the critical stage's work by provenance."""
    host_wait_frac: float = 0.0
    """Share of the critical stage's step in which the device waits for the host's launches."""
    host_wait_high_frac: float = 0.0
    """The same with a host at the slow end of what is known of it."""
    spans: tuple[Span, ...] = ()
    """Spans for a trace, if a single layout was requested; the last ends after ``time_s``."""
    slices: Mapping[Place, tuple[Slice, ...]] = field(default_factory=dict, repr=False)
    """Slices of the spans, by place; empty if there are no spans."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            time_s=self.time_s,
            low_s=self.low_s,
            high_s=self.high_s,
            critical_stage=self.critical_stage,
            parts_s=self.parts_s,
            source_frac=self.source_frac,
        )

    @property
    def time_s(self) -> float:
        """Median step time."""
        return self.median

    @property
    def low_s(self) -> float:
        """Lower end of the 90 % interval of the step time."""
        return self.low

    @property
    def high_s(self) -> float:
        """Upper end of the 90 % interval of the step time."""
        return self.high

    def over(self, other: StepEstimate) -> Estimate:
        """Return the step over another of the same model; the ratio is certain if both are of one
        layout.

        The residuals from the constants are correlated by the similarity of the layouts.
        """
        if same_layout(self.config) == same_layout(other.config):
            return Estimate(median=self.median / other.median)
        return self.ratio_to(other, alike=float(similarity([self.config], [other.config])[0, 0]))

    def drawn(self, spans: Iterable[Span], slices: Mapping[Place, Iterable[Slice]]) -> StepEstimate:
        """Return the estimate with spans and their slices, scaled to its step time."""
        drawn_spans = tuple(spans)
        factor = self.time_s / max(span.end_s for span in drawn_spans)
        return replace(
            self,
            spans=tuple(span.scaled(factor) for span in drawn_spans),
            slices={
                at: tuple(one.scaled(factor) for one in place_slices)
                for at, place_slices in slices.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """The step of a layout as a sum of terms, consistent with its ``StepEstimate``."""

    estimate: StepEstimate
    terms_s: Mapping[Term, float]
    """Seconds of the critical stage; they add up to the step."""
    error_s: Mapping[Term, Mapping[str, float]]
    """Change of each term when one unknown is off by one deviation, by the names of the estimate's
    ``error_log``; over all terms they add up to its change of the step. The layout's own
    ``unshared_sigma_log`` belongs to ``UNEXPLAINED`` and is not among them."""
    source_frac: Mapping[Term, Mapping[Source, float]]
    """Shares of each term by provenance."""


def step_terms(
    estimate: StepEstimate,
    terms_s: Mapping[Term, float],
    error_s: Mapping[Term, Mapping[str, float]],
    *,
    is_measured: bool,
    is_fitted: bool,
) -> StepTerms:
    """Complete the terms with ``UNEXPLAINED``: the step time minus their sum, which may be
    negative.

    ``is_measured``: this step was measured; ``is_fitted``: the model was fitted to at least one
    step.
    """
    errors: dict[str, float] = {n: estimate.time_s * e for n, e in estimate.error_log.items()}
    for term_error_s in error_s.values():
        for name, error in term_error_s.items():
            errors[name] = errors.get(name, 0.0) - error
    unexplained_s = estimate.time_s - sum(terms_s.values())
    if abs(unexplained_s) < _ROUNDING * estimate.time_s:
        unexplained_s = 0.0
    sources = _term_sources(estimate)
    model_source = Source.FITTED if is_fitted else Source.PRIOR
    sources[Term.NODES] = {model_source: 1.0}
    sources[Term.UNEXPLAINED] = {Source.MEASURED if is_measured else model_source: 1.0}
    return StepTerms(
        estimate=estimate,
        terms_s={**terms_s, Term.UNEXPLAINED: unexplained_s},
        error_s={**error_s, Term.UNEXPLAINED: errors},
        source_frac={term: sources.get(term, {}) for term in Term},
    )


def _term_sources(estimate: StepEstimate) -> dict[Term, dict[Source, float]]:
    """Return shares by term; a stage waits for passes, so the bubble has their provenance."""
    parts: dict[Term, list[ItemTime]] = {}
    for work in estimate.contributions:
        item = work.item
        is_call = isinstance(item, CollectiveCall)
        term = term_of_role(item.role) if is_call else term_of(item.kind, item.phase)
        parts.setdefault(term, []).append(work)
        if work.phase != Phase.STEP.value and term is not Term.DP:
            parts.setdefault(Term.BUBBLE, []).append(work)
    parts[Term.LAUNCHES] = parts.get(Term.HOST, [])
    return {term: _shares(work) for term, work in parts.items()}


def step_estimate(
    config: RunConfig,
    group_times: GroupTimes,
    row: int,
    *,
    items_s: Mapping[Item, float],
    sources: Mapping[Item, Source],
    scale: float,
    error_log: Mapping[str, float],
    unshared_sigma_log: float,
    slow_host: int,
) -> StepEstimate:
    """Build the estimate of one layout of a group; ``scale`` is the factor specific to this layout,
    and the group's alternative ``slow_host`` has a host at the slow end of its interval."""
    critical = group_times.critical_stage(row)
    contributions = _contributions(config, critical, items_s, sources)
    assert group_times.blocks.waits_s is not None  # layouts of a step model have launches
    waits_frac = group_times.of_blocks(row, group_times.blocks.waits_s) / group_times.total_s[row]
    return StepEstimate(
        config=config,
        median=scale * float(group_times.total_s[row, 0]),
        error_log=error_log,
        unshared_sigma_log=unshared_sigma_log,
        critical_stage=critical,
        parts_s={part: scale * value for part, value in group_times.parts_s(row).items()},
        contributions=contributions,
        source_frac=_shares(contributions),
        host_wait_frac=float(waits_frac[0]),
        host_wait_high_frac=float(waits_frac[slow_host]),
    )


def _contributions(
    config: RunConfig, stage: int, items_s: Mapping[Item, float], sources: Mapping[Item, Source]
) -> tuple[ItemTime, ...]:
    def of(item: Item, count: int) -> ItemTime:
        timed = item if item in items_s else _as_send(item)
        return ItemTime(
            item=item, source=sources[timed], calls=count, time_s=count * items_s[timed]
        )

    work = stage_operators(config, stage)
    num_microbatches = config.num_microbatches
    out: list[ItemTime] = []
    for operator, count in (*work.forward, *work.backward, *work.recompute, *work.step):
        repeats = count * (1 if operator.phase is Phase.STEP else num_microbatches)
        out.append(of(operator, repeats))
    for use in collective_uses(config, stage=stage):
        repeats = use.count * (num_microbatches if use.placement.is_per_microbatch else 1)
        out.append(of(use.call, repeats))
    return tuple(out)


def _as_send(item: Item) -> Item:
    """Return the sending end of a message, which is the one that is timed."""
    is_call = isinstance(item, CollectiveCall)
    return replace(item, collective=Collective.SEND) if is_call else item


def _shares(contributions: Sequence[ItemTime]) -> dict[Source, float]:
    total = sum(c.time_s for c in contributions)
    sums = dict.fromkeys(Source, 0.0)
    for c in contributions:
        sums[c.source] += c.time_s
    return {source: time_s / total if total else 0.0 for source, time_s in sums.items()}
