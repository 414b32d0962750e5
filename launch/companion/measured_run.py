"""What the companion says of a run whose layout nobody knows."""

from __future__ import annotations

from collections.abc import Callable

from ...calib.answers.measured_answer import MeasuredAnswer, analyse_steps
from ...calib.answers.request import Request
from ...calib.samples.table import SampleTable
from ..directory.publishing import Place
from ..directory.run_log import RunLog
from ..report.answers import write_answer, write_forecast
from ..report.page import write_page
from .forecasting import Forecasts, RunSoFar

Keep = Callable[[Callable[[], object]], None]


class MeasuredRuns:
    """Answers after a window and between windows; ``keep`` writes where that is ours to do."""

    def __init__(self, place: Place, forecasts: Forecasts, keep: Keep) -> None:
        self._place, self._forecasts, self._keep = place, forecasts, keep
        self._table: SampleTable | None = None
        self.answer: MeasuredAnswer | None = None

    def window_closed(
        self,
        table: SampleTable,
        request: Request,
        *,
        problems: tuple[str, ...],
        run_log: RunLog,
    ) -> MeasuredAnswer:
        """The answer of a window, written."""
        answer = analyse_steps(table, request, problems=problems)
        self.answer, self._table = answer, table
        self._forecasts.answered(answer.ahead, request.last_step)
        self._keep(lambda: write_answer(self._place, table, request, answer, run_log=run_log))
        return answer

    def again(self, run: RunSoFar, asked: Request, now_unix_s: float) -> tuple[str, ...] | None:
        """Lines where a new forecast was written, empty where it is no news; None: not yet."""
        answer = self.answer
        if answer is None or not answer.end.horizon:
            return None
        # Only its first step tells that another pass over the data begins.
        if run.last_iteration == answer.end.pass_end:
            return None
        steps_total = answer.end.steps_total
        request = self._forecasts.due(steps_total, run, asked, now_unix_s)
        if request is None:
            return None
        self.answer = renewed = answer.again(request)
        self._keep(lambda: write_forecast(self._place, renewed))
        return renewed.finish_lines(asked.goals) if self._forecasts.is_news(renewed.ahead) else ()

    def write_last(self, run_log: RunLog) -> None:
        """The page once more, with the end."""
        table, answer = self._table, self.answer
        if table is not None and answer is not None:
            write_page(self._place, table, answer, run_log=run_log)
