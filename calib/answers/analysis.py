"""The whole chain in one call: sample table -> calibration -> step -> forecast -> decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from ..advice.decision import Decision, Rule, decide
from ..advice.explain import Explanation, explain
from ..advice.micro_batch import MicroBatchAdvice, micro_batch_advice
from ..advice.plan import Plan, plan
from ..fit.calibration import calibrate
from ..forecast.forecast import Forecast
from ..forecast.measured_forecast import MeasuredRun, measured_forecast
from ..forecast.model_forecast import ModelForecast, model_forecast
from ..forecast.run_forecast import SoFar, run_forecast
from ..lint.lint import Lint, lint
from ..lint.pricing import Pricing
from ..lint.stated_launch import stated_launch
from ..network.cluster import network_line
from ..samples.table import SampleTable, windows_of
from ..steps.estimate import StepEstimate
from ..steps.known import KnownStep
from ..steps.live_times import live_times
from ..steps.model import FittedSteps
from ..stragglers.waiting import waiting_report
from ..units import HOUR_S
from ..workload.config import RunConfig
from ..workload.run_options import MicroBatchChoice
from .answer import Answer
from .finish_line import finish_line
from .history import History, Levels, Models
from .request import Request
from .routing import (
    imbalance_cost_frac,
    measured_routing,
    routing_line,
)
from .run_end import RunEnd, end_lines, run_end, undecided
from .run_measurements import (
    HookSummary,
    hook_summary,
    measured_step_s,
    memory_capacity_nbytes,
    memory_offset_nbytes,
    recalibration_s,
)
from .run_steps import fit_run, layout_left, running_config
from .transcript import transcript_lines
from .what_if import what_if


def analyse(
    table: SampleTable,
    request: Request,
    *,
    problems: Sequence[str] = (),
    history: History | None = None,
    known: Sequence[KnownStep] = (),
    directory: str = "DIR",
) -> Answer:
    """The answer of the newest run in the table; ``history`` is that of the answer before it.

    ``known`` are steps of other runs on this machine, in any layout; ``directory`` is what the
    commands in the transcript name.

    Raises ``CalibrationError`` where steps or operators are missing, ``ConfigError`` where the
    running layout is one that the timeline does not model yet.
    """
    config = request.of_program(running_config(table))
    last_step = request.last_step or int(table.steps["step"].max()) + 1
    end = run_end(table.loop(), last_step, steps_total=config.cadence.train_iters)
    config = replace(config, cadence=replace(config.cadence, train_iters=end.steps_total))
    measured_s = measured_step_s(table)
    calibration = calibrate(table, device=config.device)
    base = live_times(calibration, config)
    fit = fit_run(table, base, known, config)
    view = _outlook(table, config, request, fit.blind, fit.unseen)
    # The verbs ask for the same layout.
    ahead_config = layout_left(config)
    room, anew_s = _room(table, request), recalibration_s(table)
    others = _plan(request, ahead_config, fit.steps, room)
    levels = Levels(model_forecast=view, so_far=replace(request, last_step=last_step))
    ahead = run_forecast(view, levels.so_far)
    hooks = hook_summary(table)
    if end.steps_total:
        decision = _decision(request, others, ahead, hooks, anew_s)
    else:
        decision = undecided(end, request.goals, now_unix_s=ahead.now_unix_s)
    models = Models(calibration=calibration, own_s=fit.modelled_step.time_s)
    routing = measured_routing(table)
    answer = Answer(
        run_id=table.run_id,
        config=config,
        calibration=calibration,
        own=fit.unseen,
        measured_step_s=measured_s,
        overhead=fit.overhead,
        hooks=hooks,
        forecast=ahead,
        model_forecast=view,
        plan=others,
        decision=decision,
        history=_history(table, history, models, levels if end.steps_total else None),
        modelled_step=fit.modelled_step,
        waiting_s=fit.waiting_s,
        perturbation_s=fit.perturbation_s,
        skew_s=table.skew_s(),
        waiting=waiting_report(table, measured_s),
        routing=routing,
        imbalance_cost_frac=(
            imbalance_cost_frac(fit.blind, config, routing.imbalance)
            if routing is not None
            else None
        ),
        problems=tuple(problems),
        micro_batch=_micro_batch(request, ahead_config, fit.steps, room),
        explained=_explained(others, fit.steps),
        lint=_lint(request, ahead_config, fit.steps, room),
        restart_s=request.goals.restart_cost_s + anew_s,
        end=end,
        pass_forecast=_pass_forecast(table, levels.so_far, end),
        what_if=what_if(others, fit.steps, request.goals.gpus, room["memory_offset_nbytes"]),
    )
    return replace(answer, transcript=_transcript(answer, request, directory))


def _transcript(answer: Answer, request: Request, directory: str) -> tuple[str, ...]:
    remarks = (
        answer.waiting.line,
        routing_line(answer.routing, answer.imbalance_cost_frac),
        network_line(answer.calibration.transfers.carrying),
    )
    is_known = answer.end.steps_total > 0
    ends = [finish_line(answer.forecast, request.goals)]
    lines = transcript_lines(
        answer.config,
        measured_s=answer.measured_step_s,
        found=answer.throughput,
        modelled=answer.modelled_step,
        hooks=answer.hooks,
        overhead=answer.overhead,
        ends=ends if is_known else end_lines(answer.end, answer.pass_forecast),
        has_end=is_known,
        plan=answer.plan,
        lint=answer.lint,
        decision=answer.decision,
        micro_batch=answer.micro_batch,
        remarks=remarks,
        directory=directory,
    )
    return tuple(lines)


def _pass_forecast(table: SampleTable, so_far: SoFar, end: RunEnd) -> Forecast | None:
    """Of a run that does not say where it ends."""
    if not end.pass_end:
        return None
    return measured_forecast(MeasuredRun.of(table), so_far, steps_total=end.pass_end)


class _Room(TypedDict):
    """What is known of a rank's memory, as all that asks whether a layout fits takes it."""

    memory_capacity_nbytes: int | None
    memory_offset_nbytes: int | None


