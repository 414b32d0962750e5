"""The step model: base times, constants of the machine, and what steps of any layouts say of them.

Everything that says how long a step takes asks ``FittedSteps``: the forecast of a run, a plan, the
answer to ``forerun predict``, and the tables of published steps that it is validated on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import t as student

from ..fit.intervals import Z_90
from ..fit.robust import robust_minimum
from ..samples.step_rows import StepPredictions
from ..timeline.evaluate import step_times
from ..timeline.items import Floats
from ..timeline.simulate import spans
from ..timeline.steady import simulate_each, simulate_long
from ..workload.config import RunConfig
from .base_times import BaseTimes
from .estimate import StepEstimate, step_estimate
from .known import MEASURED_SIGMA_LOG, KnownStep, Remainder, remainders, same_layout
from .layouts import Constant, Layouts, layouts_of

MODEL_SIGMA_LOG = 0.02
"""Error on a layout that no constant explains."""
SITE_SIGMA_LOG = 0.08
"""How far apart the levels of two clusters, releases or days of one kind of machine lie."""
_WEIGHT = 5.0
"""Residuals that the prior of a deviation counts for."""
_MAX_ROUNDS, _GROWTH = 3, 1.2
_WIDEST = 2.0
_FREEDOM = 10.0
_STEP = 1e-4
ERROR_INFLATION = float(student.ppf(0.95, _FREEDOM)) / Z_90
"""Of a deviation, for 90 % of Student's distribution to lie within ``Z_90`` of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """What measured steps say of the constants."""

    constants: tuple[Constant, ...]
    theta: Floats
    """Logs, from the centres of their priors."""
    root: Floats
    """Lower triangular root of their covariance."""
    sigma_log: float
    """Noise of a step time, and what of it the constants cannot follow."""
    spread_factor: float
    """How much wider errors of left-out layouts are than the posterior says."""
    remainders: Mapping[RunConfig, Remainder]

    @property
    def unexplained(self) -> float:
        """Deviation of a layout from what the constants say of it."""
        return float(np.hypot(self.sigma_log, MODEL_SIGMA_LOG))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedSteps:
    """The steps of any layout on one machine."""

    base: BaseTimes
    known: tuple[KnownStep, ...] = ()
    posterior: Posterior | None = field(default=None, repr=False)

    def estimate(self, config: RunConfig) -> StepEstimate:
        """The step of one layout, with spans for a trace."""
        layouts, theta = self._layouts([config])
        (estimate,) = self._estimates(layouts, theta)
        (found,) = layouts.timed(theta[:, np.newaxis], simulate_each)
        drawn = spans(found.costs, found.group.pipeline, column=0)
        return estimate.drawn((*drawn, *found.edge_spans(0)))

    def estimates(self, configs: Sequence[RunConfig]) -> list[StepEstimate]:
        """The steps of many layouts, in their order."""
        if not configs:
            return []
        layouts, theta = self._layouts(configs)
        return self._estimates(layouts, theta)

    def predict(self, configs: Sequence[RunConfig]) -> StepPredictions:
        """Medians and 90 % intervals."""
        found = self.estimates(configs)
        return StepPredictions(
            time_s=np.array([one.time_s for one in found]),
            low_s=np.array([one.low_s for one in found]),
            high_s=np.array([one.high_s for one in found]),
        )

    def median_times(self, configs: Sequence[RunConfig]) -> Floats:
        """Median step time of each layout, shape (layouts,): what a ranking of thousands needs."""
        if not configs:
            return np.empty(0)
        layouts, theta = self._layouts(configs)
        found = layouts.timed(theta[:, np.newaxis], simulate_long)
        growth = layouts.growth_log(theta[:, np.newaxis])
        times_s = (step_times(layouts.compiled, found) * np.exp(growth))[:, 0]
        measured = {one.config.parallelism for one in self.known}
        for place, config in enumerate(configs):
            if config.parallelism in measured:  # few are, and looking each up costs more
                times_s[place] *= np.exp(self._remainder(config)[0])
        return times_s

    def measured_s(self, config: RunConfig) -> float | None:
        """The measured step of a layout; None where there is none."""
        wanted = same_layout(config)
        here = [one for one in self.known if not one.site]
        found = [one.time_s for one in here if same_layout(one.config) == wanted]
        return float(np.median(found)) if found else None

    def _estimates(self, layouts: Layouts, theta: Floats) -> list[StepEstimate]:
        found, slopes = layouts.slopes(theta, _STEP)
        errors = self._errors(layouts, slopes)
        items_s = dict(zip(layouts.compiled.items, layouts.items_s(theta).tolist(), strict=True))
        sources = dict(zip(layouts.compiled.items, layouts.sources, strict=True))
        growth = layouts.growth_log(theta[:, np.newaxis])[:, 0]
        out: dict[int, StepEstimate] = {}
        for group in found:
            for row, place in enumerate(group.group.members.tolist()):
                config = layouts.compiled.configs[place]
                log, sigma, is_measured = self._remainder(config)
                out[place] = step_estimate(
                    config,
                    group,
                    row,
                    items_s=items_s,
                    sources=sources,
                    scale=float(np.exp(log + growth[place])),
                    error_log={}
                    if is_measured
                    else {
                        name: self._inflation * error
                        for name, error in zip(errors.names, errors.logs[place], strict=True)
                        if error
                    },
                    own_sigma_log=sigma if is_measured else self._inflation * sigma,
                )
        return [out[place] for place in range(len(out))]

    @property
    def _inflation(self) -> float:
        return ERROR_INFLATION * (self.posterior.spread_factor if self.posterior else 1.0)

    def _layouts(self, configs: Sequence[RunConfig]) -> tuple[Layouts, Floats]:
        """The layouts with the constants' means: those of the priors where nothing is known."""
        layouts = layouts_of(configs, self.base)
        theta = np.zeros(len(layouts.constants))
        if self.posterior is not None:
            known = dict(zip(self.posterior.constants, self.posterior.theta.tolist(), strict=True))
            theta = np.array([known.get(name, 0.0) for name in layouts.constants])
        return layouts, theta

    def _errors(self, layouts: Layouts, slopes: Floats) -> _Errors:
        """Independent errors of log step times, one deviation each.

        Of constants that steps have told something of, the columns of their covariance's root; of
        all others the deviations of their priors.  So errors of one name are the same error in
        every answer of this model.
        """
        names, logs = [], []
        known = self.posterior.constants if self.posterior is not None else ()
        places = {name: place for place, name in enumerate(layouts.constants)}
        if self.posterior is not None:
            held = [(row, places[name]) for row, name in enumerate(known) if name in places]
            rows, columns = (list(pair) for pair in zip(*held, strict=True))
            logs.append(slopes[:, columns] @ self.posterior.root[rows])
            names += [_label(name) for name in known]
        told = set(known)
        fresh = [place for name, place in places.items() if name not in told]
        logs.append(slopes[:, fresh] * layouts.sigma_log[fresh])
        names += [_label(layouts.constants[place]) for place in fresh]
        return _Errors(names=tuple(names), logs=np.hstack(logs))

    def _remainder(self, config: RunConfig) -> tuple[float, float, bool]:
        """What is known of one layout beyond the constants: log, its deviation, and whether its
        step was measured here: then it is that step."""
        if self.posterior is None:
            return 0.0, MODEL_SIGMA_LOG, False
        found = self.posterior.remainders.get(same_layout(config))
        if found is None:
            return 0.0, self.posterior.unexplained, False
        return found.residual_log, found.sigma_log, True


