"""Truth: charges to a stand-in for a device, as columns.

Nothing of Forerun is imported here or in the modules beside it (``device_*.py``).
"""

from __future__ import annotations

from typing import Any

OUTSIDE = -1
"""Number of a step, a call or a transfer if there is none."""
HOST = -2
"""Cause of a span of time in which a stream had nothing queued."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "kernels": (
        "stream", "begin_s", "end_s", "op", "nbytes", "flop", "call", "phase", "ordinal", "step"
    ),
    "transfers": (
        "group", "method", "nbytes", "sequence", "peer", "issue_s", "begin_s", "end_s", "stream",
        "is_async", "step"
    ),
    "stalls": ("stream", "begin_s", "end_s", "parts", "step"),
    "calls": ("module", "parent", "phase", "ordinal", "step", "begin_s"),
    "steps": (
        "step", "stream", "begin_s", "end_s", "records", "timed_records", "queries", "reads"
    ),
}  # fmt: skip
"""Columns of each table.  ``phase`` is ``forward``, ``backward`` or ``recompute``.

``parts`` of a stall are (begin, end, cause): the number of a transfer, ``OUTSIDE`` for computation
or ``HOST``.  ``parent`` is a call; what runs inside a call of a module without classes is not the
work of those around it.
"""


class Truth:
    """Tables by name and column; a kernel, transfer or call is numbered by its row."""

    def __init__(self) -> None:
        self.tables = {name: {column: [] for column in columns} for name, columns in
                       COLUMNS.items()}  # fmt: skip
        self.modules: list[dict[str, Any]] = []
        self.step = OUTSIDE

    def add(self, table: str, **values: Any) -> int:
        """Append a row in the current step and return its number."""
        columns = self.tables[table]
        values.setdefault("step", self.step)
        if values.keys() != columns.keys():
            raise KeyError(f"{table}: {sorted(values)} are not the columns {sorted(columns)}")
        for name, value in values.items():
            columns[name].append(value)
        return len(columns["step"]) - 1

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return a table as dictionaries."""
        columns = self.tables[table]
        names = list(columns)
        return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
