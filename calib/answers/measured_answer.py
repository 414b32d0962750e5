"""The answer of a run whose layout nobody knows: from its steps, its batch and its transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ..advice.decision import Action, Decision, Rule, decide
from ..forecast.batch_ratios import PredictedStep
from ..forecast.forecast import Forecast
from ..forecast.measured_forecast import MeasuredRun, measured_forecast
from ..plain_json import JsonObject
from ..records.record_kinds import LoopRecord
from ..samples.table import SampleTable
from ..units import format_bytes, format_count, format_time
from ..workload.run_options import Goals
from .finish_line import finish_line
from .measured_groups import MeasuredGroup, measured_groups
from .request import Request
from .run_end import RunEnd, end_lines, forecast_json, run_end, undecided
from .run_measurements import (
    HookSummary,
    Overhead,
    hook_summary,
    measured_overhead,
    measured_step_s,
    recalibration_s,
)
from .transcript import NO_LAYOUT, advised, checked_line, decision_line, prefixed, run_line


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAnswer:
    """Everything that is said of such a run after a window."""

    run_id: str
    device: str
    run: MeasuredRun
    loop: LoopRecord
    end: RunEnd
    ahead: Forecast
    """To the end of the run, else of the pass over its data, else of no step: the step itself."""
    measured_step_s: float
    overhead: Overhead | None
    hooks: HookSummary
    groups: tuple[MeasuredGroup, ...]
    decision: Decision
    recalibration_s: float = 0.0
    problems: tuple[str, ...] = ()
    transcript: tuple[str, ...] = ()

    @property
    def forecast(self) -> Forecast | None:
        """Of the whole run; None where its end is not known."""
        return self.ahead if self.end.steps_total else None

    @property
    def reason_no_finish(self) -> str:
        """Why there is no forecast, and the remedy; empty where there is one."""
        return self.end.reason

    @property
    def rates(self) -> dict[str, float]:
        """Tokens or samples a second of the measured step, of all ranks and of one, by key."""
        return self.rates_of(self.measured_step_s)

    def rates_of(self, step_time_s: float) -> dict[str, float]:
        """The same of a step that takes so long; empty where the batch was not seen."""
        unit, count = self._batch
        if not count:
            return {}
        own = count / step_time_s
        return {f"{unit}_per_s": own * self.run.num_ranks, f"{unit}_per_s_per_gpu": own}

    @property
    def _batch(self) -> tuple[str, int]:
        """What a step of one rank is counted in, and how many; 0 where none was seen."""
        loop = self.loop
        return ("tokens", loop.tokens) if loop.tokens else ("samples", loop.samples)

    @property
    def advice(self) -> str:
        """The line of the transcript that says what is advised; empty where none does."""
        return advised(self.transcript)

    @property
    def is_stop(self) -> bool:
        """True where the advice is to stop."""
        return self.decision.action is Action.STOP

    def predicted_step(self, iteration: int) -> PredictedStep:
        """What a step will take; all alike."""
        return PredictedStep(
            time_s=self.ahead.step_time_s,
            low_s=self.ahead.single_low_s,
            high_s=self.ahead.single_high_s,
        )

    def again(self, request: Request) -> MeasuredAnswer:
        """The same answer at a later moment: all steps so far, the window as it was."""
        end = run_end(self.loop, request.last_step)
        ahead = measured_forecast(self.run, request, steps_total=end.horizon or request.last_step)
        decision = _decision(request, end, ahead, self.recalibration_s)
        later = replace(self, end=end, ahead=ahead, decision=decision)
        return replace(later, transcript=_transcript(later, request))

    def finish_lines(self, goals: Goals) -> tuple[str, ...]:
        """The end of the run or of the pass alone, for a later moment."""
        told = end_lines(self.end, self.ahead)[:-1]  # why there is no other was said
        return tuple(prefixed(told if self.forecast is None else [finish_line(self.ahead, goals)]))

    def to_json(self) -> JsonObject:
        """``forecast.json``: of a pass over the data under ``pass``, never as the run's end."""
        overhead = {} if self.overhead is None else self.overhead.values
        return forecast_json(self.end, self.ahead) | self.rates | overhead

    def decision_json(self) -> JsonObject:
        """``decision.json``."""
        return self.decision.to_json() | {
            "throughput": dict(self.rates),
            "forecast": self.to_json(),
            "groups": [asdict(group) for group in self.groups],
            "reason_no_finish": self.reason_no_finish,
            "transcript": list(self.transcript),
            "problems": list(self.problems),
        }


