"""The tables of a report: one definition for the terminal, Markdown and W&B."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from ..calib.advice.plan import Plan
from ..calib.analysis import Answer
from ..calib.fit.estimates import Source
from ..calib.steps.estimate import Contribution
from ..calib.units import format_bytes, format_frac, format_time
from .report_table import ReportTable
from .report_waiting import waiting_tables

NUM_LAYOUTS = 10
NEGLIGIBLE_S = 1e-6
WIDTH = 140


def report_tables(answer: Answer) -> list[ReportTable]:
    """Where the step goes, operators, collectives, layouts, windows, waiting."""
    return [
        table
        for table in (
            _parts(answer),
            _work(answer),
            _operators(answer),
            _collectives(answer),
            layouts_table(answer.plan),
            _windows(answer),
            *waiting_tables(answer),
        )
        if table.rows
    ]


def markdown(answer: Answer) -> str:
    """The whole report as Markdown."""
    lines = ["# Forerun report", "", f"Run `{answer.run_id}`, {answer.config.device}.", "", "```"]
    lines += [*answer.transcript, "```", ""]
    for table in report_tables(answer):
        lines += [f"## {table.title}", "", _row(table.columns)]
        lines += [_row(("---",) * len(table.columns)), *map(_row, table.rows), ""]
    lines += notes(answer)
    return "\n".join(lines) + "\n"


def console() -> Console:
    """Standard output; where it is no terminal, wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def show(answer: Answer, out: Console) -> None:
    """Print transcript and tables."""
    for line in answer.transcript:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in report_tables(answer):
        out.print()
        show_table(table, out)
    for line in notes(answer):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def show_table(table: ReportTable, out: Console) -> None:
    """Print one table."""
    drawn = Table(
        title=table.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for place, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    out.print(drawn)


def layouts_table(plan: Plan, top: int = NUM_LAYOUTS) -> ReportTable:
    """The running layout and the fastest others."""
    rows = [
        (
            candidate.label + (" (running)" if candidate is plan.own else ""),
            format_time(candidate.step_time_s),
            f"{format_time(candidate.low_s)} to {format_time(candidate.high_s)}",
            format_frac(candidate.time_frac, signed=True),
            format_bytes(candidate.memory.total_nbytes),
            candidate.verdict.value,
            _provenance(candidate.source_frac),
        )
        for candidate in (plan.own, *plan.candidates[:top])
    ]
    return ReportTable(
        key="layouts",
        title="Layouts",
        columns=("layout", "step", "90 %", "against running", "memory", "fits", "rests on"),
        rows=tuple(rows),
    )


def _parts(answer: Answer) -> ReportTable:
    own = answer.own
    parts = [(part.value, time_s) for part, time_s in own.parts_s.items()]
    parts.append(("waiting for later ranks", answer.waiting_s))
    parts.append(("slowed down by hooks", -answer.perturbation_s))
    total_s = answer.modelled_step.time_s
    rows = [
        (name, format_time(time_s), format_frac(time_s / total_s))
        for name, time_s in parts
        if abs(time_s) > NEGLIGIBLE_S
    ]
    return ReportTable(
        key="step_parts",
        title=f"Modelled step by part (stage {own.critical_stage})",
        columns=("part", "time", "share"),
        rows=tuple(rows),
    )


def _work(answer: Answer) -> ReportTable:
    found = sorted(answer.own.contributions, key=lambda c: -c.time_s)
    total = sum(c.time_s for c in found) or 1.0
    return ReportTable(
        key="work",
        title="What the critical stage works on",
        columns=("work", "phase", "times a step", "time a step", "share", "source"),
        rows=tuple(_contribution(c, total) for c in found[:20]),
    )


def _contribution(work: Contribution, total_s: float) -> tuple[str, ...]:
    return (
        work.name,
        work.phase,
        str(work.count),
        format_time(work.time_s),
        format_frac(work.time_s / total_s),
        work.source.value,
    )


def _operators(answer: Answer) -> ReportTable:
    rows = []
    for row in answer.calibration.summary()["operators"]:
        efficiency = row.get("efficiency_frac")
        error = row.get("left_out_error_frac")
        rows.append(
            (
                f"{row['kind']} {row['phase']}",
                str(row["num_rows"]),
                str(row["num_shapes"]),
                row["model"],
                "" if efficiency is None else format_frac(efficiency),
                "" if error is None else format_frac(error),
            )
        )
    return ReportTable(
        key="operators",
        title="Operator models",
        columns=("operator", "rows", "shapes", "model", "law over measured", "left-out error"),
        rows=tuple(rows),
    )


def _collectives(answer: Answer) -> ReportTable:
    rows = [
        (
            f"{row['collective']} {row['role']} x{row['num_ranks']}",
            str(row["num_rows"]),
            str(row["num_sizes"]),
            format_time(row["alpha_s"]),
            f"{format_bytes(row['bytes_per_s'])}/s",
        )
        for row in answer.calibration.summary()["collectives"]
    ]
    return ReportTable(
        key="collectives",
        title="Collective models",
        columns=("collective", "rows", "sizes", "alpha", "bandwidth"),
        rows=tuple(rows),
    )


def _windows(answer: Answer) -> ReportTable:
    rows = [
        (
            str(error.window),
            str(error.num_rows),
            format_time(error.measured_s),
            _percent(error.before_frac),
            _percent(error.after_frac),
            _percent(error.operator_before_frac),
            _percent(error.operator_after_frac),
        )
        for error in answer.history.errors
    ]
    return ReportTable(
        key="windows",
        title="How the error moved from window to window",
        columns=(
            "window",
            "rows",
            "measured",
            "step error before",
            "after refit",
            "operator error before",
            "after refit",
        ),
        rows=tuple(rows),
    )


def telling_note(plan: Plan) -> str:
    """How many layouts were ranked, and which of them to try in order to know the others better."""
    labels = ", ".join(candidate.label for candidate in plan.telling)
    if not labels:
        return ""
    return f"{plan.num_layouts} other layouts ranked; to know them better, run steps of {labels}."


def notes(answer: Answer) -> list[str]:
    """What belongs below the tables, a sentence each."""

    def found() -> Iterator[str]:
        if answer.waiting.slow.reason:
            yield f"Slow ranks: {answer.waiting.slow.reason}."
        if answer.config.unmodelled:
            yield "Left out by the model: " + ", ".join(answer.config.unmodelled) + "."
        if telling := telling_note(answer.plan):
            yield telling
        if answer.config.device == "cpu":
            yield "Measured on a CPU stand-in: for correctness and dry runs, not for speed."
        for problem in answer.problems:
            yield f"Problem: {problem}"

    return list(found())


def _provenance(shares: Mapping[Source, float]) -> str:
    items = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{frac * 100:.0f} % {src.value}" for src, frac in items if frac >= 0.005)


def _percent(frac: float | None) -> str:
    return "" if frac is None else format_frac(frac, signed=True)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
