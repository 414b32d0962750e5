"""The whole chain in one call: sample table -> calibration -> step -> forecast -> decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..advice.decision import Action, Decision, Rule, decide
from ..advice.explain import Explanation, explain
from ..advice.micro_batch import MicroBatchAdvice, micro_batch_advice
from ..advice.plan import Candidate, Plan, plan
from ..fit.calibration import Calibration, calibrate
from ..forecast.batch_ratios import PredictedStep
from ..forecast.forecast import Forecast
from ..forecast.measured_forecast import MeasuredRun, measured_forecast
from ..forecast.model_forecast import (
    ModelForecast,
    at_batch_size,
    batch_size_at,
    full_batch_size,
    model_forecast,
)
from ..forecast.run_forecast import SoFar, run_forecast
from ..forecast.throughput import RunLeft, Throughput, throughput
from ..lint.lint import Lint, lint
from ..lint.pricing import Pricing
from ..lint.stated_launch import stated_launch
from ..network.cluster import network_line
from ..samples.table import SampleTable
from ..samples.windows import windows_of
from ..steps.estimate import StepEstimate
from ..steps.known import KnownStep, same_layout
from ..steps.live_times import live_times
from ..steps.model import FittedSteps, fit_steps
from ..stragglers.waiting import WaitingReport, waiting_report
from ..units import HOUR_S
from ..workload.config import RunConfig
from ..workload.run_options import MicroBatchChoice
from .finish_line import finish_line
from .history import History, Levels, Models, WindowScore, window_scores
from .request import Request as Request
from .routing import (
    MeasuredRouting,
    imbalance_cost_frac,
    measured_routing,
    routed_s,
    routing_line,
)
from .run_end import RunEnd, end_lines, run_end, undecided
from .run_measurements import (
    HookSummary,
    Overhead,
    hook_summary,
    mean_waiting_s,
    measured_overhead,
    measured_sigma_log,
    measured_step_s,
    memory_offset_nbytes,
    perturbation_s,
    recalibration_s,
)
from .run_steps import known_step, running_config, with_own
from .transcript import transcript_lines
from .what_if import what_if


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that is said of a run after a window."""

    run_id: str
    config: RunConfig
    calibration: Calibration
    own: StepEstimate
    measured_step_s: float
    overhead: Overhead | None
    hooks: HookSummary
    forecast: Forecast
    model_forecast: ModelForecast
    """What later forecasts start from, without a new fit."""
    plan: Plan
    decision: Decision
    history: History
    modelled_step: PredictedStep
    """The running layout without hooks: timeline, plus waiting, minus the perturbation."""
    waiting_s: float
    """Mean time per step that a rank stands still for a later one; pipeline waits aside, and what
    the step model has for the rank with the most tokens."""
    perturbation_s: float
    """What hooks slow a hooked step down by beyond the time that they take themselves."""
    skew_s: Mapping[int, float]
    waiting: WaitingReport
    problems: tuple[str, ...]
    routing: MeasuredRouting | None = None
    imbalance_cost_frac: float | None = None
    """Share of the own step that tokens routed evenly would save; None where nothing is routed."""
    transcript: tuple[str, ...] = ()
    micro_batch: MicroBatchAdvice | None = None
    """Where it was asked for."""
    explained: tuple[Explanation, ...] = ()
    """Of the running layout, and of the advised one against it where there is one."""
    lint: Lint | None = None
    """What its own launch should say otherwise."""
    ended_unix_s: float | None = None
    """The end of the run, where it has come."""
    restart_s: float = 0.0
    """What another layout costs before its first step: restart and new calibration."""
    end: RunEnd = field(default_factory=RunEnd)
    pass_forecast: Forecast | None = None
    """To the end of the pass over the data; None where the run's own is known, or neither is."""
    what_if: tuple[Candidate, ...] = ()
    """The running layout and its neighbours, as ``forerun predict`` answers for each."""

    @property
    def window_scores(self) -> list[WindowScore]:
        """What each window was worth, against the end of the run or the newest forecast of it."""
        forecast, ended = self.forecast, self.ended_unix_s
        return window_scores(
            self.history.errors,
            started_unix_s=forecast.now_unix_s - forecast.elapsed_s,
            finish_unix_s=forecast.finish_p50_unix_s if ended is None else ended,
        )

    @property
    def throughput(self) -> Throughput:
        """Of the measured step."""
        return throughput(self.config, self.measured_step_s)

    def throughput_at(self, iteration: int, step_time_s: float) -> Throughput:
        """Of a step of this run, counted from 1, that takes so long: with the batch that it has."""
        size = batch_size_at(self.config, iteration)
        return throughput(at_batch_size(self.config, size), step_time_s)

    @property
    def left(self) -> RunLeft | None:
        """What is left of the run; None at its end, and where nobody said how long it is."""
        if self.config.cadence.train_iters <= 0:
            return None
        own = self.plan.own
        return RunLeft.of(self.forecast, own.config, own.step_time_s, restart_s=self.restart_s)

    def predicted_step(self, iteration: int) -> PredictedStep:
        """What a step of this run, counted from 1, will take."""
        step = PredictedStep(
            time_s=self.forecast.step_time_s,
            low_s=self.forecast.single_low_s,
            high_s=self.forecast.single_high_s,
        )
        return step.scaled(self.model_forecast.ratio(iteration, self.forecast.steps_done))

    def modelled_at(self, iteration: int) -> PredictedStep:
        """The same from the models alone."""
        window_size = self.config.batch.global_batch_size
        size = batch_size_at(self.config, iteration)
        ratios = self.model_forecast.ratios
        if size == window_size or size not in ratios:
            return self.modelled_step
        return self.modelled_step.scaled(ratios[size])

    @property
    def advice(self) -> str:
        """The line of the transcript that says what is advised; empty without a transcript."""
        return next((line for line in self.transcript if " decision: " in line), "")

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.decision.action is Action.STOP


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
    measured_s = measured_step_s(table)
    calibration = calibrate(table, device=config.device)
    base = live_times(calibration, config)
    # What is held against the measured step has seen no step of this layout.
    layout = same_layout(config)
    blind = fit_steps(base, [one for one in known if same_layout(one.config) != layout])
    own = blind.estimate(config)
    view = _outlook(table, config, request, blind, own)
    ran = _ran(table, view)
    fitted = fit_steps(base, with_own(known, ran))
    told = fit_steps(base, with_own(known, known_step(table)))  # what ``forerun predict`` fits
    found = _plan(table, request, ran.config, fitted)
    last_step = request.last_step or int(table.steps["step"].max()) + 1
    levels = Levels(model_forecast=view, so_far=replace(request, last_step=last_step))
    ahead = run_forecast(view, levels.so_far)
    hooks = hook_summary(table)
    end = run_end(table.loop(), last_step, steps_total=config.cadence.train_iters)
    decision = _decision(table, request, found, ahead, hooks)
    if not end.steps_total:
        confidence = request.goals.confidence
        decision = undecided(end, confidence=confidence, now_unix_s=ahead.now_unix_s)
    cost = measured_overhead(table)
    waiting_s = mean_waiting_s(table, routed_s(blind, config))
    perturbed_s = perturbation_s(table, cost)
    rest_s = waiting_s - perturbed_s
    modelled = PredictedStep(
        time_s=own.time_s + rest_s, low_s=own.low_s + rest_s, high_s=own.high_s + rest_s
    )
    models = Models(calibration=calibration, own_s=modelled.time_s)
    routing = measured_routing(table)
    answer = Answer(
        run_id=table.run_id,
        config=config,
        calibration=calibration,
        own=own,
        measured_step_s=measured_s,
        overhead=cost,
        hooks=hooks,
        forecast=ahead,
        model_forecast=view,
        plan=found,
        decision=decision,
        history=_history(table, history, models, levels if end.steps_total else None),
        modelled_step=modelled,
        waiting_s=waiting_s,
        perturbation_s=perturbed_s,
        skew_s=table.skew_s(),
        waiting=waiting_report(table, measured_s),
        routing=routing,
        imbalance_cost_frac=(
            imbalance_cost_frac(blind, config, routing.imbalance) if routing is not None else None
        ),
        problems=tuple(problems),
        micro_batch=_micro_batch(table, request, ran.config, fitted),
        explained=_explained(found, fitted),
        lint=_lint(table, request, ran.config, fitted),
        restart_s=request.goals.restart_cost_s + recalibration_s(table),
        end=end,
        pass_forecast=_pass_forecast(table, levels.so_far, end, config),
        what_if=what_if(found, told, request.goals.gpus, memory_offset_nbytes(table)),
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


def _pass_forecast(
    table: SampleTable, request: SoFar, end: RunEnd, config: RunConfig
) -> Forecast | None:
    """Of a run that does not say where it ends."""
    if not end.pass_end:
        return None
    run = MeasuredRun(
        started_unix_s=float(table.newest("runs")["started_unix_s"].min()),
        num_ranks=config.parallelism.num_ranks,
        is_cpu=config.device == "cpu",
        recorded_s=tuple(table.step_times_s(is_hooked=False).tolist()),
    )
    return measured_forecast(run, request, steps_total=end.pass_end)


def _ran(table: SampleTable, view: ModelForecast) -> KnownStep:
    """The running layout for what is left: the steps behind the ramp."""
    config = view.config
    full = full_batch_size(config)
    full = full if full in view.ratios else config.batch.global_batch_size
    return KnownStep(
        config=at_batch_size(config, full),
        time_s=measured_step_s(table) * view.ratios[full].ratio,
        sigma_log=math.hypot(measured_sigma_log(table), view.ratios[full].sigma_log),
    )


def _plan(table: SampleTable, request: Request, config: RunConfig, steps: FittedSteps) -> Plan:
    return plan(
        config,
        steps,
        num_ranks=(config.parallelism.num_ranks, *request.goals.gpus),
        memory_capacity_nbytes=request.memory_capacity_nbytes or table.device_memory_nbytes(),
        memory_offset_nbytes=memory_offset_nbytes(table),
    )


def _explained(found: Plan, steps: FittedSteps) -> tuple[Explanation, ...]:
    own = found.own.config
    best = found.best
    of_own = explain(own, None, steps)
    return (of_own,) if best is None else (of_own, explain(best.config, own, steps))


def _micro_batch(
    table: SampleTable, request: Request, config: RunConfig, steps: FittedSteps
) -> MicroBatchAdvice | None:
    """None where nobody asked for it."""
    if request.goals.micro_batch is not MicroBatchChoice.ADVISE:
        return None
    return micro_batch_advice(
        config,
        steps,
        memory_capacity_nbytes=request.memory_capacity_nbytes or table.device_memory_nbytes(),
        memory_offset_nbytes=memory_offset_nbytes(table),
        confidence=request.goals.confidence,
        host_argv=request.host_argv,
    )


def _lint(table: SampleTable, request: Request, config: RunConfig, steps: FittedSteps) -> Lint:
    """Of the words that the request has; variables are not among them."""
    hours = request.goals.mtbf_hours
    pricing = Pricing(
        config=config,
        steps=steps,
        memory_capacity_nbytes=request.memory_capacity_nbytes or table.device_memory_nbytes(),
        memory_offset_nbytes=memory_offset_nbytes(table),
        mtbf_s=None if hours is None else hours * HOUR_S,
        restart_s=request.goals.restart_cost_s,
        eval_times_s=request.eval_times_s,
        save_times_s=request.save_times_s,
    )
    return lint(stated_launch(request.host_argv, config), pricing)


def _decision(
    table: SampleTable, request: Request, found: Plan, ahead: Forecast, hooks: HookSummary
) -> Decision:
    return decide(
        request.goals,
        forecast=ahead,
        plan=found,
        recalibration_s=recalibration_s(table),
        coverage_frac=hooks.num_fired / hooks.num_installed if hooks.num_installed else None,
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
