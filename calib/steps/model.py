"""The step model: base times, constants of the machine, and their posterior given measured steps of
any layouts.

Every step time comes from ``FittedSteps``: the forecast of a run, a plan, the output of
``forerun predict``, and the tables of published steps that it is validated on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..layers.blocks import Block
from ..records.step_rows import StepPredictions
from ..regressors.robust import Z_90
from ..timeline.compiled import compile_blocks
from ..timeline.evaluation import simulate_each, simulate_long, step_times
from ..timeline.items import Floats
from ..timeline.simulation import spans
from ..timeline.terms import Term
from ..workload.config import RunConfig
from ..workload.layout_table import FIELDS, LayoutTable, groups
from ._layouts import Layouts, TermSlopes, doublings, idle_frac, layouts_of, releases_in
from ._posterior import MODEL_SIGMA_LOG, SLOPE_STEP, LayoutPosterior, posterior_of
from ._priced_items import SCALE, Constant, priced_items, weighted_sums
from ._scales import (
    BOOST,
    CONTENTION,
    EFFECT_SIGMA_LOG,
    FLOOR,
    GROWTH,
    RELEASE,
    effects_of,
)
from .base_times import BaseTimes
from .estimate import StepEstimate, StepTerms, step_estimate, step_terms
from .known_steps import SPANNED, KnownStep, same_but_for_batch, same_layout, unseen_across
from .launches import HOST_SCATTER_LOG
from .slices import layout_slices

ERROR_INFLATION = 1.8124611228 / Z_90
"""Factor on a deviation that puts 90 % of Student's distribution with 10 degrees of freedom within
``Z_90`` deviations."""

_PASSING = "level of the machine, from one hour to the next"
MISFIT = "misfit of the running layout"
OMISSION = "left out by the model"
UNSEEN_SIGMA_LOG = {name: 1.5 if name == "pp" else 0.7 for name in SPANNED}
"""Deviation of a kind of transfer between nodes that no known layout has. Messages between stages
take one path between two ranks: on one public cluster they ran at 1 GB/s of the 45 that its cards
promise, on another at twice the stated rate. Other groups use all cards, and lie within a factor of
2 (ranks per node and nodes omitted from public tables: 5 to 30 %, with sockets 2 to 3 times)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Median times of blocks, and of the host around them, at the machine's constants."""

    times_s: Floats
    """Forward and backward pass of one micro-batch, shape (2, blocks)."""
    hosts_s: Floats
    """Host time of a forward pass, of a backward pass and of a step."""
    scale_log: Callable[[LayoutTable], Floats]
    """Change of each log step time by its nodes, release, waits and similar measured layouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedSteps:
    """Step times of any layout on one machine."""

    base: BaseTimes
    known: tuple[KnownStep, ...] = ()
    posterior: LayoutPosterior | None = field(default=None, repr=False)
    passing_sigma_log: float = 0.0
    """Deviation of the level of all steps from one hour to the next; ratios are not affected."""
    misfit_log: float = 0.0
    """Log of measured over modelled step of the running layout, if that is outside the model's
    interval without the measurement; 0 inside. Layouts that were not measured may be off by as
    much."""
    omission_log: float = 0.0
    """Half width of the 90 % interval, in log, by which unmodelled settings may move a run's steps;
    0 if there are none, or if measured steps include them."""
    unrun_log: float = 0.0
    """The corresponding half width for unmeasured layouts if the measured ones include those
    settings."""

    def estimate(self, config: RunConfig) -> StepEstimate:
        """Return the step of one layout, with spans and slices for a trace."""
        layouts, theta = self._layouts([config])
        (estimate,) = self._estimates(layouts, theta)
        (group_times,) = layouts.timed(theta[:, np.newaxis], simulate_each)
        items_s, sources = layouts.items_s(theta), layouts.priced.sources
        return estimate.drawn(
            (*spans(group_times.costs, group_times.group.pipeline), *group_times.edge_spans(0)),
            layout_slices(layouts.compiled, group_times, 0, items_s, sources),
        )

    def estimates(self, configs: Sequence[RunConfig]) -> list[StepEstimate]:
        """Return the steps of many layouts, in their order."""
        if not configs:
            return []
        table, estimates = LayoutTable.of(configs), dict[int, StepEstimate]()
        # Layouts share operators, and an attention or product has a single time among them.
        for places in groups(table.coded(_kernels, FIELDS).codes):
            layouts, theta = self._layouts(table.take(places))
            estimates.update(zip(places.tolist(), self._estimates(layouts, theta), strict=True))
        return [estimates[place] for place in range(len(configs))]

    def predict(self, configs: Sequence[RunConfig]) -> StepPredictions:
        """Return medians and 90 % intervals."""
        estimates = self.estimates(configs)
        return StepPredictions(
            time_s=np.array([one.time_s for one in estimates]),
            low_s=np.array([one.low_s for one in estimates]),
            high_s=np.array([one.high_s for one in estimates]),
        )

    def median_times(self, configs: Sequence[RunConfig] | LayoutTable) -> Floats:
        """Return the median step time of each layout, shape (layouts,), fast enough to rank
        hundreds of thousands."""
        if not len(configs):
            return np.empty(0)
        layouts, means = self._layouts(configs)
        theta = means[:, np.newaxis]
        times_s = step_times(layouts.compiled, layouts.timed(theta, simulate_long))
        grown_s = (times_s * np.exp(layouts.growth_log(theta)))[:, 0]
        return grown_s * np.exp(self._discrepancy(layouts.compiled.table)[0])

    def passes(self, pairs: Sequence[tuple[Block, RunConfig]]) -> Passes:
        """Return the passes of blocks, or of parts of some, each with a layout that it belongs
        to."""
        compiled = compile_blocks(pairs)
        priced = priced_items(compiled, self.base)
        theta = self._means(priced.constants)[:, np.newaxis]
        times_s = priced.time_s(theta)
        blocks = compiled.sums.times(
            times_s,
            contention=1.0 + priced.named(theta, CONTENTION),
            is_host_only=compiled.is_host_only,
        )
        hosts_s = times_s[list(compiled.hosts), 0] * (not pairs[0][1].is_step_replayed)

        def scale_log(table: LayoutTable) -> Floats:
            growth = float(priced.named(theta, GROWTH)[0]) * doublings(table)
            releases, has_release = releases_in(table)
            growth += weighted_sums(has_release, self._means(releases))[:, np.newaxis]
            growth -= float(priced.named(theta, BOOST)[0]) * idle_frac(table)
            return growth[:, 0] + self._discrepancy(table)[0]

        return Passes(
            times_s=np.stack([blocks.forward_pass_s[:, 0], blocks.backward_pass_s[:, 0]]),
            hosts_s=hosts_s,
            scale_log=scale_log,
        )

    def least_effect_log(self, config: RunConfig) -> float:
        """Return the least change of log work by the effects on a layout's layers."""
        return min(0.0, float(self._means(effects_of(config)).sum()))

    def measured_s(self, config: RunConfig) -> float | None:
        """Return the measured step of a layout; None if there is none."""
        wanted = same_layout(config)
        here = [one for one in self.known if not one.site]
        times_s = [one.time_s for one in here if same_layout(one.config) == wanted]
        return float(np.median(times_s)) if times_s else None

    def by_term(self, configs: Sequence[RunConfig]) -> list[StepTerms]:
        """Return the steps of many layouts by terms, in their order."""
        if not configs:
            return []
        layouts, theta = self._layouts(configs)
        estimates = self._estimates(layouts, theta)
        of_all = layouts.term_slopes(theta, SLOPE_STEP, global_steps=self._moves(layouts))
        return [
            self._by_term(layouts, estimate, term_slopes)
            for estimate, term_slopes in zip(estimates, of_all, strict=True)
        ]

    def _by_term(
        self, layouts: Layouts, estimate: StepEstimate, term_slopes: TermSlopes
    ) -> StepTerms:
        pull = np.zeros(
            (len(term_slopes.terms), len(self.posterior.constants) if self.posterior else 0)
        )
        errors = self._slope_errors(layouts, term_slopes.slopes_s, pull)
        error_s: dict[Term, dict[str, float]] = {
            term: errors.of(place, self._inflation) for place, term in enumerate(term_slopes.terms)
        }
        for name in SPANNED:
            unseen_log = estimate.error_log.get(_unseen(name), 0.0)
            slopes_s = term_slopes.slopes_s[:, layouts.constants.index((SCALE, name))]
            if unseen_log and slopes_s.sum() > 0:
                shares = estimate.time_s * unseen_log * slopes_s / slopes_s.sum()
                for term, error in zip(term_slopes.terms, shares.tolist(), strict=True):
                    error_s[term][_unseen(name)] = error
        terms_s = dict(zip(term_slopes.terms, term_slopes.time_s.tolist(), strict=True))
        return step_terms(
            estimate,
            terms_s,
            error_s,
            is_measured=self.posterior is not None and bool(self.posterior.places(estimate.config)),
            is_fitted=self.posterior is not None,
        )

    def _estimates(self, layouts: Layouts, theta: Floats) -> list[StepEstimate]:
        groups, slopes = layouts.slopes(theta, SLOPE_STEP, global_steps=self._moves(layouts))
        discrepancy_log, discrepancy_sigma, pull = self._discrepancy(layouts.compiled.table)
        errors, wider = self._errors(layouts, slopes, pull), self._inflation
        items_s = dict(zip(layouts.compiled.items, layouts.items_s(theta).tolist(), strict=True))
        sources = dict(zip(layouts.compiled.items, layouts.priced.sources, strict=True))
        growth = layouts.growth_log(theta[:, np.newaxis])[:, 0]
        of_host = self._host_scatter(layouts, slopes)
        configs = list(layouts.compiled.table.configs())
        out: dict[int, StepEstimate] = {}
        for group in groups:
            for row, place in enumerate(group.group.members.tolist()):
                out[place] = step_estimate(
                    configs[place],
                    group,
                    row,
                    items_s=items_s,
                    sources=sources,
                    scale=float(np.exp(discrepancy_log[place] + growth[place])),
                    error_log=errors.of(place, wider),
                    unshared_sigma_log=wider * math.hypot(discrepancy_sigma[place], of_host[place]),
                    slow_host=1 + layouts.constants.index((SCALE, FLOOR)),
                )
        return [out[place] for place in range(len(out))]

    def _moves(self, layouts: Layouts) -> Floats:
        """Return the changes of constants for finite differences, shape (constants,).

        A step depends on the launch floor only from where the host is slower than the device: its
        derivative is the secant up to the end of the floor's 90 % interval.
        """
        moves = np.full(len(layouts.constants), SLOPE_STEP)
        floor = (SCALE, FLOOR)
        place = layouts.constants.index(floor)
        sigma_log = float(layouts.sigma_log[place])
        if self.posterior is not None and floor in self.posterior.constants:
            sigma_log = self.posterior.sigma_of(floor)
        moves[place] = max(SLOPE_STEP, Z_90 * sigma_log)
        return moves

    def _host_scatter(self, layouts: Layouts, slopes: Floats) -> Floats:
        """Return the deviation of each unmeasured log step, by its share of host waits, shape
        (layouts,); less if the known steps lie closer to the model than usual."""
        waits_frac = np.maximum(slopes[:, layouts.constants.index((SCALE, FLOOR))], 0.0)
        is_blind = [
            self.posterior is None or not self.posterior.places(config)
            for config in layouts.compiled.table.configs()
        ]
        closer = 1.0
        if self.posterior is not None:
            closer = min(1.0, self.posterior.sigma_log / MODEL_SIGMA_LOG)
        return HOST_SCATTER_LOG * closer * waits_frac * is_blind

    @property
    def _inflation(self) -> float:
        return ERROR_INFLATION * (self.posterior.spread_factor if self.posterior else 1.0)

    def _layouts(self, configs: Sequence[RunConfig] | LayoutTable) -> tuple[Layouts, Floats]:
        """Return the layouts and the means of their constants: the priors' if nothing is known."""
        layouts = layouts_of(configs, self.base)
        return layouts, self._means(layouts.constants)

    def _means(self, constants: Sequence[Constant]) -> Floats:
        if self.posterior is None:
            return np.zeros(len(constants))
        known = dict(zip(self.posterior.constants, self.posterior.theta.tolist(), strict=True))
        return np.array([known.get(name, 0.0) for name in constants])

    def _discrepancy(self, table: LayoutTable) -> tuple[Floats, Floats, Floats]:
        if self.posterior is None:
            return np.zeros(len(table)), np.full(len(table), MODEL_SIGMA_LOG), np.empty(0)
        return self.posterior.discrepancy_of(table)

    def _errors(self, layouts: Layouts, slopes: Floats, pull: Floats) -> _Errors:
        """Return independent errors of log step times, one deviation each."""
        along = self._slope_errors(layouts, slopes, pull)
        configs = layouts.compiled.table.configs()
        is_open = bool(self.misfit_log or self.unrun_log)
        is_unrun = np.array([is_open and not self._has_run(one) for one in configs], float)
        omission = np.maximum(self.omission_log, self.unrun_log * is_unrun) / Z_90
        errors = _Errors(
            names=(*along.names, OMISSION), logs=np.column_stack([along.logs, omission])
        )
        if self.posterior is None:
            return errors
        passing = np.full(len(errors.logs), self.passing_sigma_log)
        misfit = self.misfit_log * is_unrun
        return _Errors(
            names=(*errors.names, *(_unseen(name) for name in SPANNED), _PASSING, MISFIT),
            logs=np.column_stack([errors.logs, self._unseen(layouts, slopes), passing, misfit]),
        )

    def _has_run(self, config: RunConfig) -> bool:
        """Return True if a step of this layout was measured here, at any global batch: a ramp has
        several."""
        return any(same_but_for_batch(one.config, config) for one in self.known if not one.site)

    def _slope_errors(self, layouts: Layouts, slopes: Floats, pull: Floats) -> _Errors:
        """Return the errors of values with these derivatives by the constants, shape (rows,
        constants).

        Constants that steps inform contribute the columns of their covariance's root, all others
        their prior deviations. Errors of one name are thus the same error in every estimate of this
        model.
        """
        names, logs = [], []
        known = self.posterior.constants if self.posterior is not None else ()
        places = {name: place for place, name in enumerate(layouts.constants)}
        if self.posterior is not None:
            known_places = [(row, places[name]) for row, name in enumerate(known) if name in places]
            rows, columns = (list(pair) for pair in zip(*known_places, strict=True))
            moved = -pull
            moved[:, rows] += slopes[:, columns]
            logs.append(moved @ self.posterior.root)
            names += [_label(name) for name in known]
        learned = set(known)
        if self.posterior is None:
            # The priors are those of some release, whichever it is.
            learned |= {one for one in layouts.releases if one[0] == RELEASE}
        fresh = [place for name, place in places.items() if name not in learned]
        narrowed = [self._narrowing(layouts.constants[place]) for place in fresh]
        logs.append(slopes[:, fresh] * layouts.sigma_log[fresh] / narrowed)
        names += [_label(layouts.constants[place]) for place in fresh]
        return _Errors(names=tuple(names), logs=np.hstack(logs))

    def _narrowing(self, constant: Constant) -> float:
        """Return the factor by which a close fit of the known steps would narrow the prior of an
        effect on layers of a width that none of them has; 1 for all other constants.

        The prior is divided by it, since that fit says nothing of another width.
        """
        if self.posterior is None or constant[0] not in EFFECT_SIGMA_LOG:
            return 1.0
        is_width_known = ("width", *constant[1:3], 0, 0) in self.posterior.constants
        return 1.0 if is_width_known else min(1.0, self.posterior.spread_factor)

    def _unseen(self, layouts: Layouts, slopes: Floats) -> Floats:
        """Return the log change of each step if transfers between nodes that no known layout has
        take ``UNSEEN_SIGMA_LOG`` more, shape (layouts, kinds); hidden transfers may become
        exposed."""
        known = [one.config for one in self.known]
        places = [layouts.constants.index((SCALE, name)) for name in SPANNED]
        share = np.maximum(slopes[:, places], 0.0)
        wider = np.log1p(share * np.expm1([UNSEEN_SIGMA_LOG[name] for name in SPANNED]))
        return wider * unseen_across(list(layouts.compiled.table.configs()), known)