def analyse_steps(
    table: SampleTable, request: Request, *, problems: Sequence[str] = ()
) -> MeasuredAnswer:
    """The newest run of the table from its measured steps alone.

    Raises ``CalibrationError`` where fewer than two clean steps are there.
    """
    run, loop = MeasuredRun.of(table), table.loop()
    last = request.last_step or int(table.steps["step"].max()) + 1
    request = replace(request, last_step=last)
    end = run_end(loop, last)
    ahead = measured_forecast(run, request, steps_total=end.horizon or last)
    anew_s = recalibration_s(table)
    answer = MeasuredAnswer(
        run_id=table.run_id,
        device=str(table.newest("runs")["device"].iloc[0]),
        run=run,
        loop=loop,
        end=end,
        ahead=ahead,
        measured_step_s=measured_step_s(table),
        overhead=measured_overhead(table),
        hooks=hook_summary(table),
        groups=measured_groups(table, loop),
        decision=_decision(request, end, ahead, anew_s),
        recalibration_s=anew_s,
        problems=tuple(problems),
    )
    return replace(answer, transcript=_transcript(answer, request))


def _decision(request: Request, end: RunEnd, ahead: Forecast, recalibration_s: float) -> Decision:
    """By the limits that were asked for: no other layout is known."""
    if not end.steps_total:
        return undecided(end, request.goals, now_unix_s=ahead.now_unix_s)
    return decide(
        request.goals,
        forecast=ahead,
        plan=None,
        recalibration_s=recalibration_s,
        previously_met=frozenset(Rule(value) for value in request.previously_met),
    )


def _transcript(answer: MeasuredAnswer, request: Request) -> tuple[str, ...]:
    run = run_line(None, answer.run.num_ranks, answer.measured_step_s, device=answer.device)
    ends = end_lines(answer.end, answer.ahead)
    has_end, decision = answer.forecast is not None, answer.decision
    is_decided = any(reason.rule is not Rule.EVIDENCE for reason in decision.reasons)
    return tuple(
        prefixed(
            [
                f"{run} · {_rate(answer)}",
                *([finish_line(answer.ahead, request.goals)] if has_end else ends),
                *(_group_line(group, answer.measured_step_s) for group in answer.groups),
                NO_LAYOUT,
                decision_line(decision) if is_decided else "",
                checked_line(answer.hooks, answer.overhead, answer.measured_step_s, None),
            ]
        )
    )


def _rate(answer: MeasuredAnswer) -> str:
    rates, (unit, count) = answer.rates, answer._batch
    if not rates:
        return "tokens/s not known: no batch was seen in the first steps"
    rate = format_count(rates[f"{unit}_per_s"])
    return f"{rate} {unit}/s ({format_count(count)} {unit} per rank and step)"


def _group_line(group: MeasuredGroup, step_s: float) -> str:
    """A group's transfers of a step; a bound above the step itself says nothing of their time."""
    what = f"group {group.role}, {group.num_ranks} ranks"
    if group.note:
        return f"{what}: {group.note}"
    times = f"{group.calls:.3g} per step, {format_bytes(group.nbytes)}"
    if group.is_bound and group.time_s > step_s:
        return f"{what}: {group.collective} {times}, whose end is not seen"
    bound = "at most " if group.is_bound else ""
    return f"{what}: {group.collective} {times}, {bound}{format_time(group.time_s)} of transfers"
