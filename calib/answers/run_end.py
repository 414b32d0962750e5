"""The end of a run: its steps, else a pass over its data, else the reason why both are unknown."""

from __future__ import annotations

from dataclasses import dataclass

from ..advice.decision import Decision, Reason, Rule
from ..forecast.forecast_record import Forecast
from ..plain_json import JsonObject
from ..records.iso_times import Action
from ..records.record_kinds import DataLength, LoopRecord
from ..workload.run_options import Goals

_REMEDY = "give --calibrate-total-steps=N, or train_iters=N to forerun.attach"
_REASONS = {
    DataLength.KNOWN: "the loop does not say how many passes over its data it makes",
    DataLength.NONE: "the loop does not say how many steps it has, and its data states no length",
    DataLength.UNSEEN: (
        "the loop does not say how many steps it has, and no torch DataLoader feeds it"
    ),
}
_OF_PASS = (
    *("steps_left", "remaining_s", "remaining_low_s", "remaining_high_s"),
    *("finish_p50_unix_s", "finish_p95_unix_s"),
)
_OF_END = (
    *_OF_PASS,
    *("steps_s", "extras_s", "failures_s", "elapsed_s", "total_s", "parts"),
    *("gpu_hours", "cost", "energy_j"),
)
"""Fields of a forecast that an unknown end leaves without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """End of a run, in steps from its first; 0 if unknown."""

    steps_total: int = 0
    pass_end: int = 0
    """End of the current pass over the data; the run may go on after it."""
    reason: str = ""
    """Reason why the end of the run is unknown, and the remedy; empty if it is known."""

    @property
    def horizon(self) -> int:
        """Last step that can be predicted; 0 if none."""
        return self.steps_total or self.pass_end


def run_end(loop: LoopRecord, steps_done: int, *, steps_total: int = 0) -> RunEnd:
    """Return the end of a loop after ``steps_done`` steps; ``steps_total`` is from the config.

    >>> loop = LoopRecord(data=DataLength.KNOWN, pass_end=100, pass_steps=100)
    >>> [run_end(loop, done).pass_end for done in (99, 100, 101)]
    [100, 200, 200]
    >>> run_end(loop, 101, steps_total=250)
    RunEnd(steps_total=250, pass_end=0, reason='')
    """
    total = steps_total or loop.num_steps
    if total:
        return RunEnd(steps_total=total)
    end = loop.pass_end
    if loop.pass_steps and steps_done >= end:
        end += ((steps_done - end) // loop.pass_steps + 1) * loop.pass_steps
    return RunEnd(pass_end=end, reason=f"{_REASONS[loop.data]}; {_REMEDY}")


def undecided(end: RunEnd, goals: Goals, *, now_unix_s: float) -> Decision:
    """Return the decision to abstain: without an end, a restart or a limit cannot be judged."""
    reason = Reason(
        rule=Rule.EVIDENCE, is_met=False, text=f"end of the run not known: {end.reason}"
    )
    return Decision(
        action=Action.ABSTAIN, reasons=(reason,), confidence=goals.confidence, now_unix_s=now_unix_s
    )


def forecast_json(end: RunEnd, ahead: Forecast) -> JsonObject:
    """Return ``forecast.json``; the end of a pass is under ``pass``, never the run's end.

    ``ahead`` reaches to the end of the run, else to that of the pass, else has step times only.
    """
    whole = ahead.to_json() | {"reason_no_finish": end.reason}
    if end.steps_total:
        return whole
    of_pass = {name: whole[name] for name in _OF_PASS}
    result = {name: value for name, value in whole.items() if name not in _OF_END}
    if end.pass_end:
        result["pass"] = {"end_step": end.pass_end, **of_pass}
    return result


def end_lines(end: RunEnd, ahead: Forecast | None) -> list[str]:
    """Return lines for a run with unknown end; ``ahead`` is the forecast of the current pass."""
    if not end.reason:
        return []
    lines = [f"end of the run not known: {end.reason}"]
    if end.pass_end and ahead is not None:
        remaining_text = f"{ahead.steps_left:,} steps left in it · the run may go on after it"
        lines.insert(0, f"this pass over the data {ahead.finish_text} · {remaining_text}")
    return lines
