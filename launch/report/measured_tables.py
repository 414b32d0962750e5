"""The tables of the report of a run whose layout nobody knows."""

from __future__ import annotations

from collections.abc import Iterator

from ...calib.answers import Answer
from ...calib.units import format_count, format_time
from .cells import bytes_cell, count_cell, time_cell, whole_cell
from .table import ReportTable, table_of


def measured_tables(answer: Answer) -> list[ReportTable]:
    """The step, what is left, and the groups."""
    step = ReportTable(
        key="measured_step",
        title="The measured step",
        columns=("figure", "value"),
        rows=tuple(_step_rows(answer)),
    )
    left = table_of(
        "left",
        "What is left of the run" if answer.end.steps_total else "What is left of this pass",
        answer.forecast.parts if answer.end.horizon else (),
        {
            "part": lambda part: part.name,
            "how many": lambda part: count_cell(part.num_left),
            "time": lambda part: time_cell(part.time_s),
            "source": lambda part: part.provenance,
        },
    )
    groups = table_of(
        "groups",
        "Groups of ranks, and their transfers per rank and step",
        answer.groups,
        {
            "group": lambda group: group.role,
            "ranks": lambda group: whole_cell(group.num_ranks),
            "transfer": lambda group: group.collective or "not measured",
            "calls": lambda group: count_cell(group.calls) if group.calls else "",
            "bytes": lambda group: bytes_cell(group.nbytes) if group.calls else "",
            "time": lambda group: (
                f"{'at most ' * group.is_bound}{format_time(group.time_s)}" if group.calls else ""
            ),
        },
    )
    return [table for table in (step, left, groups) if table.rows]


def _step_rows(answer: Answer) -> Iterator[tuple[str, str]]:
    ahead = answer.forecast
    yield "step", format_time(answer.measured_step_s)
    yield (
        "90 % of single steps",
        f"{format_time(ahead.single_low_s)} to " + format_time(ahead.single_high_s),
    )
    for name, value in answer.rates.items():
        unit, _, of_one = name.partition("_per_s")
        yield f"{unit}/s" + (" per rank" if of_one else ""), format_count(value)
    if answer.overhead is not None:
        yield "hooked steps longer by", answer.overhead.text
