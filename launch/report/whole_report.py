"""The whole report of a run, its layout known or not: tables, notes, and Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from ...calib.answers import Answer
from .measured_tables import measured_tables
from .run_tables import notes, report_tables
from .table import ReportTable, markdown_lines

Pictures = Mapping[str, tuple[str, str]]
"""Title and text of pictures by the paths of their files."""
_NO_PICTURES: Pictures = {}


def tables_of(answer: Answer) -> list[ReportTable]:
    """Every table that has something to show."""
    modelled = answer.modelled
    return measured_tables(answer) if modelled is None else report_tables(answer, modelled)


def notes_of(answer: Answer) -> list[str]:
    """What belongs below the tables, a sentence each."""
    told = [] if answer.modelled is None else notes(answer, answer.modelled)
    return [*told, *(f"Problem: {problem}" for problem in answer.problems)]


def markdown(answer: Answer, pictures: Pictures = _NO_PICTURES) -> str:
    """The report as Markdown, pictures first."""
    lines = ["# Forerun report", "", f"Run `{answer.run_id}`, {answer.device}.", "", "```"]
    lines += [*answer.transcript, "```", ""]
    for path, (title, text) in pictures.items():
        lines += [f"![{title}]({path})", "", f"{title}: {text}.", ""]
    for table in tables_of(answer):
        lines += [*markdown_lines(table), ""]
    lines += notes_of(answer)
    return "\n".join(lines) + "\n"
