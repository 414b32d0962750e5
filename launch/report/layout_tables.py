"""A plan as a table and a sentence: what ``forerun plan`` prints, and a part of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...calib.advice import Candidate, Plan, axis_value, left_out, recompute_text
from ...calib.fit.estimates import Source
from ...calib.forecast import RunLeft
from ...calib.memory import Verdict
from ...calib.search import layout_label
from ...calib.workload import RunConfig
from .cells import (
    against_cell,
    bytes_cell,
    count_cell,
    probability_cell,
    span_cell,
    time_cell,
    whole_cell,
)
from .table import ReportTable, table_of
from .throughput_cells import COST, SPARE, TOKENS, throughput_cells

if TYPE_CHECKING:
    from ...calib.advice import MicroBatchAdvice

# A page's worth; --top shows more.
NUM_LAYOUTS = 10


def layouts_table(
    plan: Plan,
    top: int = NUM_LAYOUTS,
    *,
    title: str = "Layouts",
    own_name: str = "running",
    left: RunLeft | None = None,
) -> ReportTable:
    """The running layout and the fastest others; layout, step, its interval and memory stay where
    the screen is narrow, and the verdict where a row does not fit.  With ``left`` each says what
    the rest of the run would take."""
    rows = (plan.own, *plan.candidates[:top])
    is_memory_short = any(row.verdict in (Verdict.TIGHT, Verdict.DOES_NOT_FIT) for row in rows)
    numbers = {id(row): whole_cell(number) for number, row in enumerate(rows)}
    return table_of(
        "layouts",
        title,
        rows,
        {
            "#": lambda row: numbers[id(row)],
            "layout": lambda row: row.label + f" ({own_name})" * (row is plan.own),
            "step": lambda row: time_cell(row.step_time_s),
            "90 %": lambda row: span_cell(row.low_s, row.high_s),
            **({"against running": against_cell} if plan.own.is_comparable else {}),
            **throughput_cells(rows, left),
            "memory": lambda row: bytes_cell(row.memory.total_nbytes),
            "fits": lambda row: row.verdict.value,
            "rests on": lambda row: _provenance(row.source_frac),
        },
    ).sparing(
        *(
            "rests on",
            *SPARE,
            *(() if is_memory_short else ("fits",)),
            TOKENS,
            COST,
            "against running",
        ),
        late=("memory", "90 %", "fits"),
        folded="layout",
    )


def micro_batch_table(advice: MicroBatchAdvice | None) -> ReportTable:
    """For each micro-batch that fits in the measured memory the best recompute; may be empty."""
    choices = advice.choices if advice is not None else ()
    best = advice.best if advice is not None else None
    return table_of(
        "micro_batches",
        "Micro-batch and recompute in the measured memory",
        choices,
        {
            "micro-batch": lambda row: (
                str(row.config.batch.micro_batch_size) + (" (best)" if row is best else "")
            ),
            "recompute": lambda row: recompute_text(row.config),
            "step": lambda row: time_cell(row.step_time_s),
            "90 %": lambda row: span_cell(row.low_s, row.high_s),
            "against running": against_cell,
            **throughput_cells(choices, None),
            "memory": lambda row: bytes_cell(row.memory.total_nbytes),
            "fits with probability": lambda row: probability_cell(row.fit_probability or 0.0),
        },
    ).sparing(*SPARE, TOKENS, "against running", late=("memory", "90 %"), folded="recompute")


def what_if_rows(rows: Sequence[Candidate]) -> list[Candidate]:
    """In the order of menus: ranks, layout as it first comes, micro-batch; no choice twice."""
    places: dict[str, int] = {}
    for row in rows:
        places.setdefault(_split_words(row.config), len(places))
    first = {tuple(cell(row) for cell in _MENUS.values()): row for row in reversed(rows)}
    return sorted(
        first.values(),
        key=lambda row: (
            row.config.parallelism.num_ranks,
            places[_split_words(row.config)],
            row.config.batch.micro_batch_size,
            axis_value(row.config, "recompute"),
        ),
    )


def what_if_table(rows: Sequence[Candidate]) -> ReportTable:
    """What each choice gives; the first ``NUM_MENUS`` columns are what is chosen."""
    return table_of(
        "what_if",
        f"All {len(rows)} choices",
        rows,
        {
            **_MENUS,
            "step": lambda row: time_cell(row.step_time_s),
            "90 %": lambda row: span_cell(row.low_s, row.high_s),
            "against running": against_cell,
            "tokens/s": lambda row: count_cell(row.throughput.tokens_per_s),
            "memory": lambda row: bytes_cell(row.memory.total_nbytes),
            "fits": lambda row: row.verdict.value,
        },
    )


def _split_words(config: RunConfig) -> str:
    """The label of a layout without what other menus choose."""
    others = f"mbs{config.batch.micro_batch_size}", axis_value(config, "recompute")
    words = [word for word in layout_label(config).split() if word not in others]
    return " ".join(words) or "no parallelism"


_MENUS: Mapping[str, Callable[[Candidate], str]] = {
    "GPUs": lambda row: whole_cell(row.config.parallelism.num_ranks),
    "layout": lambda row: _split_words(row.config),
    "micro-batch": lambda row: whole_cell(row.config.batch.micro_batch_size),
    "recompute": lambda row: axis_value(row.config, "recompute"),
}
NUM_MENUS = len(_MENUS)


def search_note(plan: Plan) -> str:
    """How many layouts these are the best of, what became of the others, and whether it is proven;
    by numbers of GPUs where there are several."""
    texts = [
        f"{proof.text} on {number} GPUs" if len(plan.proofs) > 1 else proof.text
        for number, proof in plan.proofs.items()
    ]
    return f"searched: {'; '.join(texts)}" if texts else ""


def left_out_note(plan: Plan) -> str:
    """Which layouts the program of the run cannot be asked for, and why; empty where it can be
    asked for all."""
    reason = left_out(plan.own.config)
    number = sum(proof.cut.get(reason, 0) for proof in plan.proofs.values())
    return f"{number:,} layouts left out: {reason}" if reason and number else ""


def telling_note(plan: Plan) -> str:
    """Which layouts to try in order to know which is the fastest."""
    labels = ", ".join(candidate.label for candidate in plan.worth_measuring)
    if not labels:
        return ""
    return f"to know which is fastest, run steps of {labels}"


def routing_note(plan: Plan) -> str:
    """What the layouts rest on where tokens are routed: by degree of expert parallelism; empty
    without experts."""
    found = {one.config.parallelism.ep: one.routing for one in (plan.own, *plan.candidates)}
    told = {ep: one for ep, one in sorted(found.items()) if one is not None and ep > 1}
    if not told:
        return ""
    texts = {ep: one.text.removeprefix("routing ") for ep, one in told.items()}
    return "routing: " + "; ".join(f"ep {ep} {text}" for ep, text in texts.items())


def _provenance(shares: Mapping[Source, float]) -> str:
    items = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{frac * 100:.0f} % {src.value}" for src, frac in items if frac >= 0.005)
