"""A plan as a table and a sentence: what ``forerun plan`` prints, and a part of the report."""

from __future__ import annotations

from collections.abc import Mapping

from ...calib.advice.plan import Plan
from ...calib.fit.estimates import Source
from ...calib.units import format_bytes, format_frac, format_time
from .table import ReportTable

NUM_LAYOUTS = 10


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


def telling_note(plan: Plan) -> str:
    """How many layouts were ranked, and which of them to try in order to know the others better."""
    labels = ", ".join(candidate.label for candidate in plan.worth_measuring)
    if not labels:
        return ""
    return f"{plan.num_layouts} other layouts ranked; to know them better, run steps of {labels}."


def _provenance(shares: Mapping[Source, float]) -> str:
    items = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{frac * 100:.0f} % {src.value}" for src, frac in items if frac >= 0.005)
