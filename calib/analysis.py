"""The whole chain in one call: sample table -> calibration -> step -> forecast -> decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from .advice.decision import Action, Decision, Limits, Rule, decide
from .advice.forecast import Extra, Forecast, forecast, num_left
from .advice.overhead import Overhead, overhead
from .advice.plan import Plan, plan
from .advice.transcript import HookSummary, StepSummary, transcript_lines
from .errors import CalibrationError
from .fit.calibration import Calibration, calibrate
from .fit.training import measured_operators
from .samples.table import SampleTable
from .timeline.step import StepEstimate, estimate_step
from .units import HOUR_S
from .workload.config import RunConfig
from .workload.memory import memory_offset
from .workload.operators import OperatorKind

SCHEMA = 1
_HOST_KINDS = (OperatorKind.HOST_MICROBATCH.value, OperatorKind.HOST_STEP.value)


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
class WindowError:
    """How well a window was known: modelled over measured step, minus one.

    ``before_frac`` is from the models of the windows before it (None for the first),
    ``after_frac`` from the models refitted with its own rows; ``operator_*`` the same as the
    median absolute error over its operators.
    """

    window: int
    num_rows: int
    measured_s: float
    before_frac: float | None
    after_frac: float
    operator_before_frac: float | None
    operator_after_frac: float


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
    cost = _overhead(table)
    waiting_s, perturbed_s = mean_waiting_s(table), perturbation_s(table, cost)
    rest_s = waiting_s - perturbed_s
    modelled = PredictedStep(
        time_s=own.time_s + rest_s, low_s=own.low_s + rest_s, high_s=own.high_s + rest_s
    )
    lines = transcript_lines(
        hooks=hooks,
        overhead=cost,
        step=StepSummary(
            measured_s=measured_s,
            modelled_s=modelled.time_s,
            low_s=modelled.low_s,
            high_s=modelled.high_s,
        ),
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
        problems=tuple(problems),
        transcript=tuple(lines),
    )


def measured_step_s(table: SampleTable) -> float:
    """Median bare step of the newest window, seconds; all clean steps where none was bare."""
    newest = _only_windows(table, _windows(table)[-1:])
    times = newest.step_times_s(is_hooked=False)
    if not times.size:
        times = newest.step_times_s()
    if not times.size:
        raise CalibrationError("no unflagged step in the newest window; record more steps")
    return float(np.median(times))


def memory_offset_nbytes(table: SampleTable) -> int | None:
    """What the measured peak of the newest run had beyond its estimate; None where not measured."""
    peaks = table.memory_peak_nbytes()
    return memory_offset(table.config(), max(peaks.values())) if peaks else None


def mean_waiting_s(table: SampleTable) -> float:
    """Waiting for later ranks per step in the newest window, mean over ranks, seconds.

    A rank's step is its own work plus its waiting; averaged over ranks that is an identity, so
    this much of a step belongs to no operator.  Waiting of stages for each other is the timeline's.
    """
    rows = table.skew[(table.skew["run_id"] == table.run_id) & (table.skew["role"] != "pp")]
    rows = rows[rows["window"] == rows["window"].max()]
    return float(rows["wait_s"].sum()) / max(1, rows["rank"].nunique())


def perturbation_s(table: SampleTable, cost: Overhead | None) -> float:
    """What hooks slow a step down by, seconds, beyond the time inside them, which is taken off.

    Operators are timed in hooked steps, while the bare ones are what the run is made of.
    """
    if cost is None:
        return 0.0
    inside = table.phases[table.phases["name"].isin(["forward-backward", "optimizer"])]
    hooked = table.steps[table.steps["is_clean"] & table.steps["is_hooked"]]
    known_s = float(hooked["hook_s"].median())
    known_s += float(inside.groupby(["rank", "step"])["hook_s"].sum().median())
    bare = table.steps[table.steps["is_clean"] & ~table.steps["is_hooked"]]
    return max(0.0, cost.overhead_frac * float(bare["time_s"].median()) - known_s)


def hook_summary(table: SampleTable) -> HookSummary:
    """Installed and fired hooks of the newest window, operator kinds and groups seen."""
    rows = table.coverage[table.coverage["run_id"] == table.run_id]
    rows = rows[rows["window"] == rows["window"].max()]
    kinds = set(table.operators["kind"]) - set(_HOST_KINDS)
    groups = set(zip(table.collectives["role"], table.collectives["num_ranks"], strict=True))
    return HookSummary(
        num_fired=int(rows["fired"].clip(upper=rows["installed"]).sum()),
        num_installed=int(rows["installed"].sum()),
        num_operator_kinds=len(kinds),
        num_groups=len(groups),
    )


def window_history(table: SampleTable) -> tuple[WindowError, ...]:
    """The error of each window under the models before it and after it, oldest first."""
    windows = _windows(table)
    out: list[WindowError] = []
    for place, window in enumerate(windows):
        here = _only_windows(table, [window])
        after = _Fit.of(_only_windows(table, windows[: place + 1]))
        before = _Fit.of(_only_windows(table, windows[:place])) if place else None
        measured_s = measured_step_s(here)
        out.append(
            WindowError(
                window=int(window),
                num_rows=len(here.samples),
                measured_s=measured_s,
                before_frac=before.step_error_frac(measured_s) if before else None,
                after_frac=after.step_error_frac(measured_s),
                operator_before_frac=before.operator_error_frac(here) if before else None,
                operator_after_frac=after.operator_error_frac(here),
            )
        )
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    calibration: Calibration
    own_s: float

    @staticmethod
    def of(table: SampleTable) -> _Fit:
        config = table.config()
        calibration = calibrate(table, device=config.device)
        rest_s = mean_waiting_s(table) - perturbation_s(table, _overhead(table))
        own_s = estimate_step(config, calibration).time_s + rest_s
        return _Fit(calibration=calibration, own_s=own_s)

    def step_error_frac(self, measured_s: float) -> float:
        """Modelled over measured step, minus one."""
        return self.own_s / measured_s - 1

    def operator_error_frac(self, table: SampleTable) -> float:
        """Median absolute error of the operators that the table measured."""
        rows = measured_operators(table)
        if not rows:
            return 0.0
        found = self.calibration.operators(list(rows))
        actual = np.array([row.time_s for row in rows.values()])
        return float(np.median(np.abs(found.time_s / actual - 1)))


def _windows(table: SampleTable) -> list[int]:
    steps = table.steps[table.steps["run_id"] == table.run_id]
    windows = sorted(int(w) for w in steps[steps["is_clean"]]["window"].unique())
    if not windows:
        raise CalibrationError("no window has an unflagged step; record more steps")
    return windows


def _only_windows(table: SampleTable, windows: Sequence[int]) -> SampleTable:
    def keep(frame: Any) -> Any:
        return frame[(frame["run_id"] == table.run_id) & frame["window"].isin(list(windows))]

    return replace(
        table,
        samples=keep(table.samples),
        steps=keep(table.steps),
        phases=keep(table.phases),
        skew=keep(table.skew),
        coverage=keep(table.coverage),
        windows=keep(table.windows),
    )


def _overhead(table: SampleTable) -> Overhead | None:
    """Of all windows together; None where there are too few steps of either kind."""
    steps = table.steps[(table.steps["run_id"] == table.run_id) & table.steps["is_clean"]]
    by_step = steps.groupby("step", sort=True).agg(
        time_s=("time_s", "median"), is_hooked=("is_hooked", "max")
    )
    try:
        return overhead(by_step["time_s"].to_numpy(), by_step["is_hooked"].to_numpy())
    except CalibrationError:
        return None


def _forecast(
    table: SampleTable, config: RunConfig, request: Request, own: StepEstimate
) -> Forecast:
    recorded = tuple(table.step_times_s(is_hooked=False).tolist())
    times = max(request.step_times_s, recorded, key=len)
    runs = table.runs[table.runs["run_id"] == table.run_id]
    started_unix_s = float(runs["started_unix_s"].min())
    cadence = config.cadence
    last = request.last_step or int(table.steps["step"].max())
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