def _room(table: SampleTable, request: Request) -> _Room:
    return {
        "memory_capacity_nbytes": request.memory_capacity_nbytes or memory_capacity_nbytes(table),
        "memory_offset_nbytes": memory_offset_nbytes(table),
    }


def _plan(request: Request, config: RunConfig, steps: FittedSteps, room: _Room) -> Plan:
    return plan(
        config,
        steps,
        num_ranks=(config.parallelism.num_ranks, *request.goals.gpus),
        **room,
    )


def _explained(found: Plan, steps: FittedSteps) -> tuple[Explanation, ...]:
    own, best = found.own.config, found.best
    against = explain(best.config, own, steps) if best is not None else None
    if against is None or against.difference is None:
        return (explain(own, None, steps),)
    return (Explanation(one=against.difference.other), against)


def _micro_batch(
    request: Request, config: RunConfig, steps: FittedSteps, room: _Room
) -> MicroBatchAdvice | None:
    """None where nobody asked for it."""
    if request.goals.micro_batch is not MicroBatchChoice.ADVISE:
        return None
    return micro_batch_advice(
        config,
        steps,
        **room,
        confidence=request.goals.confidence,
        host_argv=request.host_argv,
    )


def _lint(request: Request, config: RunConfig, steps: FittedSteps, room: _Room) -> Lint:
    """Of the words that the request has; variables are not among them."""
    hours = request.goals.mtbf_hours
    pricing = Pricing(
        config=config,
        steps=steps,
        **room,
        mtbf_s=None if hours is None else hours * HOUR_S,
        restart_s=request.goals.restart_cost_s,
        eval_times_s=request.eval_times_s,
        save_times_s=request.save_times_s,
    )
    return lint(stated_launch(request.host_argv, config), pricing)


def _decision(
    request: Request, found: Plan, ahead: Forecast, hooks: HookSummary, anew_s: float
) -> Decision:
    return decide(
        request.goals,
        forecast=ahead,
        plan=found,
        recalibration_s=anew_s,
        coverage_frac=hooks.num_fired / hooks.num_installed if hooks.num_installed else None,
        silent=", ".join(name for name in hooks.remarks if name.startswith("inside ")),
        host_argv=request.host_argv,
        previously_met=frozenset(Rule(value) for value in request.previously_met),
    )


def _history(
    table: SampleTable, known: History | None, models: Models, levels: Levels | None
) -> History:
    """With the newest window; ``models`` are the run's own where no other run's rows are there."""
    if known is None:
        if len(windows_of(table)) > 1:
            return replace(History.of(table), levels=levels)
        known = History()
    is_own = bool((table.samples["run_id"] == table.run_id).all())
    return known.followed_by(table, models if is_own else None, levels)


def _outlook(
    table: SampleTable,
    config: RunConfig,
    request: Request,
    steps: FittedSteps,
    own: StepEstimate,
) -> ModelForecast:
    recent = replace(table, steps=table.steps[table.steps["step"] >= request.level_since_step])
    runs = table.newest("runs")
    return model_forecast(
        config,
        steps,
        own,
        started_unix_s=float(runs["started_unix_s"].min()),
        recorded_s=tuple(recent.step_times_s(is_hooked=False).tolist()),
        recorded_numbers=recent.bare_step_numbers(),
    )
