"""The tables on waiting: for transfers and for each other, slow ranks, clocks."""

from __future__ import annotations

from ...calib.answers.analysis import Answer
from ...calib.stragglers.straggler import Straggler
from ...calib.stragglers.waiting import Clock
from ...calib.units import format_frac, format_time
from .table import ReportTable

NUM_RANKS = 64
"""Ranks that are listed: those that wait most."""
PPM = 1e6


def waiting_tables(answer: Answer) -> list[ReportTable]:
    """Waiting by role and by rank; who stands out, and clocks that are not one, where there are."""
    return [_roles(answer), _ranks(answer), _slow(answer), _clocks(answer)]


def _roles(answer: Answer) -> ReportTable:
    step_s = answer.waiting.step_s
    rows = [
        (
            found.role,
            format_time(found.transfer_s),
            format_time(found.wait_s),
            format_frac((found.transfer_s + found.wait_s) / step_s),
        )
        for found in answer.waiting.roles
    ]
    return ReportTable(
        key="waiting",
        title="Waiting: how long a rank stands still in a step, by group",
        columns=("group", "for the transfer", "for later ranks", "of the step"),
        rows=tuple(rows),
    )


def _ranks(answer: Answer) -> ReportTable:
    most = sorted(answer.skew_s.items(), key=lambda item: -item[1])[:NUM_RANKS]
    last = answer.waiting.last_frac
    rows = [
        (str(rank), format_time(wait_s), format_frac(last[rank]) if rank in last else "")
        for rank, wait_s in sorted(most)
    ]
    return ReportTable(
        key="skew",
        title="Waiting for later ranks, per step",
        columns=("rank", "waits", "last to come"),
        rows=tuple(rows),
    )


def _slow(answer: Answer) -> ReportTable:
    step_s = answer.waiting.step_s
    return ReportTable(
        key="slow_ranks",
        title="Waiting: stragglers, who hold the others up",
        columns=(
            *("ranks", "stage", "group", "kind", "slower than its peers", "costs"),
            *("90 %", "of the step"),
        ),
        rows=tuple(_slow_row(found, step_s) for found in answer.waiting.slow.slow),
    )


def _slow_row(found: Straggler, step_s: float) -> tuple[str, ...]:
    return (
        ", ".join(map(str, found.ranks)),
        str(found.stage) if found.stage >= 0 else "",
        found.role,
        found.kind.value,
        format_time(found.excess_s),
        format_time(found.cost_s),
        f"{format_time(found.low_s)} to {format_time(found.high_s)}",
        format_frac(found.cost_s / step_s),
    )


def _clocks(answer: Answer) -> ReportTable:
    return ReportTable(
        key="clocks",
        title="Waiting: clocks ahead of the first rank's",
        columns=("rank", "ahead", "give or take", "drift"),
        rows=tuple(_clock_row(clock) for clock in answer.waiting.clocks),
    )


def _clock_row(clock: Clock) -> tuple[str, ...]:
    if not clock.is_reached:
        return (str(clock.rank), "not known", "", "")
    return (
        str(clock.rank),
        f"{clock.offset_s:.6f} s",
        format_time((clock.high_s - clock.low_s) / 2),
        f"{clock.drift_frac * PPM:+.1f} ppm",
    )
