"""The answer on a run after a window: one document with optional parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ..advice.decision import Decision
from ..advice.explanation import Explanation
from ..advice.planning import Candidate, Plan
from ..drift.stragglers import WaitingReport
from ..errors import CalibrationError
from ..fit.calibration import Calibration
from ..forecast.batch_ratios import PredictedStep
from ..forecast.evaluation import Ended
from ..forecast.forecast_record import Forecast
from ..forecast.modelled import ModelForecast, at_batch_size, batch_size_at
from ..forecast.rates import RemainingRun, Throughput, throughput
from ..forecast.remaining_run import MeasuredRun
from ..lint.linter import Lint
from ..plain_json import JsonObject
from ..records.iso_times import Action
from ..records.record_kinds import LoopRecord
from ..samples.table import SampleTable
from ..steps.estimate import StepEstimate
from ..units import format_bytes, format_time
from ..workload.collectives import GroupRole
from ..workload.config import RunConfig
from .routing import MeasuredRouting
from .run_end import RunEnd, forecast_json
from .run_measurements import HookSummary, Overhead
from .transcript import PREFIX, advice_line

_UNMEASURED = (
    "its transfers are not measured: DistributedDataParallel issues them in C++, where only "
    "PyTorch's flight recorder sees them, and it recorded nothing here; set "
    "TORCH_FR_BUFFER_SIZE=2000 to switch it on"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroup:
    """One kind of transfer in groups of one role, per step and rank."""

    role: str
    num_ranks: int
    collective: str = ""
    calls: float = 0.0
    nbytes: float = 0.0
    time_s: float = 0.0
    is_bound: bool = False
    """``time_s`` is an upper bound, as the end of some transfers was not recorded."""
    note: str = ""
    """Unmeasured parts and the reason; empty if everything was measured."""

    def line(self, step_s: float) -> str:
        """Return the transfers of a step in words, without a time bound that exceeds the step."""
        what = f"group {self.role}, {self.num_ranks} ranks"
        if self.note:
            return f"{what}: {self.note}"
        times = f"{self.calls:.3g} per step, {format_bytes(self.nbytes)}"
        if self.is_bound and self.time_s > step_s:
            return f"{what}: {self.collective} {times}, whose end is not recorded"
        bound = "at most " if self.is_bound else ""
        return f"{what}: {self.collective} {times}, {bound}{format_time(self.time_s)} of transfers"


def measured_groups(table: SampleTable, loop: LoopRecord) -> tuple[MeasuredGroup, ...]:
    """Return the groups measured in the newest window.

    A group that is known only from the model's wrapper has a note instead of transfers.
    """
    rows = table.collectives
    rows = rows[(rows["run_id"] == table.run_id) & ~rows["is_probe"]]
    rows = rows[rows["window"] == rows["window"].max()]
    # Count a transfer once for all of its recorded ranks; a size may be recorded on one rank or in
    # one step only.
    here = rows[["num_ranks", "num_seen"]].min(axis=1)
    seen = rows.groupby(["role", "num_ranks", "kind"])["num_seen"].transform("max")
    calls = rows["count"] * here / (rows["num_steps"].max() * seen).clip(lower=1)
    rows = rows.assign(calls=calls, nbytes=rows["nbytes"] * calls, time_s=rows["time_s"] * calls)
    groups = [
        MeasuredGroup(
            role=str(role),
            num_ranks=int(num_ranks),
            collective=str(kind),
            calls=float(part["calls"].sum()),
            nbytes=float(part["nbytes"].sum()),
            time_s=float(part["time_s"].sum()),
            is_bound=bool(part["is_bound"].any()),
        )
        for (role, num_ranks, kind), part in rows.groupby(["role", "num_ranks", "kind"], sort=True)
    ]
    if loop.num_replicas > 1 and not groups:
        size = format_bytes(loop.grad_nbytes)
        note = f"gradients of {size} are averaged in every step; {_UNMEASURED}"
        groups.append(
            MeasuredGroup(role=GroupRole.DP.value, num_ranks=loop.num_replicas, note=note)
        )
    return tuple(groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modelled:
    """Part of an answer that needs models: the running layout, its step, and other layouts."""

    config: RunConfig
    calibration: Calibration
    running_estimate: StepEstimate
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
    skew_s: Mapping[int, float]
    waiting: WaitingReport
    first_error_frac: float | None = None
    """Error of the step as modelled after the run's first window; None if not known."""
    routing: MeasuredRouting | None = None
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

    run_id: str
    device: str
    run: MeasuredRun
    loop: LoopRecord
    end: RunEnd
    forecast: Forecast
    """Forecast to the end of the run, else of the pass over its data, else of the step only."""
    measured_step_s: float
    overhead: Overhead | None
    hooks: HookSummary
    decision: Decision
    recalibration_s: float = 0.0
    modelled: Modelled | None = None
    """None if the layout is unknown: the answer then rests on steps, batch and transfers."""
    groups: tuple[MeasuredGroup, ...] = ()
    """Groups of ranks and their transfers if the layout is unknown; else empty."""
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
                f"the layout of run {self.run_id} is not known; give a launch line instead, or "
                "config to forerun.attach and record it again"
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
        return self.rates_of(self.measured_step_s)

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
        return {f"{unit}_per_s": rate * self.run.num_ranks, f"{unit}_per_s_per_gpu": rate}

    @property
    def batch(self) -> tuple[str, int]:
        """Unit and size of the batch of one rank; size 0 if no batch was recorded."""
        loop = self.loop
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
        return self.decision.action is Action.STOP

    def to_json(self) -> JsonObject:
        """Return ``answer.json``, with every part that is known."""
        whole: JsonObject = {"forecast": self.forecast_json(), "decision": self.decision_json()}
        if self.modelled is not None:
            whole["calibration"] = self.modelled.calibration.summary() | {
                "first_error_frac": self.modelled.first_error_frac,
                "error_frac": self.modelled.step.error_frac(self.measured_step_s),
            }
            whole["plan"] = self.modelled.plan.to_json()
            whole["waiting"] = self.modelled.waiting.to_json()
        return whole

    def forecast_json(self) -> JsonObject:
        """Return ``forecast.json``; the end of a pass is under ``pass``, never the run's end."""
        ahead = self.forecast
        whole = forecast_json(self.end, ahead)
        whole |= self.rates_of(ahead.step_time_s, ahead.steps_done + 1)
        if self.overhead is not None:
            whole |= self.overhead.values
            whole["overhead_low_frac"] = self.overhead.low_frac
            whole["overhead_high_frac"] = self.overhead.high_frac
        return whole

    def decision_json(self) -> JsonObject:
        """Return ``decision.json``."""
        modelled = self.modelled
        if modelled is None:
            details: JsonObject = {
                "throughput": dict(self.rates),
                "groups": [asdict(group) for group in self.groups],
                "reason_no_finish": self.end.reason,
            }
        else:
            details = {"throughput": modelled.throughput(self.measured_step_s).to_json()}
        return self.decision.to_json() | {
            **details,
            "forecast": self.forecast_json(),
            "transcript": list(self.transcript),
            "problems": list(self.problems),
        }
