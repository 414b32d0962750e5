"""What the companion does with events: reads what the hooks wrote, answers, and logs to W&B."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..calib.analysis import Answer, Request, analyse
from ..calib.errors import ForerunError
from ..calib.samples.records import WindowRecord
from ..calib.samples.run import RunRecords
from ..calib.samples.store import read_run
from ..calib.samples.table import SampleTable, build_table
from ..calib.timeline.measured import measured_spans
from ..calib.unmodelled_run import analyse_steps
from ..hooks.settings import OnAdvice, WandbMode
from .answers import wandb_tables, write_answer, write_measured, write_score
from .scoring import Score, StepRow
from .wandb_sink import NoSink, Sink, open_sink

PATIENCE_S = 30.0
"""How long the other ranks' files are waited for after a window has closed here."""
LOOK_EVERY_S = 1.0
"""How often they are looked for."""
NUM_KEPT_STEPS = 1000
"""Bare steps that a forecast rests on: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the session told us on the command line."""

    directory: Path
    run_id: str
    settings: dict[str, Any]

    @property
    def request(self) -> Request:
        """The user's wishes in the form that the core takes; the clock is read by the caller."""
        get = self.settings.get
        return Request(
            now_unix_s=0.0,
            deadline_unix_s=get("deadline_unix_s"),
            budget_hours=get("budget_hours"),
            restart_cost_s=float(get("restart_cost_s", 600.0)),
            confidence=float(get("confidence", 0.9)),
            gpus=tuple(get("gpus") or ()),
            host_argv=tuple(get("host_argv") or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closed:
    """A window that waits for its answer."""

    window: int
    last_iteration: int
    since_unix_s: float
    is_again: bool = False
    """It had its answer; probes have come since."""


class Beside:
    """Events in; transcript, files and W&B out.  It reads no clock."""

    def __init__(
        self, options: Options, *, open_sink: Callable[[Options], Sink] | None = None
    ) -> None:
        self._options = options
        self._sink = (open_sink or sink_of)(options)
        self._held: list[StepRow] = []
        self._score = Score()
        self._answer: Answer | None = None
        self._met: tuple[str, ...] = ()
        self._met_before: tuple[str, ...] = ()
        self._bare: deque[StepRow] = deque(maxlen=NUM_KEPT_STEPS)
        self._pending: _Closed | None = None
        self._next_look_unix_s = 0.0
        self._is_first_open = True
        self._brackets: dict[str, list[float]] = {}
        self._last_iteration = 0

    def handle(self, event: dict[str, Any], now_unix_s: float) -> None:
        """Take one event of the training process."""
        kind = event.get("event")
        if kind == "step":
            row = StepRow.from_event(event)
            self._last_iteration = row.iteration
            if not row.is_hooked and not row.flags:
                self._bare.append(row)
            self._held.append(row)
            self._flush()
        elif kind == "phase":
            self._brackets.setdefault(event["name"], []).append(float(event["time_s"]))
        elif kind in ("window_closed", "probed"):
            self._pending = _Closed(
                window=int(event["window"]),
                last_iteration=int(event["last_step"]) + 1,
                since_unix_s=now_unix_s,
                is_again=kind == "probed" and self._pending is None,
            )

    def poll(self, now_unix_s: float, *, is_final: bool = False) -> None:
        """Analyse the closed window once all ranks' files are there, or patience is over."""
        if self._pending is None or (now_unix_s < self._next_look_unix_s and not is_final):
            return
        self._next_look_unix_s = now_unix_s + LOOK_EVERY_S
        closed = self._pending
        window, since = closed.window, closed.since_unix_s
        try:
            run = read_run(self._options.directory, self._options.run_id)
        except ForerunError as err:
            if is_final or now_unix_s - since > PATIENCE_S:
                self._settle(f"no answer for window {window}: {err}")
            return
        is_patience_over = is_final or now_unix_s - since > PATIENCE_S
        if not is_window_complete(run, window) and not is_patience_over:
            return
        try:
            self._analyse(run, closed, now_unix_s)
        except ForerunError as err:
            self._settle(f"no answer for window {window}: {err}")
        else:
            self._settle()

    def finish(self, now_unix_s: float) -> None:
        """Last words: what is still held, and how the predictions did."""
        self.poll(now_unix_s, is_final=True)
        self._flush(is_final=True)
        if self._answer is not None:
            write_score(self._options.directory, self._score.summary(), self._answer.run_id)
        for line in self._score.lines():
            say(line)
        self._sink.close(self._score.summary())

    def _analyse(self, run: RunRecords, closed: _Closed, now_unix_s: float) -> None:
        # Steps after the window are what the answer is scored on, also those that came meanwhile.
        known = [row.time_s for row in self._bare if row.iteration <= closed.last_iteration]
        request = replace(
            self._options.request,
            now_unix_s=now_unix_s,
            last_step=self._last_iteration,
            step_times_s=tuple(known),
            eval_times_s=tuple(self._brackets.get("eval", ())),
            save_times_s=tuple(self._brackets.get("save-checkpoint", ())),
            previously_met=self._met_before if closed.is_again else self._met,
        )
        table = build_table(run)
        if not run.configs:
            self._say_measured(table, request)
            return
        answer = analyse(table, request, problems=run.problems)
        self._answer = answer
        if not closed.is_again:
            self._met_before = self._met
        self._met = tuple(sorted(rule.value for rule in answer.decision.rules_met))
        directory = self._options.directory
        write_answer(directory, table, request, answer, measured_spans(run))
        for line in answer.transcript:
            print(line, flush=True)
        where = f"{directory}/report.md · decision.json · timeline.json.gz"
        say(f"report: {where} · W&B: {self._sink.where}")
        self._sink.tables(self._logged_iteration(), wandb_tables(answer))
        if answer.is_stop and self._options.settings.get("on_advice") == OnAdvice.ALERT.value:
            self._sink.alert("forerun: stop advised", answer.transcript[-1])

    def _say_measured(self, table: SampleTable, request: Request) -> None:
        """The answer of a run whose layout is not known."""
        num_steps = int(self._options.settings.get("num_steps") or 0)
        measured = analyse_steps(table, request, num_steps=num_steps)
        write_measured(self._options.directory, table, request, measured)
        for line in measured.transcript:
            print(line, flush=True)

    def _settle(self, problem: str = "") -> None:
        """The pending window is done with: held rows may go."""
        if problem:
            say(problem)
        self._pending = None
        self._is_first_open = False
        self._flush()

    def _logged_iteration(self) -> int:
        return self._held[0].iteration if self._held else self._last_iteration

    def _flush(self, *, is_final: bool = False) -> None:
        """Log held rows in order; rows after the first window wait for its prediction."""
        while self._held:
            row = self._held[0]
            if row.is_after_window and self._is_first_open and not is_final:
                return
            self._held.pop(0)
            values = {"step_time_s": row.time_s}
            if row.is_after_window and self._answer is not None:
                values |= self._score.add(row, self._answer)
            self._sink.step(row.iteration, values)


def is_window_complete(run: RunRecords, window: int) -> bool:
    """True when every rank that records has closed this window."""
    closed = {
        rank
        for rank, records in run.records.items()
        if any(isinstance(r, WindowRecord) and r.window == window for r in records)
    }
    return closed.issuperset(run.recording_plan.recorders)


def say(text: str) -> None:
    """One line into the training log."""
    print(f"[forerun] {text}", flush=True)


def sink_of(options: Options) -> Sink:
    """The sink that the settings ask for; where W&B cannot be had, files go on without it."""
    settings = options.settings
    try:
        return open_sink(
            WandbMode(settings.get("wandb", "auto")),
            has_host_run=bool(settings.get("has_host_wandb")),
            directory=options.directory,
            run_id=options.run_id,
            config=settings,
        )
    except Exception as err:  # W&B raises its own, network and file errors alike.
        say(f"W&B is off: {err}")
        return NoSink()