def fit_steps(
    base: BaseTimes,
    known: Sequence[KnownStep] = (),
    *,
    passing_sigma_log: float | None = None,
) -> FittedSteps:
    """Fit the constants of largest posterior; without known steps the priors.

    The same steps in any order give the same model. With ``passing_sigma_log`` the steps of all
    layouts share one unknown factor, which does not affect their ratios; it is the deviation of
    that factor's log from one hour to the next.
    """
    if not known:
        return FittedSteps(base=base)
    ordered = tuple(
        sorted(known, key=lambda one: (one.time_s, one.sigma_log, one.site, repr(one.config)))
    )
    layouts = layouts_of([one.config for one in ordered], base)
    posterior = posterior_of(layouts, ordered, is_level_free=passing_sigma_log is not None)
    return FittedSteps(
        base=base, known=ordered, posterior=posterior, passing_sigma_log=passing_sigma_log or 0.0
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Errors:
    names: tuple[str, ...]
    logs: Floats
    """Shape (rows, names)."""

    def of(self, place: int, factor: float) -> dict[str, float]:
        """Return the nonzero errors of one row, times a factor."""
        pairs = zip(self.names, self.logs[place].tolist(), strict=True)
        return {name: factor * log for name, log in pairs if log}


def _kernels(config: RunConfig) -> tuple[object, ...]:
    """Return the settings that the kernels of operators depend on besides their shapes."""
    is_fused, is_wide = config.is_attention_fused, config.is_without_tensor_cores
    return is_fused, *config.model.limits, is_wide, config.fp8


def _unseen(name: str) -> str:
    return f"{name} across nodes, never sampled"


def _label(constant: Constant) -> str:
    return " ".join(map(str, constant))
