"""The records of a window, made from the logs that its rank has left.

Passes of a window that were not timed get weights and waits from those that were.  On a device only
some passes have their transfers timed.  All are counted, so that a timed one stands for a known
number of calls; and an untimed pass waits as long as the timed ones on average.

Collectives that no hook sees (DDP's buckets, compiled regions) are inserted into their step.  On
the host a call gets marks like any other.  ``DistributedDataParallel`` waits for its buckets at the
end of the backward pass, so the last of them ends there, and the open operators are not charged for
the wait.  On a device the marks are the stream's, which does not show the call; there a call is a
record with the flight recorder's duration, or one bounded by the step.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from ..records.flight import Called, FlightEntry, HostSpan
from ..records.rank_summary import StepSums, summarise
from ..records.record_kinds import (
    BACKWARD,
    FORWARD,
    CollectiveRecord,
    CoverageRecord,
    RankRecord,
    Record,
    WindowRecord,
    checked,
)
from ..workload.collectives import Collective
from ._attribution import Attribution
from .marked_window import DAMAGED, MarkedWindow
from .step_marks import (
    BITS,
    NO_TIME,
    STEP_STREAM,
    Code,
    StepMarks,
    TransferKind,
    coverage_name,
    unpack_mark,
)
from .window_calls import KnownGroup, WindowCalls

_WAIT_BEGIN, _WAIT_END, _CALL_DONE = map(int, (Code.WAIT_BEGIN, Code.WAIT_END, Code.CALL_DONE))


@dataclass(frozen=True, slots=True)
class _Pass:
    """A backward pass; its end is mark number ``end``."""

    begin_ns: int
    end_ns: int
    end: int


def add_unseen(log: StepMarks, window: WindowCalls) -> list[CollectiveRecord]:
    """Insert the calls of a resolved step that no hook saw into its log; return records instead if
    the log is a device's."""
    span = window.spans.get(log.step)
    if not window.unseen_names or span is None:
        return []
    entries = window.unseen(span, _called(log))
    numbers = [_add(log, entry, window.groups[entry.group]) for entry in entries]
    if log.is_host:
        _put_marks(log, numbers, [_at(entry, span) for entry in entries])
        return []
    return [*_records(log, numbers, entries, span)]


def _called(log: StepMarks) -> Iterator[Called]:
    calls = Counter(log.counted)
    calls.update(zip(log.transfer_kinds[1:], log.transfer_nbytes[1:], strict=True))
    for (number, nbytes), count in calls.items():
        kind = log.kinds[number]
        called = Called(group=kind.group, collective=kind.collective, nbytes=nbytes)
        yield from (called,) * count


def _add(log: StepMarks, entry: FlightEntry, group: KnownGroup) -> int:
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


def _put_marks(log: StepMarks, numbers: Sequence[int], times_ns: Sequence[int]) -> None:
    """Insert marks of calls.

    A call takes no host time, except that the last one of a backward pass lasts until its end, and
    buffers before a forward pass last until its first module.
    """
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


def _is_waited_for(log: StepMarks, number: int, place: int) -> bool:
    """Return True for buffers that DDP sends before a forward pass: the first module runs after
    it."""
    is_sent = log.transfer(number).kind.collective is Collective.BROADCAST
    return is_sent and place < len(log.what) and unpack_mark(log.what[place])[0] == Code.SPAN_BEGIN


def _merge(log: StepMarks, added: Sequence[tuple[int, int, int, int]]) -> None:
    what, marks, done = array("i"), array("q"), 0
    for place, _, time_ns, code in added:
        what += log.what[done:place]
        marks += log.marks[done:place]
        what.append(code)
        # The clocks differ slightly: clamp so that marks stay in order.
        before = marks[-1] if marks else time_ns
        marks.append(max(before, time_ns))
        done = place
    log.what, log.marks = what + log.what[done:], marks + log.marks[done:]


def _place(marks: array[int], time_ns: int) -> int:
    """Return the index of the first later mark; marks of a clock that jumped are not in order."""
    return next((at for at, mark in enumerate(marks) if mark > time_ns), len(marks))


def _passes(log: StepMarks) -> list[_Pass]:
    passes, begins = [], dict[int, int]()
    for at, (what, mark) in enumerate(zip(log.what, log.marks, strict=True)):
        code, number = unpack_mark(what)
        if code == Code.PHASE_BEGIN:
            begins[number] = mark
        elif code == Code.PHASE_END and log.phases[number][0] == BACKWARD and number in begins:
            passes.append(_Pass(begins.pop(number), mark, at))
    return passes


def _pass_at(passes: Sequence[_Pass], time_ns: int) -> _Pass | None:
    return next((one for one in passes if one.begin_ns <= time_ns <= one.end_ns), None)


