"""Everything that is said of a run whose layout is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..advice.decision import Action, Decision
from ..advice.explain import Explanation
from ..advice.micro_batch import MicroBatchAdvice
from ..advice.plan import Candidate, Plan
from ..fit.calibration import Calibration
from ..forecast.batch_ratios import PredictedStep
from ..forecast.forecast import Forecast
from ..forecast.model_forecast import ModelForecast, at_batch_size, batch_size_at
from ..forecast.throughput import RunLeft, Throughput, throughput
from ..lint.lint import Lint
from ..steps.estimate import StepEstimate
from ..stragglers.waiting import WaitingReport
from ..workload.config import RunConfig
from .history import History, WindowScore, window_scores
from .routing import MeasuredRouting
from .run_end import RunEnd
from .run_measurements import HookSummary, Overhead
from .transcript import advised


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
        return advised(self.transcript)

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.decision.action is Action.STOP
