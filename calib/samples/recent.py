"""The samples of a long run, with bounded work and memory per window.

The newest windows are retained whole, as is the first, which determines the cost of a calibration.
Of the others, the newest row of every operator and collective is retained, so that no measured
shape is forgotten. Evicted rows are still in the files of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import pandas as pd

from ..marks.run_records import RunRecords
from ..records.record_kinds import (
    CollectiveRecord,
    OperatorRecord,
    RankRecord,
    Record,
    WindowRecord,
)
from .columns import KEYS, normalise
from .store import NewRecords
from .table import SampleTable, build_live_table, run_rows, with_probes

NUM_WINDOWS = 8
"""Number of newest windows that are retained whole.

A row has 0.7 times the weight of one a window younger: all older rows together have 6 % of the
weight.
"""
NUM_AS_RECORDS = 2
"""Number of newest windows whose records are retained, for records that arrive after a window's
end: those of other ranks, and probes."""
# For all ranks together: 96 probes of seven repeats each, on 149 ranks.
_MOST_PROBES = 100_000
# Only the newest windows are queried.
_NUM_CLOSED = 64


class RecentWindows:
    """Builds the sample table of one run from its records, as they are read.

    With at most ``NUM_WINDOWS`` windows the table is that of ``build_table`` on all records.
    """

    def __init__(self) -> None:
        self._forget()

    def add(self, new: NewRecords) -> None:
        """Add new records; if the files were replaced, they replace everything known."""
        if new.is_whole:
            self._forget()
        had_records = set(self._records)
        self._run = replace(new.run, records={}, summaries={})
        for rank, records in new.run.records.items():
            for record in records:
                self._sort_in(rank, record)
        for rank, summaries in new.run.summaries.items():
            for summary in summaries:
                self._changed.add(summary.window)
                self._summaries.setdefault(summary.window, {}).setdefault(rank, []).append(summary)
        for window in sorted(self._changed):
            is_first_time = window not in self._tables
            self._build(window, has_all_records=is_first_time or window in had_records)
        self._changed.clear()
        self._evict_old_windows()

    def is_complete(self, window: int, *, without: Set[int] = frozenset()) -> bool:
        """Return True if every recording rank has closed this window, apart from some."""
        return self._run is not None and self.lacking(window) <= without

    def lacking(self, window: int) -> frozenset[int]:
        """Return the recording ranks that have not closed this window, as far as is known here."""
        known = () if self._run is None else self._run.recording_plan.recorders
        return frozenset(known) - self._closed.get(window, set())

    @property
    def newest(self) -> RunRecords:
        """The run with the records of its newest windows only."""
        return self._with(sorted(self._records))

    def table(self) -> SampleTable:
        """Return the table of all retained rows."""
        run = self.newest
        parts = [self._tables[window] for window in sorted(self._tables)]
        whole = SampleTable.concat(parts) if parts else build_live_table(run)
        if self._older is not None:
            joined = pd.concat([self._older, whole.samples])
            whole = replace(whole, samples=normalise("samples", joined))
        probes = {rank: tuple(records) for rank, records in sorted(self._probes.items())}
        return with_probes(replace(whole, runs=run_rows(run)), replace(run, records=probes))

    def _forget(self) -> None:
        self._run: RunRecords | None = None
        self._records: dict[int, dict[int, list[Record]]] = {}
        self._summaries: dict[int, dict[int, list[RankRecord]]] = {}
        self._closed: dict[int, set[int]] = {}
        self._probes: dict[int, list[Record]] = {}
        self._num_probes = 0
        self._tables: dict[int, SampleTable] = {}
        self._older: pd.DataFrame | None = None
        self._changed: set[int] = set()

    def _sort_in(self, rank: int, record: Record) -> None:
        window = getattr(record, "window", None)
        if window is None:
            return
        if isinstance(record, OperatorRecord | CollectiveRecord) and record.is_probe:
            if self._num_probes < _MOST_PROBES:
                self._num_probes += 1
                self._probes.setdefault(rank, []).append(record)
            return
        if isinstance(record, WindowRecord):
            self._closed.setdefault(window, set()).add(rank)
        self._changed.add(window)
        self._records.setdefault(window, {}).setdefault(rank, []).append(record)

    def _build(self, window: int, *, has_all_records: bool) -> None:
        built = build_live_table(self._with([window]))
        known = self._tables.get(window)
        if known is not None and not has_all_records:
            built = SampleTable.concat([known, built])
        self._tables[window] = built

    def _with(self, windows: Iterable[int]) -> RunRecords:
        run = self._run
        if run is None:
            raise LookupError("no records have been taken; add those of a reading first")
        records: dict[int, tuple[Record, ...]] = {rank: () for rank in run.headers}
        summaries: dict[int, tuple[RankRecord, ...]] = {}
        for window in windows:
            for rank, window_records in sorted(self._records.get(window, {}).items()):
                records[rank] = (*records.get(rank, ()), *window_records)
            for rank, sent in sorted(self._summaries.get(window, {}).items()):
                summaries[rank] = (*summaries.get(rank, ()), *sent)
        return replace(run, records=records, summaries=summaries)

    def _evict_old_windows(self) -> None:
        for by_window in (self._records, self._summaries):
            for window in sorted(by_window)[:-NUM_AS_RECORDS]:
                del by_window[window]
        for window in sorted(self._closed)[:-_NUM_CLOSED]:
            del self._closed[window]
        for window in sorted(self._tables)[1:-NUM_WINDOWS]:
            parts = [self._tables.pop(window).samples]
            parts = parts if self._older is None else [self._older, *parts]
            keys = [key for key in KEYS["samples"] if key != "window"]
            self._older = pd.concat(parts).drop_duplicates(subset=keys, keep="last")
