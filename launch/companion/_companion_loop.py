"""Event loop of the companion: reads hook records, answers, logs, sends orders to training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...calib.advice.decision import Decision
from ...calib.answers.analysis import analyse, finish_lines, with_end, with_new_forecast
from ...calib.answers.answer import Answer
from ...calib.answers.request import Request
from ...calib.drift.monitor import Drift
from ...calib.errors import CalibrationError, ForerunError
from ...calib.forecast.evaluation import Ended, Evaluation
from ...calib.forecast.modelled import batch_levels
from ...calib.forecast.remaining_run import MeasuredRun, measured_forecast
from ...calib.forecast.remaining_schedule import step_groups
from ...calib.records.iso_times import Action
from ...calib.samples.recent import RecentWindows
from ...calib.samples.store import RunReader
from ...calib.timeline.items import measured_spans
from ...calib.workload.run_options import OnAdvice
from ...hooks.process.settings import RESTART_WINDOWS, CompanionSettings
from ..known.machine import absent_in
from ..known.runs import EarlierRuns
from ..known.table_files import with_normal
from ..sinks.registry import AllSinks
from ..sinks.sink import Sink
from ..store.launch_files import REQUEST_RULE, STOP_REQUEST
from ..store.place import Place, place_of
from ..store.run_folders import finite_number, read_object
from ..store.run_log import LoggedStep, RunLog, score_line, write_steps
from ..views.answer_tables import summary_values, tables_of, wandb_tables
from ..views.answers import write_answer, write_end, write_forecast, write_page, write_score
from ._drift_watch import DriftWatch
from ._forecasting import (
    AnalysisInterval,
    AnswerCost,
    ForecastSchedule,
    ObservedRun,
    ReadEnergy,
    open_meter,
)
from ._log_lines import WriteGuard, log_line, print_lines

_ALERTING = (OnAdvice.ALERT, OnAdvice.STOP)
PATIENCE_S = 30.0
"""Longest wait for other ranks' files after a window has closed here."""
LOOK_EVERY_S = 1.0
"""Polling interval for those files."""
MIN_REMAINING_S = 20.0
"""Remaining run time required for another window: with regular steps, ranks agree on its first
step 12 s ahead."""
MOST_WINDOWS = 3
"""Maximum number of windows requested in one run to confirm advice."""


