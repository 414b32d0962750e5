"""PyTorch's flight recorder: how long each collective took on the device, by NCCL's own events.

The format is that of ``torch._C._distributed_c10d._dump_nccl_trace_json`` (version 2, PyTorch 2.5
and later).  An entry has a duration only where collectives are timed and its work has retired.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..errors import RecordError
from ..units import NS_PER_S
from ..workload.collectives import Collective
from .kineto_trace import collective_named
from .record_kinds import CollectiveRecord, Record

_PAIR = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
_MS_PER_S = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEntry:
    """One collective as the recorder saw it; ``peer`` is a rank of the group, -1 without one."""

    group: str
    collective: Collective
    peer: int
    created_unix_ns: int
    duration_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """When the host worked on a step, in Unix nanoseconds."""

    begin_ns: int
    end_ns: int


def parse_dump(text: str | bytes) -> list[FlightEntry]:
    """The entries of a dump in the order of calling; raises ``RecordError`` where it is none."""
    try:
        entries = json.loads(text).get("entries", [])
        known = {int(entry["record_id"]): _entry(entry) for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise RecordError(f"flight recorder dump is not of the known format: {err!r}") from err
    return [known[number] for number in sorted(known)]


def _entry(entry: Mapping[str, Any]) -> FlightEntry:
    name, description = entry["process_group"]
    duration_ms = entry.get("duration_ms")
    pair = _PAIR.search(entry["profiling_name"])
    return FlightEntry(
        group=f"{description}#{name}",
        collective=collective_named(entry["profiling_name"].partition(" ")[0]),
        peer=int(pair[3]) if pair else -1,
        created_unix_ns=int(entry["time_created_ns"]),
        duration_ns=None if duration_ms is None else round(duration_ms / _MS_PER_S * NS_PER_S),
    )


def with_durations(
    records: Iterable[Record], entries: Iterable[FlightEntry], spans: Mapping[int, HostSpan]
) -> Iterator[Record]:
    """The same records, asynchronous collectives with the duration on the device where known.

    ``spans`` tells the steps that the records are of.  The calls of a step on one group are matched
    in order, and only where both sides saw equally many: a ring buffer forgets its oldest entries.
    """
    durations = _durations(entries, spans)
    for step, found in groupby(records, key=_step_of_transfer):
        if step is None:
            yield from found
        else:
            held = [record for record in found if isinstance(record, CollectiveRecord)]
            yield from _matched(held, durations)


def _step_of_transfer(record: Record) -> int | None:
    return record.step if isinstance(record, CollectiveRecord) else None


_Key = tuple[int, str, Collective, int]


def _durations(
    entries: Iterable[FlightEntry], spans: Mapping[int, HostSpan]
) -> dict[_Key, list[int | None]]:
    found: dict[_Key, list[int | None]] = {}
    for entry in entries:
        for step, span in spans.items():
            if span.begin_ns <= entry.created_unix_ns < span.end_ns:
                key = (step, entry.group, entry.collective, entry.peer)
                found.setdefault(key, []).append(entry.duration_ns)
    return found


def _matched(
    held: list[CollectiveRecord], durations: Mapping[_Key, list[int | None]]
) -> Iterator[CollectiveRecord]:
    counts = Counter(_key(record) for record in held)
    for record in held:
        key = _key(record)
        seen = durations.get(key, [])
        is_matched = len(seen) == counts[key] and record.sequence < len(seen)
        duration_ns = seen[record.sequence] if is_matched and record.is_async else None
        if duration_ns is None:
            yield record
        else:
            yield replace(record, duration_ns=duration_ns, is_bound=False)


def _key(record: CollectiveRecord) -> _Key:
    peer = record.ranks.index(record.peer) if record.peer in record.ranks else -1
    return (record.step, record.group, record.collective, peer)
