"""Items of a step, operators and collectives, with a common name and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..fit.laws import family as operator_family
from ..marks.run_records import RunRecords
from ..records.record_kinds import PhaseRecord, StepRecord
from ..units import NS_PER_S
from ..workload.collectives import CollectiveCall, GroupRole
from ..workload.config import RunConfig
from ..workload.operators import Operator
from ..workload.ranks import position
from .programs import TaskKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Item = Operator | CollectiveCall


class Part(Enum):
    """Parts of the critical stage's time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    PP = "pp"
    DP = "dp"
    BUBBLE = "bubble"
    OPTIMIZER = "optimizer"
    HOST = "host"


PASS_PARTS = (Part.TP, Part.CP, Part.EP)
"""Parts of the transfers within a pass of a layer."""


def part_of(role: GroupRole) -> Part:
    """Return the part that a transfer within a pass belongs to."""
    if role is GroupRole.CP:
        return Part.CP
    is_expert = role in (GroupRole.EP, GroupRole.EXPERT_TP, GroupRole.EXPERT_TP_EP)
    return Part.EP if is_expert else Part.TP


def item_name(item: Item) -> str:
    """Return a short name of an operator or collective.

    >>> from ..workload.collectives import Collective
    >>> item_name(CollectiveCall(collective=Collective.SEND, role=GroupRole.PP, num_ranks=2,
    ...                          nbytes=8))
    'send:pp'
    """
    if isinstance(item, Operator):
        return item.kind.value
    return f"{item.collective.value}:{item.role.value}"


def family(item: Item) -> str:
    """Return the family of models whose errors the item shares: all linears, all transfers of one
    role...

    >>> from ..workload.collectives import Collective
    >>> family(CollectiveCall(collective=Collective.SEND, role=GroupRole.PP, num_ranks=2, nbytes=8))
    'pp'
    """
    if isinstance(item, Operator):
        return operator_family(item.kind).value
    return item.role.value


class ItemIndex:
    """Numbers items in order of first occurrence."""

    def __init__(self) -> None:
        self._places: dict[Item, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, item: Item) -> int:
        """Return the number of an item."""
        return self._places.setdefault(item, len(self._places))

    @property
    def items(self) -> tuple[Item, ...]:
        """Every item by its number."""
        return tuple(self._places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SparseRows:
    """A sparse matrix by its rows, for products with arrays on its right."""

    num_rows: int
    columns: Ints
    """Column of each entry, row by row."""
    counts: Floats
    filled: Ints
    """Rows that have entries."""
    starts: Ints
    """Index of the first entry of each filled row."""

    def __matmul__(self, values: Floats) -> Floats:
        """Return shape (rows, ...) from (columns, ...)."""
        out = np.zeros((self.num_rows, *values.shape[1:]))
        if len(self.columns):
            counts = self.counts.reshape(-1, *(1,) * (values.ndim - 1))
            out[self.filled] = np.add.reduceat(counts * values[self.columns], self.starts, axis=0)
        return out

    def entries(self, row: int) -> list[tuple[int, float]]:
        """Return the columns of one row with their counts; a column may occur several times."""
        place = int(np.searchsorted(self.filled, row))
        if place == len(self.filled) or self.filled[place] != row:
            return []
        ends = (*self.starts.tolist()[place : place + 2], len(self.columns))
        part = slice(ends[0], ends[1])
        return list(zip(self.columns[part].tolist(), self.counts[part].tolist(), strict=True))


class Sums:
    """Builder of a sparse matrix that adds up the times of items, entry by entry."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._counts: list[float] = []
        self.num_rows = 0

    def row(self) -> int:
        """Open the next row and return its number."""
        self.num_rows += 1
        return self.num_rows - 1

    def add(self, row: int, column: int, count: float = 1.0) -> None:
        """Add ``count`` of an item to a row."""
        self._rows.append(row)
        self._columns.append(column)
        self._counts.append(count)

    def extend(self, row: int, columns: Sequence[int], counts: Sequence[float]) -> None:
        """Add a count of each item to a row."""
        self._rows += [row] * len(columns)
        self._columns += columns
        self._counts += counts

    def matrix(self, *, num_rows: int | None = None) -> SparseRows:
        """Return the matrix; ``num_rows`` is needed if rows were not opened here."""
        rows = np.array(self._rows, dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        filled, starts = np.unique(rows[order], return_index=True)
        return SparseRows(
            num_rows=self.num_rows if num_rows is None else num_rows,
            columns=np.array(self._columns, dtype=np.int64)[order],
            counts=np.array(self._counts, dtype=np.float64)[order],
            filled=filled,
            starts=starts,
        )


_KINDS = {
    "forward-compute": TaskKind.FORWARD,
    "backward-compute": TaskKind.BACKWARD,
    "all-grads-sync": TaskKind.REDUCE,
    "optimizer": TaskKind.OPTIMIZER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSpan:
    """A measured phase, in seconds from the start of its step."""

    rank: int
    stage: int
    """Pipeline stage; 0 if no layout is known."""
    kind: TaskKind
    microbatch: int
    """Number of spans of its kind before it in the step."""
    start_s: float
    end_s: float


def measured_spans(run: RunRecords) -> tuple[MeasuredSpan, ...]:
    """Return the phases of the last unflagged hooked step of each rank, in seconds from that step's
    start."""
    out: list[MeasuredSpan] = []
    for rank, records in run.records.items():
        steps = [r for r in records if isinstance(r, StepRecord) and r.is_hooked and not r.flags]
        if not steps:
            continue
        last, stage = steps[-1], _stage(run.configs.get(rank), rank)
        for record in records:
            if not isinstance(record, PhaseRecord) or record.step != last.step:
                continue
            if (kind := _KINDS.get(record.name)) is not None:
                start_s = (record.start_ns - last.start_ns) / NS_PER_S
                out.append(
                    MeasuredSpan(
                        rank=rank,
                        stage=stage,
                        kind=kind,
                        microbatch=record.microbatch,
                        start_s=start_s,
                        end_s=start_s + record.duration_ns / NS_PER_S,
                    )
                )
    return tuple(out)


def _stage(config: RunConfig | None, rank: int) -> int:
    if config is None or rank >= config.parallelism.num_ranks:
        return 0
    return position(config.parallelism, rank).stage