class CompanionLoop:
    """Turns events into transcript, files and sink values.  Reads no clock; callers pass the
    time."""

    def __init__(
        self,
        companion_settings: CompanionSettings,
        *,
        open_sink: Callable[[CompanionSettings], Sink] | None = None,
        read_energy: ReadEnergy | None = None,
        give_order: Callable[[dict[str, Any]], object] = lambda order: None,
        has_memory: Callable[[], bool] = lambda: True,
        waiting_steps: Callable[[], Sequence[dict[str, Any]]] = lambda: (),
    ) -> None:
        settings, rank = companion_settings.settings, companion_settings.settings.rank
        self._companion_settings, self._place = companion_settings, place_of(companion_settings)
        request_fields = {"goals": settings.goals, "host_argv": settings.host_argv}
        # Placeholder; callers pass the time.
        self._base_request = Request(
            now_unix_s=0.0,
            num_restarts=companion_settings.num_restarts,
            answers_every=settings.every,
            **request_fields,
        )
        self._has_memory, self._waiting_steps = has_memory, waiting_steps
        self._orders = AdviceOrders(settings.on_advice, give_order)
        self._requests = StopRequests(
            self._place, give_order, since_unix_s=companion_settings.requests_since_unix_s
        )
        self._sink = (
            open_sink(companion_settings) if open_sink else AllSinks(companion_settings, log_line)
        )
        self._writing = WriteGuard()
        self._steps = RunLog(self._sink.step)
        self._steps.num_steps = companion_settings.num_steps
        self._watching = DriftWatch(
            self._place,
            notify=self._report_drift,
            writing=self._writing,
            give_order=lambda order: None if self._is_about_to_end else give_order(order),
        )
        meter = read_energy or open_meter(rank.local_world_size, os.environ)
        self._run = ObservedRun(num_nodes=rank.world_size / rank.local_world_size, meter=meter)
        self._forecasts, self._analysis_interval = ForecastSchedule(), AnalysisInterval()
        self._earlier = EarlierRuns(settings.directory)
        self._reader = RunReader(settings.directory, rank.run_id)
        self._windows, self._closed = RecentWindows(), ClosedWindows()
        self._absent: frozenset[int] = frozenset()
        self._answer: Answer | None = None
        self._met: tuple[str, ...] = ()
        self._met_before = self._met
        self._next_look_unix_s = self._end_unix_s = 0.0
        self._is_over = self._has_ended = False
        self._unsaid: AnswerCost | None = None
        """Steps beside the newest answer, of which the log has not told."""

    def handle(self, event: dict[str, Any], now_unix_s: float) -> None:
        """Process one event of the training process."""
        self._analysis_interval.now(now_unix_s)
        kind = event.get("event")
        if kind == "step":
            row = LoggedStep.from_event(event)
            row = replace(row, is_disturbed=self._analysis_interval.covers(row.unix_s))
            self._run.add(row, float(event.get("unix_s") or now_unix_s))
            if self._unsaid is not None and not row.is_disturbed:
                log_line(self._unsaid.line)
                self._unsaid = None
            self._steps.add(row)
            self._rebase(self._watching.add(row))
            self._flush(is_live=not self._steps.is_first_open)
        elif kind == "phase":
            self._run.add_bracket(event)
        elif kind == "end":
            self._end_unix_s = float(event.get("unix_s") or now_unix_s)
        elif kind in ("window_closed", "probed"):
            self._analysis_interval.begin(self._run.last_unix_s or now_unix_s)
            self._unsaid = self._run.begin_answer()
            self._closed.close(event, now_unix_s, is_probed=kind == "probed")

    def poll(self, now_unix_s: float, *, is_final: bool = False) -> bool:
        """Analyse the closed window once all ranks' files are there or ``PATIENCE_S`` has passed.

        Return True if the window was handled.
        """
        self._analysis_interval.now(now_unix_s)
        self._follow_clock(now_unix_s)
        if now_unix_s < self._next_look_unix_s and not is_final:
            return False
        self._requests.look()
        self._run.read_energy(now_unix_s)
        self._next_look_unix_s = now_unix_s + LOOK_EVERY_S
        self._sink.score(self._summary())
        closed = self._closed.waiting
        if closed is None:
            self._renew_forecast(now_unix_s)
            return False
        is_patience_over = is_final or now_unix_s - closed.since_unix_s > PATIENCE_S
        if not self._has_memory():
            return False
        try:
            self._windows.add(self._reader.read())
            is_complete = self._windows.is_complete(closed.window, without=self._absent)
            if not is_complete and not is_patience_over:
                return False
            # Files on other nodes, which are waited for once.
            self._absent = self._windows.lacking(closed.window)
            self._analyse(closed, now_unix_s)
        except ForerunError as err:
            # Incomplete files may still be completed; an analysis that failed would fail again.
            if not is_patience_over and not self._windows.is_complete(closed.window):
                return False
            self._settle(f"no answer for window {closed.window}: {err}")
            self._forecast_from_steps()
        else:
            self._settle()
        return True

    def _forecast_from_steps(self) -> None:
        """Log when the run ends by its steps alone, which need no disk, if nothing was answered."""
        options, request = self._companion_settings, self._run.request(self._base_request, 0.0)
        if self._answer is not None or self._has_ended or not options.num_steps:
            return
        rank = options.settings.rank
        # As on a CPU, whose steps vary more, since no record states the device.
        run = MeasuredRun(
            started_unix_s=options.started_unix_s, num_ranks=rank.world_size, is_cpu=True
        )
        with suppress(CalibrationError):  # too few steps
            ahead = measured_forecast(run, request, steps_total=options.num_steps)
            log_line(f"{ahead.finish_text} by its steps alone")

    def _follow_clock(self, now_unix_s: float) -> None:
        """Tolerate the wall clock moving backwards."""
        if now_unix_s < self._next_look_unix_s - LOOK_EVERY_S:
            self._next_look_unix_s = now_unix_s
            if (closed := self._closed.waiting) is not None:
                self._closed.waiting = replace(closed, since_unix_s=now_unix_s)

    def finish(
        self, now_unix_s: float, *, is_analysed: bool = True, has_ended: bool = True
    ) -> None:
        """Analyse the last window if there is time for it, and write the final results; without
        ``has_ended``, the run may go on."""
        self._has_ended = has_ended
        closed, last = self._closed.waiting, self._run.last_iteration
        # A window that the end has cut is nothing to act on, and shorter than those before.
        is_cut = self._answer is not None and closed is not None and closed.last_iteration >= last
        if is_analysed and not is_cut:
            self.poll(now_unix_s, is_final=True)
        self.write_final_results(now_unix_s, has_ended=has_ended)

    def write_final_results(self, now_unix_s: float, *, has_ended: bool = True) -> None:
        """Write buffered rows and the score of the predictions; only the first call has an
        effect."""
        if self._is_over:
            return
        self._is_over = True
        if (closed := self._closed.waiting) is not None:
            log_line(
                f"window {closed.window} has no answer: training ended before it could be "
                f"analysed; the last answer stands, and `forerun report {self._place.asked}` "
                "analyses the records"
            )
        self._flush(is_final=True)
        place, track = self._place, None
        ended = self._ended(now_unix_s)
        if has_ended or ended.is_complete:
            track = self._writing(lambda: self._steps.close(place, ended.end_unix_s))
            self._close_answer(ended)
        if place.is_newest_run:
            self._write_last(place, track)
        log_line(score_line(self._steps.score.summary()))
        log_line(track.line if track else "")
        self._sink.close(self._summary())

    def _ended(self, now_unix_s: float) -> Ended:
        """Return the end of the run, now if training has sent none."""
        num_steps = self._answer.end.steps_total if self._answer is not None else 0
        end_unix_s = self._end_unix_s or now_unix_s
        ended = self._steps.ended(self._place.run_id, end_unix_s, num_steps)
        # Steps after the first window wait for its answer, and are not in the log of steps yet.
        return replace(ended, iteration=max(ended.iteration, self._run.last_iteration))

    def _close_answer(self, ended: Ended) -> None:
        """Put the answer into the past, and log what is new of it."""
        if (answer := self._answer) is not None:
            self._answer = self._in_the_past(answer, ended)
            print_lines(() if answer.ended is not None else self._answer.closing)

    def _in_the_past(self, answer: Answer, ended: Ended) -> Answer:
        goals, directory = self._base_request.goals, str(self._place.asked)
        return with_end(answer, ended, goals, directory=directory)

    def _summary(self) -> dict[str, Any]:
        """Return the score of predictions so far and the throughput of the measured step."""
        score = self._steps.score.summary()
        if self._run.answers:
            score["answers_time_s"] = self._run.answers_s
        return score if self._answer is None else score | summary_values(self._answer)

    def _write_last(self, place: Place, track: Evaluation | None) -> None:
        answer = self._answer
        score = {**self._steps.score.summary(), **self._closed.counts()}
        if place.directory.is_dir():  # else the ranks have reported that nothing can be written
            self._writing(lambda: write_steps(place, self._steps))
        if answer is not None or track is not None:
            self._writing(lambda: write_score(place, score, track))
        if answer is not None:
            self._writing(lambda: write_end(place, answer))
            self._writing(lambda: write_page(place, answer, self._steps))

    def report_dropped_events(self, num_events: int) -> None:
        """Log that ``num_events`` events were dropped."""
        log_line(
            f"{num_events} training events arrived faster than they could be read: these steps are "
            "not scored; training and records are not affected"
        )

    def _keep(self, write: Callable[[], object]) -> None:
        """Write answers, unless a newer run of the launch has written its own."""
        if self._place.is_newest_run:
            self._writing(write)

    def _report_drift(self, line: str) -> None:
        log_line(line)
        if self._companion_settings.settings.on_advice in _ALERTING:
            self._sink.alert("forerun: drift", line)

    @property
    def _is_about_to_end(self) -> bool:
        """True if a window requested now would start too late to be useful."""
        seen = self._answer
        if seen is None or not seen.has_finish:
            return False
        return seen.forecast.finish_p50_unix_s - self._run.last_unix_s < MIN_REMAINING_S

    def _rebase(self, drift: Drift | None) -> None:
        """Base forecasts on the steps since a drift, without those recorded in windows."""
        if drift is None:
            return
        self._run.rebase(drift.since_iteration)
        self._forecasts.rebase()
        if self._answer is not None and (modelled := self._answer.modelled) is not None:
            view = replace(modelled.model_forecast, recorded_s=())
            self._answer = replace(self._answer, modelled=replace(modelled, model_forecast=view))

    def _renew_forecast(self, now_unix_s: float) -> None:
        """Renew the forecast between windows from all steps so far, without a new fit."""
        answer, run = self._answer, self._run
        # A further pass over the data is recognised only at its first step.
        if answer is None or run.last_iteration == answer.end.pass_end:
            return
        request = self._forecasts.due(answer.end, run, self._base_request, now_unix_s)
        if request is None:
            return
        self._answer = renewed_answer = with_new_forecast(answer, request)
        self._keep(lambda: write_forecast(self._place, renewed_answer))
        if self._forecasts.is_news(renewed_answer.forecast):
            print_lines(finish_lines(renewed_answer, self._base_request.goals))

    def _analyse(self, closed: Closed, now_unix_s: float) -> None:
        # Exclude steps after the window, even those already received: the answer is scored on them.
        known = self._run.request(
            self._base_request, now_unix_s, last_iteration=closed.last_iteration
        )
        met = self._met_before if closed.is_repeated else self._met
        lacks = absent_in(self._place.directory, self._place.run_id)
        request = replace(known, previously_met=met, absent=lacks)
        run = self._windows.newest
        table = self._earlier.join(self._windows.table())
        self._watching.window_closed(table, closed.window, unix_s=request.now_unix_s)
        problems = (*run.problems, *self._closed.problems())
        requests = [request]

        def at_forecast() -> Request:
            """Return the request at the newest step, which came while the models were fitted."""
            rows = [LoggedStep.from_event(event) for event in self._waiting_steps()]
            requests.append(self._run.with_waiting(request, rows))
            return requests[-1]

        is_first = self._answer is None
        seen = self._answer.modelled if self._answer else None
        answer = analyse(
            table,
            request,
            problems=problems,
            first_error_frac=seen.first_error_frac if seen else None,
            known=self._earlier.steps(table) if table.is_described else (),
            directory=str(self._place.asked),
            at_forecast=at_forecast,
        )
        request = requests[-1]
        self._answer = answer = with_normal(answer, self._place.asked)
        if self._has_ended:
            self._answer = answer = self._in_the_past(answer, self._ended(now_unix_s))
        self._forecasts.answered(answer.forecast, self._run.last_iteration)
        spans = tuple(measured_spans(run)) if answer.modelled is not None else ()
        self._keep(lambda: write_answer(self._place, request, answer, spans, self._steps))
        if is_first:
            log_line(self._place.take_latest())
        self._pass_on(answer, is_repeated=closed.is_repeated)

    def _pass_on(self, answer: Answer, *, is_repeated: bool) -> None:
        """Pass a window's answer, possibly a repeated one, to log, sinks, alerts and training."""
        if not is_repeated:
            self._met_before = self._met
        self._met = tuple(sorted(rule.value for rule in answer.decision.rules_met))
        print_lines(answer.transcript)
        log_line(f"report: {self._place.shown}/report.html · {self._sink.where}")
        iteration = self._steps.next_iteration or self._run.last_iteration
        self._sink.tables(iteration, wandb_tables(tables_of(answer)))
        self._orders.follow(answer.decision)
        if answer.is_stop and self._companion_settings.settings.on_advice in _ALERTING:
            self._sink.alert("forerun: stop advised", answer.advice)

    def _settle(self, problem: str = "") -> None:
        """Finish the pending window and release the rows buffered for it."""
        log_line(problem)
        self._closed.settle()
        self._analysis_interval.over()
        self._steps.is_first_open = False
        modelled = self._answer.modelled if self._answer is not None else None
        if modelled is not None and (total := modelled.config.cadence.train_iters):
            groups = step_groups(total, batch_levels(modelled.config))
            self._steps.size_ends = tuple(group.end for group in groups)
            self._steps.num_steps = total
        for drift in self._watching.begin(self._steps.size_ends):
            self._rebase(drift)
        self._flush()

    def _flush(self, **how: bool) -> None:
        self._steps.flush(self._answer, self._watching.values, **how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Closed window whose answer is pending."""

    window: int
    last_iteration: int
    since_unix_s: float
    is_repeated: bool = False
    """True if it was answered before, and probes have arrived since."""


class ClosedWindows:
    """Tracks the pending closed window and counts those skipped while another was analysed."""

    def __init__(self) -> None:
        self.waiting: Closed | None = None
        self._newest = -1
        self._skipped: list[int] = []

    def close(self, event: dict[str, Any], now_unix_s: float, *, is_probed: bool = False) -> None:
        """Record that a window closed, or was probed after closing; it replaces a pending one."""
        window, waiting = int(event["window"]), self.waiting
        if is_probed and waiting is not None and waiting.window > window:
            return  # the newer window's answer includes these probes
        start = window - window % RESTART_WINDOWS
        if waiting is not None and waiting.window < start:  # the training loop was restarted
            self._skipped = [*self._skipped_before(waiting.window), waiting.window]
            self._newest = waiting.window
        self.waiting = Closed(
            window=window,
            last_iteration=int(event["last_step"]) + 1,
            since_unix_s=now_unix_s,
            is_repeated=is_probed and waiting is None,
        )

    def settle(self) -> None:
        """Mark the pending window as finished, answered or not."""
        if self.waiting is not None:
            self._skipped = self._skipped_before(self.waiting.window)
            self._newest = self.waiting.window
        self.waiting = None

    def problems(self) -> tuple[str, ...]:
        """Return a line for the pending answer on windows skipped so far; empty if none were.

        >>> windows = ClosedWindows()
        >>> for window in (0, 3):
        ...     windows.settle()
        ...     windows.close({"window": window, "last_step": 10}, 0.0)
        ...     [problem.partition(":")[0] for problem in windows.problems()]
        []
        ['2 windows have no answer of their own, the last of them window 2']
        >>> windows.close({"window": RESTART_WINDOWS, "last_step": 10}, 0.0)  # begun again
        >>> windows.problems()[0].partition(":")[0]
        '3 windows have no answer of their own, the last of them window 3'
        """
        skipped = [] if self.waiting is None else self._skipped_before(self.waiting.window)
        if not skipped:
            return ()
        count = "1 window has" if len(skipped) == 1 else f"{len(skipped)} windows have"
        return (
            f"{count} no answer of their own, the last of them window {skipped[-1]}: an earlier "
            "window was still being analysed; this answer includes their samples",
        )

    def counts(self) -> dict[str, int]:
        """Return the number of skipped windows for the score; empty if none."""
        return {"num_skipped_windows": len(self._skipped)} if self._skipped else {}

    def _skipped_before(self, window: int) -> list[int]:
        first = max(self._newest + 1, window - window % RESTART_WINDOWS)
        return [*self._skipped, *range(first, window)]


class AdviceOrders:
    """Sends orders that follow from advice: a stop, or the second consecutive window that advice
    needs."""

    def __init__(self, on_advice: OnAdvice, give: Callable[[dict[str, Any]], object]) -> None:
        self._may_stop = on_advice is OnAdvice.STOP
        self._give = give
        self._num_windows = 0

    def follow(self, decision: Decision) -> None:
        """Send the order that follows from a decision; a stop only if the user has opted in."""
        if decision.action is Action.STOP:
            if self._may_stop:
                met = [reason for reason in decision.reasons if reason.is_met]
                order = {"order": "stop", "rule": met[0].rule.value if met else ""}
                order["reason"] = "; ".join(reason.text for reason in met)
                self._give({**order, "command": list(decision.command)})
        elif decision.rules_met and self._num_windows < MOST_WINDOWS:
            self._num_windows += 1
            rules = ", ".join(sorted(rule.value for rule in decision.rules_met))
            self._give({"order": "window", "reason": f"{rules}: a second window must confirm it"})


class StopRequests:
    """Turns a stop request for this launch into one order to all ranks."""

    def __init__(
        self, place: Place, give: Callable[[dict[str, Any]], object], *, since_unix_s: float = 0.0
    ) -> None:
        self._place = place
        self._since_unix_s = since_unix_s
        self._give = give
        self._is_given = False

    def look(self) -> None:
        """Forward a request from this launch's wrapper."""
        if self._is_given:
            return
        value = read_object(self._place.path / STOP_REQUEST)
        if value is None or value.get("launch_id") != self._place.launch_id:
            return
        # Launch names can be reused, so an older launch's wrapper may have left this request.
        if finite_number(value.get("unix_s")) < self._since_unix_s:
            return
        self._is_given = True
        self._give({"order": "stop", "rule": REQUEST_RULE, "reason": str(value.get("reason", ""))})
