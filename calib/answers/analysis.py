"""The whole chain in one call: sample table -> calibration -> step -> forecast -> decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...leaves import leaf
from ..advice.decision import UNKNOWN_LAYOUT, Decision, Rule, decide
from ..advice.explanation import Explanation, explain
from ..advice.planning import Candidate, Plan, compare, plan
from ..arguments.megatron_command import program_of
from ..errors import ForerunError
from ..forecast.evaluation import Ended
from ..forecast.forecast_record import Forecast
from ..forecast.modelled import ModelForecast, model_forecast
from ..forecast.remaining_run import measured_forecast, run_forecast
from ..lint.linter import Lint, lint
from ..lint.pricing import Pricing
from ..lint.rule import stated_launch
from ..network.cluster import network_line
from ..samples.table import SampleTable, only_windows, windows_of
from ..search.results import MemoryBudget
from ..steps.known_steps import KnownStep
from ..steps.live import live_times
from ..steps.model import FittedSteps
from ..units import HOUR_S, format_count
from ..workload.config import RunConfig
from ..workload.run_options import Goals
from .answer import Answer, Modelled
from .finish_line import ended_line, finish_line
from .measured_steps import RunFit, fit_run, remaining_layout
from .request import Request
from .routing import imbalance_cost_frac, routing_line
from .run_end import RunEnd, end_lines, run_end, undecided
from .run_measurements import Measurements
from .transcript import (
    checked_line,
    decision_line,
    faster_line,
    run_line,
    with_prefix,
)

_T = TypeVar("_T")


def analyse(
    table: SampleTable,
    request: Request,
    *,
    problems: Sequence[str] = (),
    first_error_frac: float | None = None,
    known: Sequence[KnownStep] = (),
    directory: str = "DIR",
    at_forecast: Callable[[], Request] | None = None,
) -> Answer:
    """Return the answer for the newest run in the table.

    ``first_error_frac`` is that of the previous answer; ``known`` are steps of other runs on this
    machine, in any layout; ``directory`` is the one named by the commands in the transcript.  If
    the layout is unknown, ``Answer.modelled`` is None.  ``at_forecast`` returns the request once
    the models are fitted, which takes training some steps further.

    Raises ``CalibrationError`` if steps or operators are missing, ``ConfigError`` if the timeline
    does not model the running layout yet.
    """
    measured = Measurements(table=table)
    request = replace(request, last_step=request.last_step or measured.num_steps)
    config = measured.config if table.is_described else None
    total = config.cadence.train_iters if config else 0
    end = run_end(measured.loop, request.last_step, steps_total=total)
    modelled = None
    if config is not None:
        config = replace(
            config,
            program=program_of(request.host_argv),
            absent=request.absent,
            cadence=replace(config.cadence, train_iters=end.steps_total),
        )
        modelled = _modelled(measured, request, config, known, first_error_frac)
        if at_forecast is not None and (later := at_forecast()).last_step > request.last_step:
            request = later
    return _answer(measured, request, end, modelled, problems, directory)


def with_new_forecast(answer: Answer, request: Request) -> Answer:
    """Return the answer at a later moment, with all steps so far but the same window and fit.

    If the layout is known, the decision and the transcript do not change either.
    """
    modelled, measured = answer.modelled, answer.measured
    end = run_end(measured.loop, request.last_step, steps_total=answer.end.steps_total)
    if modelled is None:
        return _answer(measured, request, end, None, answer.problems)
    return replace(answer, end=end, forecast=_forecast(measured, request, end, modelled))


def with_end(answer: Answer, ended: Ended, goals: Goals, *, directory: str = "DIR") -> Answer:
    """Return the answer once its run has ended: its lines are about the past and the next launch;
    ``directory`` is as for ``analyse``."""
    answer, modelled = replace(answer, ended=ended), answer.modelled
    closing = _end_lines(answer, goals)
    if modelled is not None and modelled.plan.best is not None:
        closing.append(faster_line(modelled.plan, answer.decision, next_launch=directory))
    lines = _lines(answer, goals, directory)
    return replace(answer, transcript=lines, closing=tuple(with_prefix(closing)))


def finish_lines(answer: Answer, goals: Goals) -> tuple[str, ...]:
    """Return only the lines on the end of the run or of the pass, for a later moment."""
    if answer.has_finish or answer.ended is not None:
        return tuple(with_prefix(_end_lines(answer, goals)))
    # The reason why the end of the run is unknown is in the transcript already.
    return tuple(with_prefix(end_lines(answer.end, answer.forecast)[:-1]))


def _answer(
    measured: Measurements,
    request: Request,
    end: RunEnd,
    modelled: Modelled | None,
    problems: Sequence[str],
    directory: str = "DIR",
) -> Answer:
    ahead = _forecast(measured, request, end, modelled)
    answer = Answer(
        measured=measured,
        end=end,
        forecast=ahead,
        decision=_decision(measured, request, end, ahead, modelled and modelled.plan),
        modelled=modelled,
        problems=tuple(problems),
    )
    return replace(answer, transcript=_lines(answer, request.goals, directory))


def _forecast(
    measured: Measurements, request: Request, end: RunEnd, modelled: Modelled | None
) -> Forecast:
    """Return the forecast by the model; by measured steps alone if there is none, or to the end of
    a pass over the data."""
    if modelled is not None and not end.pass_end:
        return run_forecast(modelled.model_forecast, request)
    return measured_forecast(
        measured.run,
        request,
        steps_total=end.horizon or request.last_step,
        eval_interval=measured.loop.eval_interval,
        save_interval=measured.loop.save_interval,
    )


def _modelled(
    measured: Measurements,
    request: Request,
    config: RunConfig,
    known: Sequence[KnownStep],
    first_error_frac: float | None,
) -> Modelled:
    """Return what models say; parts beside the step that fail are absent, with a failure each."""
    fit = fit_run(measured, live_times(measured.calibration, config, known), known, config)
    budget = measured.budget
    if request.memory_capacity_nbytes:
        budget = replace(budget, capacity_nbytes=request.memory_capacity_nbytes)
    others = _plan(request, remaining_layout(config), fit.steps, budget)
    if first_error_frac is None:
        first_error_frac = _first_error_frac(measured, fit)
    failures: list[str] = []

    def apart(name: str, absent: _T, part: Callable[..., _T], *args: Any) -> _T:
        try:
            return part(*args)
        except ForerunError as err:
            failures.append(f"{name} not known: {err}")
            return absent

    routing = measured.routing
    return Modelled(
        config=config,
        model_forecast=_outlook(measured, config, request, fit),
        plan=others,
        step=fit.modelled_step,
        waiting_s=fit.waiting_s,
        perturbation_s=fit.perturbation_s,
        first_error_frac=first_error_frac,
        imbalance_cost_frac=(
            imbalance_cost_frac(fit.blind, config, routing.imbalance)
            if routing is not None
            else None
        ),
        explained=apart("parts of the step", (), _explained, others, fit.steps),
        lint=apart(
            *("advice on arguments", None, _lint, request),
            *(remaining_layout(config), fit.steps, budget),
        ),
        restart_s=request.goals.restart_cost_s + measured.recalibration_s,
        what_if=apart(
            *("what another choice would give", (), _what_if, others, fit.steps),
            *(request.goals.gpus, budget),
        ),
        failures=tuple(failures),
    )


def _what_if(*choices: Any) -> tuple[Candidate, ...]:
    what_if = leaf(".what_if:what_if", __package__ or "")
    return () if what_if is None else what_if(*choices)


def _lines(answer: Answer, goals: Goals, directory: str) -> tuple[str, ...]:
    lines = (
        _lines_of_steps(answer, goals)
        if answer.modelled is None
        else _lines_of_layout(answer, answer.modelled, goals, directory)
    )
    return tuple(
        with_prefix(
            [*lines, checked_line(answer.measured, answer.modelled and answer.modelled.step)]
        )
    )


def _lines_of_layout(answer: Answer, modelled: Modelled, goals: Goals, directory: str) -> list[str]:
    config, plan, lint, is_over = modelled.config, modelled.plan, modelled.lint, bool(answer.ended)
    measured = answer.measured
    rate = modelled.throughput(measured.step_s)
    return [
        run_line(config, config.parallelism.num_ranks, measured.step_s, rate),
        measured.waiting.line,
        routing_line(measured.routing, modelled.imbalance_cost_frac),
        network_line(measured.calibration.transfers.fitted_prior),
        *_end_lines(answer, goals),
        faster_line(
            plan,
            answer.decision,
            has_end=answer.has_finish,
            next_launch=directory if is_over else "",
        ),
        lint.line(directory) if lint is not None else "",
        "" if is_over else decision_line(answer.decision, plan, directory=directory),
        *modelled.failures,
    ]


def _lines_of_steps(answer: Answer, goals: Goals) -> list[str]:
    measured = answer.measured
    step_s = measured.step_s
    run = run_line(None, measured.run.num_ranks, step_s, device=measured.device)
    is_decided = any(reason.rule is not Rule.EVIDENCE for reason in answer.decision.reasons)
    is_decided &= answer.ended is None
    rates, (unit, count) = answer.rates, answer.batch
    rate = "tokens/s not known: no batch was recorded in the first steps"
    if rates:
        each_s = format_count(rates[f"{unit}_per_s"])
        rate = f"{each_s} {unit}/s ({count:,} {unit} per rank and step)"
    return [
        f"{run} · {rate}",
        *_end_lines(answer, goals),
        *(group.line(step_s) for group in measured.groups),
        UNKNOWN_LAYOUT,
        decision_line(answer.decision) if is_decided else "",
    ]


def _end_lines(answer: Answer, goals: Goals) -> list[str]:
    if answer.ended is not None:
        return [ended_line(answer.ended, answer.forecast)]
    if answer.has_finish:
        return [finish_line(answer.forecast, goals)]
    return end_lines(answer.end, answer.forecast)


def _plan(request: Request, config: RunConfig, steps: FittedSteps, budget: MemoryBudget) -> Plan:
    """Return the plan; the running layout alone, with the reason, if the search fails."""
    counts = (config.parallelism.num_ranks, *request.goals.gpus)
    try:
        return plan(config, steps, num_ranks=counts, budget=budget)
    except ForerunError as err:
        (running,) = compare(config, [config], steps, budget=budget)
        return Plan(
            running=running,
            measured_step_time_s=steps.measured_s(config),
            memory_capacity_nbytes=budget.capacity_nbytes,
            candidates=(),
            not_searched=str(err),
        )


def _explained(layout_plan: Plan, steps: FittedSteps) -> tuple[Explanation, ...]:
    running, best = layout_plan.running.config, layout_plan.best
    against = explain(best.config, running, steps) if best is not None else None
    if against is None or against.difference is None:
        return (explain(running, None, steps),)
    return (explain(running, None, steps), against)


def _lint(request: Request, config: RunConfig, steps: FittedSteps, budget: MemoryBudget) -> Lint:
    """Lint the arguments in the request, which has no environment variables."""
    hours = request.goals.mtbf_hours
    pricing = Pricing(
        config=config,
        steps=steps,
        budget=budget,
        mtbf_s=None if hours is None else hours * HOUR_S,
        restart_s=request.goals.restart_cost_s,
        eval_times_s=request.eval_times_s,
        save_times_s=request.save_times_s,
    )
    return lint(stated_launch(request.host_argv, config), pricing)


def _decision(
    measured: Measurements,
    request: Request,
    end: RunEnd,
    ahead: Forecast,
    layout_plan: Plan | None,
) -> Decision:
    """Decide by the requested limits, and by other layouts if they are known."""
    if not end.steps_total:
        return undecided(end, request.goals, now_unix_s=ahead.now_unix_s)
    hooks = measured.hooks
    is_compared = layout_plan is not None and hooks.num_installed > 0
    return decide(
        request.goals,
        forecast=ahead,
        plan=layout_plan,
        recalibration_s=measured.recalibration_s,
        coverage_frac=hooks.num_fired / hooks.num_installed if is_compared else None,
        silent=", ".join(name for name in hooks.remarks if name.startswith("inside ")),
        host_argv=request.host_argv,
        previously_met=frozenset(Rule(value) for value in request.previously_met),
    )


def _first_error_frac(measured: Measurements, fit: RunFit) -> float | None:
    """Return the error of the step as modelled on the run's first window alone; None if that has
    too few measurements."""
    windows = windows_of(measured.table)
    if len(windows) == 1:
        return fit.modelled_step.error_frac(measured.step_s)
    first = Measurements(table=only_windows(measured.table, windows[:1]))
    try:
        base = live_times(first.calibration, first.config)
        return fit_run(first, base, (), first.config).modelled_step.error_frac(first.step_s)
    except ForerunError:
        return None


def _outlook(
    measured: Measurements, config: RunConfig, request: Request, fit: RunFit
) -> ModelForecast:
    recent_s = measured.bare_s[measured.bare_s.index >= request.level_since_step]
    return model_forecast(
        config,
        fit.blind,
        fit.unseen,
        started_unix_s=measured.run.started_unix_s,
        recorded_s=tuple(recent_s.tolist()),
        recorded_numbers=tuple((recent_s.index + 1).tolist()),
    )
