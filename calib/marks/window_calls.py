"""Calls of collectives in a window as PyTorch's flight recorders know them, apart from hooks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from ..records.flight import Called, FlightEntry, HostSpan, unhooked_entries, with_durations
from ..records.record_kinds import Record
from ..workload.collectives import GroupRole


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """A process group of a rank."""

    role: GroupRole
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCalls:
    """Flight data of one window."""

    entries: tuple[tuple[FlightEntry, ...], ...] = ()
    """Those of each recorder, whose ring and numbers are its own."""
    spans: Mapping[int, HostSpan] = field(default_factory=dict)
    """Time spans of hooked steps."""
    groups: Mapping[str, KnownGroup] = field(default_factory=dict)
    unseen_names: tuple[str, ...] = ()
    """Collectives that hooks do not see; if empty, all calls are seen."""
    gaps: tuple[str, ...] = ()
    """Remarks for the coverage: backends whose calls from C++ no recorder shows."""

    def amend(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the same records, with durations from the flight recorder if it has them."""
        entries = sorted(chain(*self.entries), key=lambda entry: entry.created_unix_ns)
        is_timed = any(entry.duration_ns is not None for entry in entries)
        return with_durations(records, entries, self.spans) if is_timed else iter(records)

    def unseen(self, span: HostSpan, called: Iterable[Called]) -> list[FlightEntry]:
        """Return calls of a step on known groups that are missing in ``called``, the calls hooks
        saw."""
        seen = list(called)
        missed = chain(*(unhooked_entries(list(each), seen, span) for each in self.entries))
        return [entry for entry in missed if entry.group in self.groups]
