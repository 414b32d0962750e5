"""The whole chain in one call: sample table -> calibration -> step -> forecast -> decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from .advice.decision import Action, Decision, Limits, Rule, decide
from .advice.forecast import Extra, Forecast, forecast, num_left
from .advice.overhead import Overhead
from .advice.plan import Plan, plan
from .advice.transcript import HookSummary, StepSummary, transcript_lines
from .evidence import (
    hook_summary,
    mean_waiting_s,
    measured_overhead,
    measured_sigma_log,
    measured_step_s,
    memory_offset_nbytes,
    perturbation_s,
)
from .fit.calibration import Calibration, calibrate
from .history import WindowError, window_history
from .samples.table import SampleTable
from .timeline.step import StepEstimate, estimate_step
from .units import HOUR_S
from .waiting import WaitingReport, waiting_report
from .workload.config import RunConfig

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of an analysis; everything that it cannot read from the table."""

    now_unix_s: float
    last_step: int = 0
    step_times_s: tuple[float, ...] = ()
    """Every unflagged bare step so far, oldest first; empty: those of the table's windows."""
    eval_times_s: tuple[float, ...] = ()
    save_times_s: tuple[float, ...] = ()
    deadline_unix_s: float | None = None
    budget_hours: float | None = None
    restart_cost_s: float = 600.0
    confidence: float = 0.9
    gpus: tuple[int, ...] = ()
    host_argv: tuple[str, ...] = ()
    memory_capacity_nbytes: int | None = None
    previously_met: tuple[str, ...] = ()
    """Values of the rules that spoke for stopping in the window before."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that ``from_json`` reads back."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Request:
        """The request that ``to_json`` wrote; unknown keys are ignored."""
        names = {spec.name for spec in fields(Request)}
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k in names
        }
        return Request(**known)

    @property
    def limits(self) -> Limits:
        """The thresholds of the decision."""
        return Limits(
            restart_cost_s=self.restart_cost_s,
            confidence=self.confidence,
            deadline_unix_s=self.deadline_unix_s,
            budget_s=None if self.budget_hours is None else self.budget_hours * HOUR_S,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The next single step with its 90 % interval, seconds."""

    time_s: float
    low_s: float
    high_s: float


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
    plan: Plan
    decision: Decision
    history: tuple[WindowError, ...]
    modelled_step: PredictedStep
    """The running layout without hooks: timeline, plus waiting, minus the perturbation."""
    waiting_s: float
    """Mean time per step that a rank stands still for a later one, pipeline waits aside."""
    perturbation_s: float
    """What hooks slow a hooked step down by beyond the time that they take themselves."""
    skew_s: Mapping[int, float]
    waiting: WaitingReport
    problems: tuple[str, ...]
    transcript: tuple[str, ...]

    @property
    def predicted_step(self) -> PredictedStep:
        """What the next step of this run will take."""
        return PredictedStep(
            time_s=self.forecast.step_time_s,
            low_s=self.forecast.single_low_s,
            high_s=self.forecast.single_high_s,
        )

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.decision.action is Action.STOP


def analyse(table: SampleTable, request: Request, *, problems: Sequence[str] = ()) -> Answer:
    """The answer of the newest run in the table.

    Raises ``CalibrationError`` where steps or operators are missing, ``ConfigError`` where the
    running layout is one that the timeline does not model yet.
    """
    config = table.config()
    measured_s = measured_step_s(table)
    calibration = calibrate(table, device=config.device)
    own = estimate_step(config, calibration)
    found = plan(
        config,
        calibration,
        num_ranks=(config.parallelism.num_ranks, *request.gpus),
        measured_step_time_s=measured_s,
        measured_sigma_log=measured_sigma_log(table),
        memory_capacity_nbytes=request.memory_capacity_nbytes or table.device_memory_nbytes(),
        memory_offset_nbytes=memory_offset_nbytes(table),
    )
    ahead = _forecast(table, config, request, own)
    hooks = hook_summary(table)
    coverage = hooks.num_fired / hooks.num_installed if hooks.num_installed else None
    decision = decide(
        request.limits,
        forecast=ahead,
        plan=found,
        coverage_frac=coverage,
        host_argv=request.host_argv,
        previously_met=frozenset(Rule(value) for value in request.previously_met),
    )
    cost = measured_overhead(table)
    waiting_s, perturbed_s = mean_waiting_s(table), perturbation_s(table, cost)
    rest_s = waiting_s - perturbed_s
    modelled = PredictedStep(
        time_s=own.time_s + rest_s, low_s=own.low_s + rest_s, high_s=own.high_s + rest_s
    )
    waiting = waiting_report(table, measured_s)
    lines = transcript_lines(
        hooks=hooks,
        overhead=cost,
        step=StepSummary(
            measured_s=measured_s,
            modelled_s=modelled.time_s,
            low_s=modelled.low_s,
            high_s=modelled.high_s,
        ),
        slow=waiting.line,
        forecast=ahead if config.cadence.train_iters else None,
        plan=found,
        decision=decision,
    )
    return Answer(
        run_id=table.run_id,
        config=config,
        calibration=calibration,
        own=own,
        measured_step_s=measured_s,
        overhead=cost,
        hooks=hooks,
        forecast=ahead,
        plan=found,
        decision=decision,
        history=window_history(table),
        modelled_step=modelled,
        waiting_s=waiting_s,
        perturbation_s=perturbed_s,
        skew_s=table.skew_s(),
        waiting=waiting,
        problems=tuple(problems),
        transcript=tuple(lines),
    )


def _forecast(
    table: SampleTable, config: RunConfig, request: Request, own: StepEstimate
) -> Forecast:
    recorded = tuple(table.step_times_s(is_hooked=False).tolist())
    times = max(request.step_times_s, recorded, key=len)
    runs = table.runs[table.runs["run_id"] == table.run_id]
    started_unix_s = float(runs["started_unix_s"].min())
    cadence = config.cadence
    last = request.last_step or int(table.steps["step"].max()) + 1
    extras = [
        Extra(
            name=name,
            num_left=num_left(steps_done=last, steps_total=cadence.train_iters, interval=interval),
            time_s=float(np.mean(seen)),
            sigma_s=float(np.std(seen, ddof=1) / np.sqrt(len(seen))) if len(seen) > 1 else 0.0,
        )
        for name, interval, seen in (
            ("eval", cadence.eval_interval, request.eval_times_s),
            ("save", cadence.save_interval, request.save_times_s),
        )
        if seen
    ]
    return forecast(
        now_unix_s=request.now_unix_s,
        steps_done=last,
        steps_total=max(cadence.train_iters, last),
        elapsed_s=max(0.0, request.now_unix_s - started_unix_s),
        step_times_s=times,
        estimate=own,
        extras=extras,
    )
