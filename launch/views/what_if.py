"""The page's section of choices: menus whose results are computed beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from ...calib.advice.planning import Candidate
from ...calib.answers.what_if import predict_words
from ...calib.shell import joined, quoted
from ...calib.workload.choices import LABELLED_CHOICES, axis_value
from ...calib.workload.config import RunConfig
from .answer_tables import AGAINST_CELLS, FITS_CELLS, STEP_CELLS
from .table import ReportTable, count_cell, table_of, whole_cell


def section(choices: Sequence[Candidate], directory: str) -> dict[str, Any] | None:
    """Return the table of choices, the script and its data; None with fewer than two choices.

    The first choice is the running layout.
    """
    if len(choices) < 2:
        return None
    running, rows = choices[0].config, _menu_rows(choices)
    table = _menu_table(rows)
    option_words = [predict_words(row.config, running) for row in rows]
    option_texts = [None if words is None else joined(words) for words in option_words]
    data = {
        "command": f"forerun predict {quoted(directory)}",
        "running": rows.index(choices[0]),
        "rows": [[*row, words] for row, words in zip(table.rows, option_texts, strict=True)],
    }
    script = resources.files(__package__ or "").joinpath("templates").joinpath("what_if.js")
    return {
        "table": table,
        "num_menus": NUM_MENUS,
        "data": data,
        "script": script.read_text(encoding="utf-8"),
    }


def _menu_rows(rows: Sequence[Candidate]) -> list[Candidate]:
    """Return distinct choices in menu order: ranks, layout by first appearance, micro-batch."""
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


def _menu_table(rows: Sequence[Candidate]) -> ReportTable:
    """Return the results of each choice; the first ``NUM_MENUS`` columns are the choice."""
    return table_of(
        "what_if",
        f"All {len(rows)} choices",
        rows,
        {
            **_MENUS,
            **STEP_CELLS,
            **AGAINST_CELLS,
            "tokens/s": lambda row: count_cell(row.throughput.tokens_per_s),
            **FITS_CELLS,
        },
    )


def _split_words(config: RunConfig) -> str:
    """Return the label of a layout without the settings of other menus."""
    of_layout = (one for one in LABELLED_CHOICES if one.name not in ("mbs", "recompute"))
    return " ".join(filter(None, (one.word(config) for one in of_layout))) or "no parallelism"


_MENUS: Mapping[str, Callable[[Candidate], str]] = {
    "GPUs": lambda row: whole_cell(row.config.parallelism.num_ranks),
    "layout": lambda row: _split_words(row.config),
    "micro-batch": lambda row: whole_cell(row.config.batch.micro_batch_size),
    "recompute": lambda row: axis_value(row.config, "recompute"),
}
NUM_MENUS = len(_MENUS)
