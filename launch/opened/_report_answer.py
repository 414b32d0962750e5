"""Report of a run, analysed again from its records: ``forerun report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...calib.answers.analysis import analyse, with_end
from ...calib.answers.answer import Answer
from ...calib.answers.request import Request
from ...calib.answers.transcript import with_prefix
from ...calib.errors import RecordError
from ...calib.forecast.evaluation import Evaluation
from ...calib.records.files import write_text
from ...calib.records.iso_times import stamped
from ...calib.shell import quoted
from ..known.runs import Loaded
from ..known.table_files import with_normal
from ..store.forecast_log import Logged, read_forecasts
from ..store.run_folders import SAMPLES, object_of_run, paths_of, top_of
from ..store.run_log import score_line
from ..views.answer_tables import MODEL_ERROR, forecast_tables, notes_of, tables_of
from ..views.answers import PAGE, REQUEST, SCORE, page_of, render
from ..views.table import Command, Part, ReportTable
from ._answer_types import PrintableAnswer

_BRIEF = {"step_parts": 9, "layouts": 4, "measured_step": 6, "left": 4}
"""Tables of a short report, with their maximum number of rows."""
_NEEDED = ("Problem: ", "Left out by the model: ", MODEL_ERROR)
"""Prefixes of notes that every report includes."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReportAnswer(PrintableAnswer):
    """Report of a run; without a model of its layout, based on its steps alone."""

    directory: Path
    answer: Answer
    track: Evaluation | None = None
    """Evaluation of the run's forecasts, once it has ended."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems with the records and the forecast log, such as damage."""
        return self.answer.problems

    @property
    def run_id(self) -> str:
        """Run id."""
        return self.answer.measured.run_id

    @property
    def transcript(self) -> tuple[str, ...]:
        """Lines that training prints."""
        return self.answer.transcript

    @property
    def is_stop(self) -> bool:
        """True if the advice is to stop."""
        return self.answer.is_stop

    @property
    def path(self) -> Path | None:
        """Page written by the run; None if there is none."""
        paths = paths_of(self.directory, PAGE)
        return paths[0] if paths else None

    @cached_property
    def html(self) -> str:
        """Complete page with its charts, as in ``report.html``."""
        page = page_of(top_of(self.directory)[0], self.answer)
        return render(page, directory=str(self.directory))

    def write(self, path: Path | str) -> None:
        """Write the page."""
        write_text(Path(path), self.html)

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``forerun report --json``."""
        track = {} if self.track is None else {"track": self.track.to_json()}
        return stamped({"run_id": self.run_id, **self.answer.to_json(), **track})

    def brief(self) -> Iterator[Part]:
        """Yield a report of one screen: transcript, breakdown of the step, and fastest layouts."""
        tables = self._tables()
        rows = [(table, _BRIEF[table.key]) for table in tables if table.key in _BRIEF]
        notes = [note for note in notes_of(self.answer) if note.startswith(_NEEDED)]
        yield from self._sections([replace(one, rows=one.rows[:most]) for one, most in rows], notes)
        if more := len(tables) - len(rows):
            home = quoted(str(self.directory))
            yield Command(f"{more} more tables, and all rows: forerun report {home} --full")

    def parts(self) -> Iterator[Part]:
        """Return transcript, tables and notes, as printed with ``--full``."""
        return self._sections(self._tables(), notes_of(self.answer))

    def _tables(self) -> list[ReportTable]:
        return [*tables_of(self.answer), *forecast_tables(self.track)]

    def _sections(self, tables: Sequence[ReportTable], notes: Sequence[str]) -> Iterator[Part]:
        yield "\n".join(self.transcript)
        for table in tables:
            yield ""
            yield table
        yield from notes


def make_report(directory: Path, loaded: Loaded) -> ReportAnswer:
    """Return the report of a loaded run; raises as ``analyse`` does."""
    saved = _saved_request(directory, loaded.table.run_id)
    request = saved or Request(now_unix_s=_recorded_unix_s(directory, loaded.table.run_id))
    logged = read_forecasts(top_of(directory)[0])
    answer = analyse(
        loaded.table,
        request,
        problems=(*loaded.problems, *logged.problems),
        known=loaded.known,
        directory=str(directory),
    )
    answer = _with_the_past(directory, with_normal(answer, directory), request, logged)
    if saved is None and answer.ended is None:
        known = f"from records alone, as of step {answer.forecast.steps_done:,}"
        note = f"{known}: whether the run went on is not known"
        answer = replace(answer, transcript=(*with_prefix([note]), *answer.transcript))
    return ReportAnswer(
        directory=directory,
        answer=answer,
        track=logged.track(loaded.table.run_id),
    )


def _with_the_past(directory: Path, answer: Answer, request: Request, logged: Logged) -> Answer:
    """Put the answer into the past, with scores of its predictions, if the run's end is logged."""
    run_id = answer.measured.run_id
    if (ended := logged.ended.get(run_id)) is None:
        return answer
    answer = with_end(answer, ended, request.goals, directory=str(directory))
    score: dict[str, Any] = {}
    with suppress(RecordError):
        score = object_of_run(top_of(directory)[0], SCORE, run_id) or {}
    track = logged.track(run_id)
    scores = with_prefix([score_line(score), track.line if track else ""])
    return replace(answer, transcript=(*answer.transcript, *scores))


def _saved_request(directory: Path, run_id: str) -> Request | None:
    """Return the user's request of the run; None if training stored none."""
    saved = object_of_run(top_of(directory)[0], REQUEST, run_id)
    return None if saved is None else Request.from_json(saved)


def _recorded_unix_s(directory: Path, run_id: str) -> float:
    """Return when the run's last record was written, which is about when its last step ended."""
    top, _ = top_of(directory)
    paths = [*(top / "records" / run_id).glob("*"), *paths_of(top, SAMPLES)]
    return max((path.stat().st_mtime for path in paths), default=0.0)