def _records(
    log: StepMarks, numbers: Sequence[int], entries: Sequence[FlightEntry], span: HostSpan
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


ASIDE = "on another stream, not timed: "
_PASSES = (FORWARD, BACKWARD)
_BEGINS = (Code.WAIT_BEGIN, Code.STALL_BEGIN)
_ENDS = (Code.WAIT_END, Code.CALL_DONE, Code.STALL_END)


@dataclass(slots=True)
class WindowRecords:
    """Logs of the hooked steps of one window, and counts collected while records are made."""

    logs: list[StepMarks] = field(default_factory=list)
    fired: dict[str, set[int]] = field(default_factory=dict)
    step_ns: dict[int, int] = field(default_factory=dict)
    sums: dict[int, StepSums] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)
    """Remarks on operators that ran on another stream than the step's."""
    num_dropped: int = 0
    """Records lost to a clock that jumped back, and to marks without a time."""
    calls: WindowCalls = field(default_factory=WindowCalls)
    _shares: tuple[int, dict[TransferKind, float], dict[str, int]] = (0, {}, {})

    def of(self, log: StepMarks) -> Iterator[Record]:
        """Yield the records of one step, counted as they are made."""
        known = len(log.transfer_kinds)
        unseen = add_unseen(log, self.calls)
        if len(log.transfer_kinds) > known:
            self.fired |= {name: {0} for name in self.calls.unseen_names}
        if self._shares[0] != len(self.logs):
            # A file without room has undisturbed steps alone, and its means are those of others.
            logs = [one for one in self.logs if one.step in self.step_ns] or self.logs
            self._shares = len(self.logs), transfer_weights(logs), mean_waits(logs)
        _, weights, wait_ns = self._shares
        attribution = Attribution(log, weights=weights, wait_ns=wait_ns)
        sums = self.sums[log.step] = StepSums()
        has_transfers = False
        for record in self.calls.amend(chain(attribution.records(), unseen)):
            sums.add(record)
            has_transfers = has_transfers or isinstance(record, CollectiveRecord)
            yield record
        self.num_dropped += attribution.num_dropped
        for site, is_backward in attribution.fired | attribution.aside:
            name = coverage_name(log.sites[site].kind.value, is_backward)
            self.fired.setdefault(name, set()).add(site)
            if (site, is_backward) in attribution.aside:
                self.aside.add(f"{ASIDE}{name}")
        if log.phases:
            self.fired.setdefault("timers", set()).add(0)
        if has_transfers:
            self.fired.setdefault("collectives", set()).add(0)

    def counted(self, window: WindowRecord) -> WindowRecord:
        """Return the window's record, with the records dropped so far added."""
        return replace(window, num_dropped=window.num_dropped + self.num_dropped)

    def coverage(
        self, installed: tuple[CoverageRecord, ...], window: WindowRecord
    ) -> Iterator[CoverageRecord]:
        """Yield the installed hooks, with how many fired, and remarks on operators without a
        time."""
        for known in installed:
            yield replace(known, fired=len(self.fired.get(known.name, ())))
        remarks = [*sorted(self.aside), *self.calls.gaps]
        if window.num_dropped:
            remarks.append(f"dropped: {window.num_dropped} marks, and spans that they begin or end")
        for name in remarks:
            yield CoverageRecord.remark(window.window, name)

    def summary(self, window: WindowRecord) -> RankRecord:
        """Return the summary for every rank's message; complete once all steps' records were
        made."""
        return summarise(window.window, self.step_ns, self.sums, window.memory_peak_nbytes)


def records_of(window: MarkedWindow, skip: Callable[[str], object]) -> Iterator[Record]:
    """Yield the records of a window, its end last; ``skip`` is told of an inconsistent step."""
    made = WindowRecords(logs=window.steps, calls=window.calls, step_ns=window.step_ns)
    for log in window.steps:
        try:
            yield from [checked(one) for one in made.of(log) if _is_of_use(one, window)]
        except DAMAGED as err:
            made.num_dropped += 1
            made.sums.pop(log.step, None)
            skip(f"marks of step {log.step} are inconsistent ({err!r}); skipped")
    if window.end is not None:
        end = made.counted(window.end)
        yield from made.coverage(window.installed, end)
        yield made.summary(end)
        yield end


def _is_of_use(record: Record, window: MarkedWindow) -> bool:
    return not window.shared_with or (
        isinstance(record, CollectiveRecord) and not window.shared_with.isdisjoint(record.ranks)
    )


def transfer_weights(logs: Iterable[StepMarks]) -> dict[TransferKind, float]:
    """Return, by kind, the ratio of all calls inside passes of these steps to the timed ones."""
    called: Counter[TransferKind] = Counter()
    timed: Counter[TransferKind] = Counter()
    for log in logs:
        for kind, count in zip(log.kinds, log.num_pass_calls, strict=True):
            called[kind] += count
        for kind, number in zip(log.transfer_kinds, log.transfer_passes, strict=True):
            if number >= 0:
                timed[log.kinds[kind]] += 1
    return {kind: called[kind] / count for kind, count in timed.items()}


def mean_waits(logs: Sequence[StepMarks]) -> dict[str, int]:
    """Return, by name, the mean wait of the timed passes of resolved steps, in nanoseconds.

    Empty if the transfers of all passes were timed.
    """
    if not any(log.untimed_passes for log in logs):
        return {}
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for log in logs:
        for number, wait_ns in _waits(log).items():
            name = log.phases[number][0]
            sums[name] += wait_ns
            counts[name] += 1
    return {name: sums[name] // count for name, count in counts.items()}


def _waits(log: StepMarks) -> dict[int, int]:
    """Return the wait of the step's own stream in each timed pass, by the number of its phase."""
    streams = log.streams or (STEP_STREAM,) * len(log.what)
    waits: dict[int, int] = {}
    current, num_open, before_ns = -1, 0, 0
    for what, mark, stream in zip(log.what, log.marks, streams, strict=True):
        if stream != STEP_STREAM or mark == NO_TIME:
            continue
        code, number = unpack_mark(what)
        if num_open and current >= 0:
            waits[current] += max(0, mark - before_ns)
        before_ns = mark
        if code == Code.PHASE_BEGIN and log.phases[number][0] in _PASSES:
            is_timed = number not in log.untimed_passes
            current = number if is_timed else -1
            if is_timed:
                waits[number] = 0
        elif code == Code.PHASE_END and number == current:
            current = -1
        elif code in _BEGINS:
            num_open += 1
        elif code in _ENDS:
            num_open = max(0, num_open - 1)
    return waits
