"""PyTorch's flight recorder: every collective and its duration on the device.

The format is that of ``torch._C._distributed_c10d._dump_nccl_trace_json`` (version 2, PyTorch 2.5
and later).  An entry has a duration only if collectives are timed and its work has retired.  The
recorder also sees calls from C++: the buckets of ``DistributedDataParallel``, functional
collectives.
"""

from __future__ import annotations

import json
import math
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
_COUNTS_OUTPUT = frozenset({Collective.ALL_GATHER, Collective.RECV})
_PAIRS = frozenset({Collective.SEND, Collective.RECV, Collective.OTHER})
_ELEMENT_NBYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8"), 1),
}
"""Element size by C++ type name; of one with an underscore, only the part before it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEntry:
    """One collective as the recorder saw it; ``peer`` is a rank of the group, -1 if none."""

    group: str
    collective: Collective
    peer: int
    created_unix_ns: int
    duration_ns: int | None
    number: int = 0
    """Index among all calls of the process, from 0; the ring buffer drops the oldest."""
    nbytes: int = 0
    """Size of the whole group's buffer, as nccl-tests counts it; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """Period in which the host worked on a step, in Unix nanoseconds."""

    begin_ns: int
    end_ns: int
    clock_ns: int = 0
    """Begin by the clock of the step's marks."""


_SIDES = ("input", "output")


def parse_dump(text: str | bytes) -> list[FlightEntry]:
    """Return the entries of a dump in call order; raise ``RecordError`` if it is not one."""
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
    collective = collective_named(entry["profiling_name"].partition(" ")[0])
    sides = {
        side: _nbytes(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in _SIDES
    }
    nbytes = sides["output" if collective in _COUNTS_OUTPUT else "input"]
    if collective is Collective.ALL_TO_ALL:  # as the hooks count it
        nbytes = max(sides.values()) if all(sides.values()) else 0
    return FlightEntry(
        group=f"{description}#{name}",
        collective=collective,
        number=int(entry["record_id"]),
        nbytes=nbytes,
        peer=int(pair[3]) if pair else -1,
        created_unix_ns=int(entry["time_created_ns"]),
        duration_ns=None if duration_ms is None else round(duration_ms / _MS_PER_S * NS_PER_S),
    )


def _nbytes(sizes: Any, dtypes: Any) -> int:
    """Return the bytes of all tensors of one side; 0 if a size or a type is unknown."""
    if not isinstance(sizes, list) or not isinstance(dtypes, list) or len(sizes) != len(dtypes):
        return 0
    each = [
        math.prod(map(int, size)) * _ELEMENT_NBYTES.get(str(dtype).partition("_")[0], 0)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    return sum(each) if all(each) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A collective that hooks have seen."""

    group: str
    collective: Collective
    nbytes: int


def unhooked_entries(
    entries: Iterable[FlightEntry], called: Iterable[Called], span: HostSpan
) -> list[FlightEntry]:
    """Return the entries of the step ``span`` that hooks have not seen, point-to-point excluded.

    A call is matched by group and bytes, and by its collective if several fit: gloo implements
    reduce-scatter by all-reduce.  A group with a call that no entry fits (several calls in one)
    gives no entries, nor does a step whose first entries the ring buffer has dropped.

    >>> entry = {"group": "g", "peer": -1, "created_unix_ns": 5, "duration_ns": None, "nbytes": 8}
    >>> found = [FlightEntry(collective=Collective.ALL_REDUCE, **entry) for _ in range(3)]
    >>> hooked = Called(group="g", collective=Collective.REDUCE_SCATTER, nbytes=8)
    >>> len(unhooked_entries(found, [hooked], HostSpan(begin_ns=0, end_ns=9)))
    2
    >>> unhooked_entries(found, [Called(group="g", collective=Collective.ALL_GATHER, nbytes=6)],
    ...            HostSpan(begin_ns=0, end_ns=9))
    []
    """
    all_entries = sorted(entries, key=lambda entry: entry.number)
    if not all_entries or _forgets(all_entries[0], span):
        return []
    unmatched = [
        entry
        for entry in all_entries
        if span.begin_ns <= entry.created_unix_ns < span.end_ns
        and entry.peer < 0
        and entry.nbytes > 0
        and entry.collective not in _PAIRS
    ]
    unclear = set()
    for call in called:
        if call.nbytes == 0 or call.collective in _PAIRS:
            continue
        fitting = [e for e in unmatched if (e.group, e.nbytes) == (call.group, call.nbytes)]
        if not fitting:
            unclear.add(call.group)
            continue
        alike = (e for e in fitting if e.collective is call.collective)
        unmatched.remove(next(alike, fitting[0]))
    return [entry for entry in unmatched if entry.group not in unclear]


def _forgets(first: FlightEntry, span: HostSpan) -> bool:
    return first.number > 0 and first.created_unix_ns >= span.begin_ns


def with_durations(
    records: Iterable[Record], entries: Iterable[FlightEntry], spans: Mapping[int, HostSpan]
) -> Iterator[Record]:
    """Yield the records, asynchronous collectives with their duration on the device if known.

    ``spans`` has the steps of the records.  The calls of a step on one group are matched in order,
    and only if both sides saw equally many: a ring buffer drops its oldest entries.
    """
    durations = _durations(entries, spans)
    for step, step_records in groupby(records, key=_step_of_transfer):
        if step is None:
            yield from step_records
        else:
            collectives = [
                record for record in step_records if isinstance(record, CollectiveRecord)
            ]
            yield from _matched(collectives, durations)


def _step_of_transfer(record: Record) -> int | None:
    return record.step if isinstance(record, CollectiveRecord) else None


_Key = tuple[int, str, Collective, int]


def _durations(
    entries: Iterable[FlightEntry], spans: Mapping[int, HostSpan]
) -> dict[_Key, list[int | None]]:
    durations_by_key: dict[_Key, list[int | None]] = {}
    for entry in entries:
        for step, span in spans.items():
            if span.begin_ns <= entry.created_unix_ns < span.end_ns:
                key = (step, entry.group, entry.collective, entry.peer)
                durations_by_key.setdefault(key, []).append(entry.duration_ns)
    return durations_by_key


def _matched(
    collectives: list[CollectiveRecord], durations: Mapping[_Key, list[int | None]]
) -> Iterator[CollectiveRecord]:
    counts = Counter(_key(record) for record in collectives)
    for record in collectives:
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
