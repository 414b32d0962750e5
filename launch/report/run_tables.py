"""The tables of a report: one definition for the terminal, Markdown and W&B."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from ...calib.answers.analysis import Answer
from ...calib.steps.estimate import Contribution
from ...calib.units import format_bytes, format_frac, format_time
from .layout_tables import layouts_table, telling_note
from .table import ReportTable, show_table
from .waiting_tables import waiting_tables

NEGLIGIBLE_S = 1e-6


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
            *windows_tables(answer),
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


def show(answer: Answer, out: Console) -> None:
    """Print transcript and tables."""
    for line in answer.transcript:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for table in report_tables(answer):
        out.print()
        show_table(table, out)
    for line in notes(answer):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


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
    if answer.mfu_frac is not None:
        rows.append(("MFU, of the measured step", "", format_frac(answer.mfu_frac)))
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


def windows_tables(answer: Answer) -> list[ReportTable]:
    """Errors of each window itself, and of what lay ahead of it."""
    scores = answer.window_scores
    own = [
        (
            str(error.window),
            str(error.num_rows),
            format_time(error.measured_s),
            *map(_percent, (error.before_frac, error.after_frac)),
            *map(_percent, (error.operator_before_frac, error.operator_after_frac)),
        )
        for error in (score.error for score in scores)
    ]
    ahead = [
        (
            str(score.error.window),
            *map(_percent, (score.next_before_frac, score.next_after_frac)),
            *map(_percent, (score.finish_before_frac, score.finish_after_frac)),
        )
        for score in scores
    ]
    return [
        ReportTable(
            key="windows",
            title="How errors moved from window to window: before each refit and after it",
            columns=(
                *("window", "rows", "measured", "step before", "step after"),
                *("ops before", "ops after"),
            ),
            rows=tuple(own),
        ),
        ReportTable(
            key="windows_ahead",
            title="How well each window foretold the next one's step and the finish",
            columns=(
                *("window", "next step before", "next step after"),
                *("finish before", "finish after"),
            ),
            rows=tuple(ahead),
        ),
    ]


def notes(answer: Answer) -> list[str]:
    """What belongs below the tables, a sentence each."""

    def found() -> Iterator[str]:
        if answer.waiting.slow.reason:
            yield f"Stragglers: {answer.waiting.slow.reason}."
        if answer.config.unmodelled:
            yield "Left out by the model: " + ", ".join(answer.config.unmodelled) + "."
        if answer.history.errors:
            against = "the newest forecast of it" if answer.ended_unix_s is None else "the end"
            yield (
                "Windows: before is by those up to then, after is with the window's own rows. "
                "Next step: that of the window after it. Finish: how much too late it was "
                f"foretold, as a share of the whole run, against {against}."
            )
        if informative := telling_note(answer.plan):
            yield informative
        if answer.config.device == "cpu":
            yield "Measured on a CPU stand-in: for correctness and dry runs, not for speed."
        for problem in answer.problems:
            yield f"Problem: {problem}"

    return list(found())


def _percent(frac: float | None) -> str:
    return "" if frac is None else format_frac(frac, signed=True)


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