def fit_steps(base: BaseTimes, known: Sequence[KnownStep] = ()) -> FittedSteps:
    """Constants at the greatest posterior; without known steps the priors.

    The same steps in any order give the same model.
    """
    if not known:
        return FittedSteps(base=base)
    ordered = tuple(
        sorted(known, key=lambda one: (one.time_s, one.sigma_log, one.site, repr(one.config)))
    )
    evidence = _Evidence.of(layouts_of([one.config for one in ordered], base), ordered)
    own = np.array([one.sigma_log for one in ordered])
    found = _mode(evidence, np.zeros(len(evidence.constants)), own)
    sigma = MEASURED_SIGMA_LOG
    for _ in range(_MAX_ROUNDS):
        wider = _noise(found)
        if wider < _GROWTH * sigma:
            break
        sigma = wider
        found = _mode(evidence, found.theta, np.maximum(own, sigma))
    posterior = Posterior(
        constants=evidence.constants,
        theta=found.theta,
        root=np.linalg.cholesky(found.covariance).astype(np.float64),
        sigma_log=sigma,
        spread_factor=_spread_factor(found.residuals / found.sigma_log, found.leverage),
        remainders=remainders(ordered, found.residuals.tolist()),
    )
    return FittedSteps(base=base, known=ordered, posterior=posterior)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Errors:
    names: tuple[str, ...]
    logs: Floats
    """Shape (layouts, names)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mode:
    """The greatest posterior and its neighbourhood."""

    theta: Floats
    residuals: Floats
    """Measured minus found log times, shape (rows,)."""
    sigma_log: Floats
    """Assumed noise of each row."""
    covariance: Floats
    leverage: Floats
    """How far each row draws its own prediction, 0 to 1, shape (rows,)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Evidence:
    """Measured steps as a function of the constants and of the level of each site."""

    layouts: Layouts
    measured_log: Floats
    sites: tuple[str, ...]
    is_at: Floats
    """Which site each step was measured at, shape (rows, sites)."""

    @staticmethod
    def of(layouts: Layouts, known: Sequence[KnownStep]) -> _Evidence:
        sites = tuple(sorted({one.site for one in known if one.site}))
        is_at = np.array([[float(one.site == site) for site in sites] for one in known])
        return _Evidence(
            layouts=layouts,
            measured_log=np.log([one.time_s for one in known]),
            sites=sites,
            is_at=is_at.reshape(len(known), len(sites)),
        )

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (*self.layouts.constants, *(("site", site) for site in self.sites))

    @property
    def sigma_log(self) -> Floats:
        sites = np.full(len(self.sites), SITE_SIGMA_LOG)
        return np.concatenate([self.layouts.sigma_log, sites])

    def log_time(self, theta: Floats) -> Floats:
        number = len(self.layouts.constants)
        found = self.layouts.log_time(theta[:number, np.newaxis])[:, 0]
        return found + self.is_at @ theta[number:]

    def slopes(self, theta: Floats) -> Floats:
        number = len(self.layouts.constants)
        return np.hstack([self.layouts.slopes(theta[:number], _STEP)[1], self.is_at])


