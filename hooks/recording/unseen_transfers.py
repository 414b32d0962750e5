"""Collectives that no hook sees, put where they belong in a step: DDP's buckets, compiled regions.

On the host a call gets marks like any other.  ``DistributedDataParallel`` waits for its buckets at
the end of the backward pass, so that the last of them ends there, and the operators that are open
do not pay for the wait.  On a device the marks are the stream's, which knows nothing of the call;
there a call is a record with the recorder's duration, or one that the step bounds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...calib.records.flight import Called, FlightEntry, HostSpan
from ...calib.records.record_kinds import CollectiveRecord
from ...calib.workload.collectives import Collective
from ..sensors.recorder import BACKWARD
from ..sensors.step_log import BITS, Code, StepLog, TransferKind, split
from .flight_recorder import FlightWindow, KnownGroup

_WAIT_BEGIN, _WAIT_END, _CALL_DONE = map(int, (Code.WAIT_BEGIN, Code.WAIT_END, Code.CALL_DONE))


@dataclass(frozen=True, slots=True)
class _Pass:
    """A backward pass: its end is mark number ``end``."""

    begin_ns: int
    end_ns: int
    end: int


def add_unseen(log: StepLog, window: FlightWindow) -> list[CollectiveRecord]:
    """Puts the calls of a resolved step that no hook saw into its log, as far as that is one of the
    host's; of a device's, their records."""
    span = window.span(log.step)
    if not window.unseen_names or span is None:
        return []
    entries = window.unseen(log.step, _called(log))
    numbers = [_add(log, entry, window.groups[entry.group]) for entry in entries]
    if log.is_host:
        _put_marks(log, numbers, [_at(entry, span) for entry in entries])
        return []
    return [*_records(log, numbers, entries, span)]


def _called(log: StepLog) -> Iterator[Called]:
    calls = Counter(log.counted)
    calls.update(zip(log.transfer_kinds[1:], log.transfer_nbytes[1:], strict=True))
    for (number, nbytes), count in calls.items():
        kind = log.kinds[number]
        called = Called(group=kind.group, collective=kind.collective, nbytes=nbytes)
        yield from (called,) * count


def _add(log: StepLog, entry: FlightEntry, group: KnownGroup) -> int:
    kind = log.kind_number(
        TransferKind(
            collective=entry.collective, role=group.role, group=entry.group, ranks=group.ranks
        )
    )
    log.transfer_kinds.append(kind)
    log.transfer_sequences.append(log.num_calls[kind])
    log.transfer_nbytes.append(entry.nbytes)
    log.transfer_passes.append(-1)
    log.num_calls[kind] += 1
    return len(log.transfer_kinds) - 1


def _at(entry: FlightEntry, span: HostSpan) -> int:
    return entry.created_unix_ns - span.begin_ns + span.clock_ns


def _put_marks(log: StepLog, numbers: Sequence[int], times_ns: Sequence[int]) -> None:
    """A call takes no time of the host's; the last one of a backward pass all until its end, and
    buffers before a forward pass until its first module."""
    passes = _passes(log)
    last = {_pass_at(passes, time): number for number, time in zip(numbers, times_ns, strict=True)}
    added: list[tuple[int, int, int, int]] = []
    for number, time_ns in zip(numbers, times_ns, strict=True):
        place = _place(log.marks, time_ns)
        begin, end = number << BITS | _WAIT_BEGIN, number << BITS | _WAIT_END
        if _is_waited_for(log, number, place):
            done = number << BITS | _CALL_DONE
            added.append((place, len(added), time_ns, begin))
            added.append((place, len(added), log.marks[place], done))
            continue
        added += [(place, len(added), time_ns, begin), (place, len(added) + 1, time_ns, end)]
        around = _pass_at(passes, time_ns)
        if around is not None and last[around] == number:
            added.append((place, len(added), time_ns, begin))
            added.append((around.end, len(added), around.end_ns, end))
    _merge(log, sorted(added))


def _is_waited_for(log: StepLog, number: int, place: int) -> bool:
    """True for buffers that DDP sends before a forward pass: the first module runs after it."""
    is_sent = log.transfer(number).kind.collective is Collective.BROADCAST
    return is_sent and place < len(log.what) and split(log.what[place])[0] == Code.SPAN_BEGIN


def _merge(log: StepLog, added: Sequence[tuple[int, int, int, int]]) -> None:
    what, marks, done = array("i"), array("q"), 0
    for place, _, time_ns, code in added:
        what += log.what[done:place]
        marks += log.marks[done:place]
        what.append(code)
        # Two clocks: what is a little early or late stays between its neighbours.
        before = marks[-1] if marks else time_ns
        marks.append(max(before, time_ns))
        done = place
    log.what, log.marks = what + log.what[done:], marks + log.marks[done:]


def _place(marks: array[int], time_ns: int) -> int:
    """Before the first mark that is later; marks of a clock that jumped are not in order."""
    return next((at for at, mark in enumerate(marks) if mark > time_ns), len(marks))


def _passes(log: StepLog) -> list[_Pass]:
    found, begins = [], dict[int, int]()
    for at, (what, mark) in enumerate(zip(log.what, log.marks, strict=True)):
        code, number = split(what)
        if code == Code.PHASE_BEGIN:
            begins[number] = mark
        elif code == Code.PHASE_END and log.phases[number][0] == BACKWARD and number in begins:
            found.append(_Pass(begins.pop(number), mark, at))
    return found


def _pass_at(passes: Sequence[_Pass], time_ns: int) -> _Pass | None:
    return next((one for one in passes if one.begin_ns <= time_ns <= one.end_ns), None)


def _records(
    log: StepLog, numbers: Sequence[int], entries: Sequence[FlightEntry], span: HostSpan
) -> Iterator[CollectiveRecord]:
    for number, entry in zip(numbers, entries, strict=True):
        bound_ns = span.end_ns - entry.created_unix_ns
        yield CollectiveRecord(
            step=log.step,
            window=log.window,
            **log.transfer(number).called,
            is_async=True,
            is_bound=entry.duration_ns is None,
            issue_ns=_at(entry, span),
            duration_ns=bound_ns if entry.duration_ns is None else entry.duration_ns,
            exposed_ns=0,
        )
