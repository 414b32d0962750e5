"""The tables of a report: one definition for the terminal, Markdown and W&B."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...calib.answers import Answer, Modelled
from ...calib.drift import Clock
from ...calib.units import TERA, format_time
from .cells import Cell, bytes_cell, count_cell, frac_cell, span_cell, time_cell, whole_cell
from .layout_tables import layouts_table, micro_batch_table, telling_note
from .table import ReportTable, table_of

NEGLIGIBLE_S = 1e-6
"""Parts of a step below it are not listed."""
NUM_WORKS = 20
"""Operators and collectives that are listed: those that take most."""
NUM_RANKS = 64
"""Ranks that are listed: those that wait most."""
PPM = 1e6


def report_tables(answer: Answer, modelled: Modelled) -> list[ReportTable]:
    """Where the step goes, operators, collectives, layouts, windows, waiting."""
    return [
        table
        for table in (
            _throughput(answer, modelled),
            _parts(modelled),
            _work(modelled),
            _operators(modelled),
            _collectives(modelled),
            layouts_table(modelled.plan, left=answer.left),
            micro_batch_table(modelled.micro_batch),
            *windows_tables(answer),
            _roles(modelled),
            _ranks(modelled),
            _slow(modelled),
            _clocks(modelled),
        )
        if table.rows
    ]


def _parts(answer: Modelled) -> ReportTable:
    own, total_s = answer.own, answer.step.time_s
    parts = [(part.value, time_s) for part, time_s in own.parts_s.items()]
    parts += [
        ("waiting for later ranks", answer.waiting_s),
        ("cost of hooks, taken off", -answer.perturbation_s),
    ]
    rows = [
        (name, time_cell(time_s), frac_cell(time_s / total_s))
        for name, time_s in parts
        if abs(time_s) > NEGLIGIBLE_S
    ]
    title = f"Modelled step, {format_time(total_s)}, by part (stage {own.critical_stage})"
    columns = ("part", "time", "of the modelled step")
    return ReportTable(key="step_parts", title=title, columns=columns, rows=tuple(rows))


def _throughput(answer: Answer, modelled: Modelled) -> ReportTable:
    found = modelled.throughput(answer.measured_step_s)
    one = "rank" if answer.device == "cpu" else "GPU"
    rows = [
        ("tokens/s", count_cell(found.tokens_per_s)),
        (f"tokens/s per {one}", count_cell(found.tokens_per_s_per_gpu)),
        (f"model TFLOP/s per {one}", count_cell(found.flop_per_s_per_gpu / TERA)),
    ]
    if found.mfu_frac is not None and found.hfu_frac is not None:
        rows.append(("MFU", frac_cell(found.mfu_frac)))
        rows.append(("HFU (counts recomputed work)", frac_cell(found.hfu_frac)))
    title = f"Throughput of the measured step ({format_time(answer.measured_step_s)})"
    return ReportTable(key="throughput", title=title, columns=("rate", "value"), rows=tuple(rows))


def _work(answer: Modelled) -> ReportTable:
    found = sorted(answer.own.contributions, key=lambda work: -work.time_s)
    step_s = answer.own.time_s
    return table_of(
        "work",
        f"Work of the critical stage, in a simulated step of {format_time(step_s)}",
        found[:NUM_WORKS],
        {
            "work": lambda work: work.name,
            "phase": lambda work: work.phase,
            "times per step": lambda work: whole_cell(work.count),
            "time per step": lambda work: time_cell(work.time_s),
            "of the simulated step": lambda work: frac_cell(work.time_s / step_s),
            "source": lambda work: work.source.value,
        },
    )


def _operators(answer: Modelled) -> ReportTable:
    return table_of(
        "operators",
        "Operator models",
        answer.calibration.summary()["operators"],
        {
            "operator": lambda row: f"{row['kind']} {row['phase']}",
            "rows": lambda row: whole_cell(row["num_rows"]),
            "shapes": lambda row: whole_cell(row["num_shapes"]),
            "model": lambda row: row["model"],
            "law / measured": lambda row: frac_cell(row.get("efficiency_frac")),
            "held-out error": lambda row: frac_cell(row.get("left_out_error_frac")),
        },
    )


def _collectives(answer: Modelled) -> ReportTable:
    return table_of(
        "collectives",
        "Collective models",
        answer.calibration.summary()["collectives"],
        {
            "collective": lambda row: f"{row['collective']} {row['role']} x{row['num_ranks']}",
            "rows": lambda row: whole_cell(row["num_rows"]),
            "sizes": lambda row: whole_cell(row["num_sizes"]),
            "alpha": lambda row: time_cell(row["alpha_s"]),
            "bandwidth": lambda row: bytes_cell(row["bytes_per_s"], "/s"),
        },
    )


def windows_tables(answer: Answer) -> list[ReportTable]:
    """Errors of each window itself, and of what lay ahead of it."""
    own = table_of(
        "windows",
        "Errors from window to window, before each refit and after it",
        [score.error for score in answer.window_scores],
        {
            "window": lambda error: whole_cell(error.window),
            "rows": lambda error: whole_cell(error.num_rows),
            "measured": lambda error: time_cell(error.measured_s),
            "step before": lambda error: _signed(error.before_frac),
            "step after": lambda error: _signed(error.after_frac),
            "ops before": lambda error: _signed(error.operator_before_frac),
            "ops after": lambda error: _signed(error.operator_after_frac),
        },
    )
    ahead = table_of(
        "windows_ahead",
        "How well each window predicted the next one's step and the finish",
        answer.window_scores,
        {
            "window": lambda score: whole_cell(score.error.window),
            "next step before": lambda score: _signed(score.next_before_frac),
            "next step after": lambda score: _signed(score.next_after_frac),
            "finish before": lambda score: _signed(score.finish_before_frac),
            "finish after": lambda score: _signed(score.finish_after_frac),
        },
    )
    return [own, ahead]


def _roles(answer: Modelled) -> ReportTable:
    step_s = answer.waiting.step_s
    return table_of(
        "waiting",
        "Waiting per rank and step, by group",
        answer.waiting.roles,
        {
            "group": lambda found: found.role,
            "for the transfer": lambda found: time_cell(found.transfer_s),
            "for later ranks": lambda found: time_cell(found.wait_s),
            "of the measured step": lambda found: frac_cell(
                (found.transfer_s + found.wait_s) / step_s
            ),
        },
    )


def _ranks(answer: Modelled) -> ReportTable:
    waits, last = answer.skew_s, answer.waiting.last_frac
    most = sorted(waits, key=lambda rank: -waits[rank])[:NUM_RANKS]
    return table_of(
        "skew",
        "Waiting for later ranks, per step",
        sorted(most),
        {
            "rank": whole_cell,
            "waits": lambda rank: time_cell(waits[rank]),
            "arrives last": lambda rank: frac_cell(last.get(rank)),
        },
    )


def _slow(answer: Modelled) -> ReportTable:
    step_s = answer.waiting.step_s
    return table_of(
        "slow_ranks",
        "Waiting: stragglers, which hold up the others",
        answer.waiting.slow.slow,
        {
            "ranks": lambda found: ", ".join(map(str, found.ranks)),
            "stage": lambda found: whole_cell(found.stage) if found.stage >= 0 else "",
            "group": lambda found: found.role,
            "kind": lambda found: found.kind.value,
            "slower than its peers": lambda found: time_cell(found.excess_s),
            "costs": lambda found: time_cell(found.cost_s),
            "90 %": lambda found: span_cell(found.low_s, found.high_s),
            "of the measured step": lambda found: frac_cell(found.cost_s / step_s),
        },
    )


def _clocks(answer: Modelled) -> ReportTable:
    def where_reached(text: Callable[[Clock], str], otherwise: str = "") -> Callable[[Clock], str]:
        return lambda clock: text(clock) if clock.is_reached else otherwise

    return table_of(
        "clocks",
        "Waiting: how far clocks are ahead of the first rank's",
        answer.waiting.clocks,
        {
            "rank": lambda clock: whole_cell(clock.rank),
            "ahead": where_reached(
                lambda clock: Cell(f"{clock.offset_s:.6f} s", {" (s)": clock.offset_s}), "not known"
            ),
            "give or take": where_reached(lambda c: time_cell((c.high_s - c.low_s) / 2)),
            "drift": where_reached(
                lambda c: Cell(f"{c.drift_frac * PPM:+.1f} ppm", {" (frac)": c.drift_frac})
            ),
        },
    )


def notes(answer: Answer, modelled: Modelled) -> list[str]:
    """What should be known of the tables, a sentence each."""

    def found() -> Iterator[str]:
        if modelled.waiting.slow.reason:
            yield f"Stragglers: {modelled.waiting.slow.reason}."
        if modelled.config.unmodelled:
            yield "Left out by the model: " + ", ".join(modelled.config.unmodelled) + "."
        if modelled.history.errors:
            against = "the newest forecast of it" if answer.ended_unix_s is None else "the end"
            yield (
                "Windows: 'before' uses the windows up to then, 'after' this window's rows as "
                "well. Next step: that of the following window. Finish: how much too late it was "
                f"predicted, as a share of the whole run, against {against}."
            )
        if informative := telling_note(modelled.plan):
            yield informative
        if modelled.config.device == "cpu":
            yield "Measured on a CPU stand-in: for correctness and dry runs, not for speed."

    return list(found())


def _signed(frac: float | None) -> Cell:
    return frac_cell(frac, signed=True)
