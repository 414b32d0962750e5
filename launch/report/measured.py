"""Files of a run whose layout nobody knows."""

from __future__ import annotations

from ...calib.answers.measured_answer import MeasuredAnswer
from ...calib.answers.request import Request
from ...calib.samples.store import write_table
from ...calib.samples.table import SampleTable
from ...hooks.process.host_wandb import FORECAST
from ..directory.forecast_log import append_forecast
from ..directory.publishing import Place
from ..directory.run_folders import SAMPLES
from ..directory.run_log import RunLog
from .answers import REQUEST, do_all, write_object
from .page import write_page

DECISION = "decision.json"


def write_measured(
    place: Place,
    table: SampleTable,
    request: Request,
    answer: MeasuredAnswer,
    run_log: RunLog | None = None,
) -> None:
    """Write every artefact that such a run has.

    Those that can be written are, whatever becomes of the others; then the first ``OSError``.
    """
    do_all(
        lambda: write_table(place.path / SAMPLES, table),
        lambda: write_object(place, REQUEST, request.to_json()),
        lambda: write_measured_forecast(place, answer),
        lambda: write_object(place, DECISION, answer.decision_json()),
        lambda: write_page(place, table, answer, run_log=run_log),
    )


def write_measured_forecast(place: Place, answer: MeasuredAnswer) -> None:
    """Write a forecast, also one that was made between windows."""
    write_object(place, FORECAST, answer.to_json())
    append_forecast(place, answer)