def _mode(evidence: _Evidence, start: Floats, sigma: Floats) -> _Mode:
    spread, measured = evidence.sigma_log, evidence.measured_log

    def residuals(theta: Floats) -> Floats:
        return np.concatenate([(evidence.log_time(theta) - measured) / sigma, theta / spread])

    def jacobian(theta: Floats) -> Floats:
        return np.vstack([evidence.slopes(theta) / sigma[:, np.newaxis], np.diag(1 / spread)])

    theta = robust_minimum(
        residuals, jacobian, start, spread=spread, loss="linear", tolerance=1e-5, most_steps=20
    )
    scaled = evidence.slopes(theta) / sigma[:, np.newaxis]
    covariance = np.linalg.inv(scaled.T @ scaled + np.diag(spread**-2))
    return _Mode(
        theta=theta,
        residuals=measured - evidence.log_time(theta),
        sigma_log=sigma,
        covariance=0.5 * (covariance + covariance.T),
        leverage=np.einsum("ri,ij,rj->r", scaled, covariance, scaled),
    )


def _noise(found: _Mode) -> float:
    """Deviation of the residuals over the degrees of freedom that the constants leave.

    MacKay 1992, "Bayesian interpolation", section 4; never below what is known of measurements.
    """
    freedom = _WEIGHT + len(found.residuals) - float(np.sum(found.leverage))
    total = _WEIGHT * MEASURED_SIGMA_LOG**2 + float(np.sum(found.residuals**2))
    return max(MEASURED_SIGMA_LOG, float(np.sqrt(total / freedom)))


def _spread_factor(residuals: Floats, leverage: Floats) -> float:
    """Deviation of standardised leave-one-out residuals, drawn to 1 as by so many residuals.

    Without row i its error has the variance sigma^2 / (1 - h_i), and the residual is
    r_i / (1 - h_i).
    """
    squares = residuals**2 / np.maximum(1 - leverage, 0.01)
    return min(_WIDEST, float(np.sqrt((_WEIGHT + np.sum(squares)) / (_WEIGHT + len(squares)))))


def _label(constant: Constant) -> str:
    return " ".join(map(str, constant))
