"""The answer on a run after a window: one document with optional parts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..advice.decision import Decision
from ..advice.explanation import Explanation
from ..advice.planning import Candidate, Plan
from ..errors import CalibrationError
from ..forecast.batch_ratios import PredictedStep
from ..forecast.evaluation import Ended
from ..forecast.forecast_record import Forecast
from ..forecast.modelled import ModelForecast, at_batch_size, batch_size_at
from ..forecast.rates import RemainingRun, Throughput, throughput
from ..lint.linter import Lint
from ..plain_json import JsonObject
from ..workload.config import RunConfig
from .run_end import RunEnd, forecast_json
from .run_measurements import Measurements
from .transcript import PREFIX, advice_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Part of an answer that needs models: the running layout, its step, and other layouts."""

    config: RunConfig
    model_forecast: ModelForecast
    """Base of later forecasts, which need no new fit."""
    plan: Plan
    step: PredictedStep
    """Step of the running layout without hooks: timeline plus waiting, less ``perturbation_s``."""
    waiting_s: float
    """Mean time per step that a rank waits for a later one, excluding pipeline waits and the time
    that the step model has for the rank with the most tokens."""
    perturbation_s: float
    """Part that hooks add to it in hooked steps, beyond the time spent inside them."""
    first_error_frac: float | None = None
    """Error of the step as modelled after the run's first window; None if not known."""
    imbalance_cost_frac: float | None = None
    """Share of the step that even routing of tokens would save; None if nothing is routed."""
    explained: tuple[Explanation, ...] = ()
    """Explanation of the running layout, then of the advised one against it if there is one."""
    lint: Lint | None = None
    """Advice on the arguments of the running launch."""
    restart_s: float = 0.0
    """Cost of another layout before its first step: restart and new calibration."""
    what_if: tuple[Candidate, ...] = ()
    """The running layout and its neighbours, each as ``forerun predict`` would report it."""
    failures: tuple[str, ...] = ()
    """Parts that are absent because their computation failed, each with the reason."""

    def throughput(self, step_time_s: float, iteration: int | None = None) -> Throughput:
        """Return the rates of a step of that time, with the batch of ``iteration`` (from 1)."""
        config = self.config
        if iteration is not None:
            config = at_batch_size(config, batch_size_at(config, iteration))
        return throughput(config, step_time_s)

    def step_at(self, iteration: int) -> PredictedStep:
        """Return the modelled time of a step of this run, counted from 1."""
        size = batch_size_at(self.config, iteration)
        ratios = self.model_forecast.ratios
        if size == self.config.batch.global_batch_size or size not in ratios:
            return self.step
        return self.step.scaled(ratios[size])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer on a run after a window."""

    measured: Measurements
    end: RunEnd
    forecast: Forecast
    """Forecast to the end of the run, else of the pass over its data, else of the step only."""
    decision: Decision
    modelled: Modelled | None = None
    """None if the layout is unknown: the answer then rests on steps, batch and transfers."""
    ended: Ended | None = None
    """How the run ended; None while it goes on."""
    problems: tuple[str, ...] = ()
    transcript: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    """Lines on the end and on the next launch, once the run has ended."""

    @property
    def has_finish(self) -> bool:
        """True if the forecast reaches to the end of the run."""
        return self.end.steps_total > 0

    @property
    def known(self) -> Modelled:
        """The modelled part; raises ``CalibrationError`` if there is none."""
        if self.modelled is None:
            raise CalibrationError(
                f"the layout of run {self.measured.run_id} is not known; give a launch line "
                "instead, or config to forerun.attach and record it again"
            )
        return self.modelled

    @property
    def remaining_run(self) -> RemainingRun | None:
        """The remaining run; None at its end, or if its length or layout is unknown."""
        if self.modelled is None or not self.has_finish or self.ended is not None:
            return None
        running = self.modelled.plan.running
        restart_s = self.modelled.restart_s
        return RemainingRun.of(
            self.forecast, running.config, running.step_time_s, restart_s=restart_s
        )

    @property
    def rates(self) -> dict[str, float]:
        """Rates of the measured step, by key."""
        return self.rates_of(self.measured.step_s)

    def rates_of(self, step_time_s: float, iteration: int | None = None) -> dict[str, float]:
        """Return the rates of a step of that time, with the batch of ``iteration``, by key.

        If the layout is unknown, these are tokens or samples per second of all ranks and of one
        rank; empty if no batch was recorded either.
        """
        if self.modelled is not None:
            return self.modelled.throughput(step_time_s, iteration).rates
        unit, count = self.batch
        if not count:
            return {}
        rate = count / step_time_s
        return {f"{unit}_per_s": rate * self.measured.run.num_ranks, f"{unit}_per_s_per_gpu": rate}

    @property
    def batch(self) -> tuple[str, int]:
        """Unit and size of the batch of one rank; size 0 if no batch was recorded."""
        loop = self.measured.loop
        return ("tokens", loop.tokens) if loop.tokens else ("samples", loop.samples)

    def predicted_step(self, iteration: int) -> PredictedStep:
        """Return the predicted time of a step of this run, counted from 1."""
        ahead = self.forecast
        step = PredictedStep(
            time_s=ahead.step_time_s, low_s=ahead.single_low_s, high_s=ahead.single_high_s
        )
        if self.modelled is None:
            return step
        return step.scaled(self.modelled.model_forecast.ratio(iteration, ahead.steps_done))

    @property
    def advice(self) -> str:
        """The line of the transcript that has the advice; empty if there is none."""
        return advice_line(self.transcript)

    @property
    def decision_values(self) -> dict[str, float]:
        """The decision in numbers, by key."""
        chances = [reason.probability for reason in self.decision.reasons]
        probability = max(filter(None, chances), default=0.0)
        return {"is_stop_advised": float(self.is_stop), "stop_probability": probability}

    @property
    def decision_texts(self) -> dict[str, str]:
        """The decision, and the line on it or on the next launch, by key."""
        lines = self.closing[1:] if self.ended is not None else (self.advice,)
        advice = " · ".join(line.removeprefix(PREFIX).strip() for line in lines)
        return {"decision": self.decision.action.value, "advice": advice}

    @property
    def is_stop(self) -> bool:
        """True if the advice is to stop."""
        return self.decision.is_stop

    def to_json(self) -> JsonObject:
        """Return ``answer.json``, with every part that is known."""
        whole: JsonObject = {"forecast": self.forecast_json(), "decision": self.decision_json()}
        if self.modelled is not None:
            whole["calibration"] = self.measured.calibration.summary() | {
                "first_error_frac": self.modelled.first_error_frac,
                "error_frac": self.modelled.step.error_frac(self.measured.step_s),
            }
            whole["plan"] = self.modelled.plan.to_json()
            whole["waiting"] = self.measured.waiting.to_json()
        return whole

    def forecast_json(self) -> JsonObject:
        """Return ``forecast.json``; the end of a pass is under ``pass``, never the run's end."""
        ahead = self.forecast
        whole = forecast_json(self.end, ahead)
        whole |= self.rates_of(ahead.step_time_s, ahead.steps_done + 1)
        if (overhead := self.measured.overhead) is not None:
            whole |= overhead.values
            whole["overhead_low_frac"] = overhead.low_frac
            whole["overhead_high_frac"] = overhead.high_frac
        return whole

    def decision_json(self) -> JsonObject:
        """Return ``decision.json``."""
        modelled = self.modelled
        if modelled is None:
            details: JsonObject = {
                "throughput": dict(self.rates),
                "groups": [asdict(group) for group in self.measured.groups],
                "reason_no_finish": self.end.reason,
            }
        else:
            details = {"throughput": modelled.throughput(self.measured.step_s).to_json()}
        return self.decision.to_json() | {
            **details,
            "forecast": self.forecast_json(),
            "transcript": list(self.transcript),
            "problems": list(self.problems),
        }
