"""Runs with a planted better layout, replayed: whether advice to restart is right.

A replay is a run whose steps are a stretch of a series, and layouts whose true ratio to the running
one is planted: the best saves what the case says, the others save less.  What the plan knows of a
ratio is the truth times exp(error); the error has the stated deviation, four fifths of its
variance stay from window to window.  ``decide`` is asked at two windows.  A stop is wrong where it
takes longer, cost included, than going on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tiny_shape import SMALL

from forerun.calib.advice.decision import Action, Decision, decide
from forerun.calib.advice.planning import Candidate, Plan
from forerun.calib.fit.estimates import Source
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.forecast.forecasts import DRIFT_FRAC, forecast
from forerun.calib.memory.peak import Verdict, memory
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.workload.config import Batch, Parallelism, RunConfig
from forerun.calib.workload.run_options import Goals

NEXT_FRAC = 0.05
"""Mean distance of a layout from the best one."""
LASTING = 0.8
"""Share of the variance of an error that stays from window to window."""
NUM_STEPS = 2000
WINDOWS = (20, 520)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planted truth and what the plan knows of it."""

    saving_frac: float
    cost_frac: float
    noise_log: float
    num_layouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay.  Shares are of the time that remains at the second window."""

    case: Case
    is_stop: bool
    is_wrong: bool
    """True for a stop that loses."""
    is_missed: bool
    """True if the run went on although the best layout would have gained."""
    regret_frac: float
    simple_is_wrong: bool
    simple_regret_frac: float
    """Regret of a rule that stops whenever the plan's best layout seems to save more than it
    costs."""


def replay(
    case: Case, series: Sequence[Floats], random: np.random.Generator, layout: Candidate
) -> Outcome:
    """Replay one run with two windows."""
    times = _stretch(series, random)
    remaining_s = float(times[WINDOWS[1] :].sum())
    cost_s = case.cost_frac * remaining_s
    true_log = np.full(case.num_layouts, np.log1p(-case.saving_frac))
    true_log[1:] += random.exponential(NEXT_FRAC, case.num_layouts - 1)
    lasting = np.sqrt(LASTING) * random.standard_normal(case.num_layouts)
    decision, plan = None, None
    for done in WINDOWS:
        passing = np.sqrt(1 - LASTING) * random.standard_normal(case.num_layouts)
        known_log = true_log + case.noise_log * (lasting + passing)
        plan = _plan(layout, known_log, case.noise_log)
        decision = decide(
            Goals(restart_cost_s=cost_s),
            forecast=_forecast(times, done),
            plan=plan,
            coverage_frac=1.0,
            previously_met=decision.rules_met if decision else frozenset(),
        )
    assert decision is not None and plan is not None
    return _outcome(case, decision, plan, true_log)


def summary(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return shares over replays; ``wrong_frac`` is of those in which no layout gains."""
    losing = [o for o in outcomes if o.case.saving_frac <= o.case.cost_frac]
    gaining = [o for o in outcomes if o.case.saving_frac > o.case.cost_frac]
    stops = [o for o in outcomes if o.is_stop]
    return {
        "num_replays": len(outcomes),
        "stop_frac": len(stops) / len(outcomes),
        "wrong_frac": _mean([o.is_stop for o in losing]),
        "wrong_of_stops_frac": _mean([o.is_wrong for o in stops]),
        "missed_frac": _mean([o.is_missed for o in gaining]),
        "regret_frac": _mean([o.regret_frac for o in outcomes]),
        "simple_wrong_frac": _mean([o.simple_is_wrong for o in losing]),
        "simple_regret_frac": _mean([o.simple_regret_frac for o in outcomes]),
    }


def base_layout() -> Candidate:
    """Return a running layout, to which planted ratios refer."""
    config = RunConfig(
        model=SMALL,
        parallelism=Parallelism(dp=8),
        batch=Batch(micro_batch_size=1, global_batch_size=64),
    )
    return Candidate(
        config=config,
        median=1.0,
        critical_stage=0,
        parts_s={},
        contributions=(),
        ratio=Estimate(median=1.0),
        memory=memory(config),
        verdict=Verdict.FITS,
        source_frac={Source.MEASURED: 1.0},
        options=(),
    )


def _stretch(series: Sequence[Floats], random: np.random.Generator) -> Floats:
    values = series[int(random.integers(len(series)))]
    start = int(random.integers(len(values)))
    return np.resize(np.roll(values, -start), NUM_STEPS)


def _forecast(times: Floats, done: int) -> Forecast:
    return forecast(
        now_unix_s=0.0,
        steps_done=done,
        steps_total=NUM_STEPS,
        elapsed_s=float(times[:done].sum()),
        step_times_s=times[:done],
        drift_frac=DRIFT_FRAC,
    )


def at_ratio(layout: Candidate, ratio: float, sigma_log: float) -> Candidate:
    """Return a layout whose step is so many times that of the running one."""
    return replace(layout, ratio=Estimate(median=ratio, unshared_sigma_log=sigma_log))


def _plan(layout: Candidate, known_log: Floats, noise_log: float) -> Plan:
    candidates = [
        replace(
            at_ratio(layout, float(np.exp(log)), noise_log),
            # The number of the planted layout.
            options=(str(place),),
        )
        for place, log in sorted(enumerate(known_log.tolist()), key=lambda item: item[1])
    ]
    return Plan(
        running=layout,
        measured_step_time_s=1.0,
        memory_capacity_nbytes=None,
        candidates=tuple(candidates),
    )


def _outcome(case: Case, decision: Decision, plan: Plan, true_log: Floats) -> Outcome:
    gains = -np.expm1(true_log) - case.cost_frac
    best_gain = max(0.0, float(gains.max()))

    def gain(candidate: Candidate | None) -> float:
        return float(gains[int(candidate.options[0])]) if candidate is not None else 0.0

    is_stop = decision.action is Action.STOP
    got = gain(decision.candidate) if is_stop else 0.0
    simple = plan.best
    is_simple = simple is not None and -simple.time_frac > case.cost_frac
    simple_got = gain(simple) if is_simple else 0.0
    return Outcome(
        case=case,
        is_stop=is_stop,
        is_wrong=is_stop and got < 0,
        is_missed=not is_stop and best_gain > 0,
        regret_frac=best_gain - got,
        simple_is_wrong=is_simple and simple_got < 0,
        simple_regret_frac=best_gain - simple_got,
    )


def _mean(values: Sequence[float | bool]) -> float:
    return float(np.mean(values)) if values else 0.0
