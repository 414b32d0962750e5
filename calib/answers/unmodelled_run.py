"""What can be said of a run whose layout is not known: its steps, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass

from ..forecast.forecast import Forecast, forecast
from ..samples.table import SampleTable
from .analysis import Request
from .run_measurements import hook_summary, measured_overhead, measured_step_s
from .transcript import PREFIX, StepSummary, transcript_lines

_NOTE = "no layout is modelled: steps, phases and collectives are recorded, nothing is compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAnswer:
    """An answer without a model of the run; ``forecast`` is None where its length is unknown."""

    run_id: str
    forecast: Forecast | None
    transcript: tuple[str, ...]


def analyse_steps(table: SampleTable, request: Request, *, num_steps: int) -> MeasuredAnswer:
    """The newest run of the table from its measured steps alone, of ``num_steps`` (0: unknown).

    Evaluations and saves that are still to come are not in the forecast.  Raises
    ``CalibrationError`` where fewer than two clean steps are there.
    """
    recorded = tuple(table.step_times_s(is_hooked=False).tolist())
    last = request.last_step or int(table.steps["step"].max()) + 1
    ahead = None
    if num_steps:
        started_unix_s = float(table.runs["started_unix_s"].min())
        ahead = forecast(
            now_unix_s=request.now_unix_s,
            steps_done=last,
            steps_total=max(num_steps, last),
            elapsed_s=max(0.0, request.now_unix_s - started_unix_s),
            step_times_s=max(request.step_times_s, recorded, key=len),
        )
    lines = transcript_lines(
        hooks=hook_summary(table),
        overhead=measured_overhead(table),
        step=StepSummary(measured_s=measured_step_s(table)),
        forecast=ahead,
    )
    return MeasuredAnswer(
        run_id=table.run_id, forecast=ahead, transcript=(*lines, f"{PREFIX} {_NOTE}")
    )
