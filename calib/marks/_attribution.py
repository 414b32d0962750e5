"""From the marks of one step to records: every moment belongs to the deepest open operator.

Marks are in order of execution.  The time between two of them goes to the awaited transfer if
there is one, else to the deepest open operator, and always to the open phases.  So a duration is
an operator's self time, without nested operators, synchronous collectives and our own hooks.

Of a device's streams, only the one on which the step began is this time line.  A transfer on
another stream is known by its marks there, and exposed as long as the step's stream waited for it;
an operator on another stream has no time in the step, and is reported.

If a device waits for its host, our hooks delay it as they delay a host: as far as it was idle for
them, their time belongs to no operator.  The rest between two such marks is the host's.  Host time
by its own clock, also during device work, goes to the same operators.

If the clock jumps back, or a mark has no time, the affected records have no duration: they are
dropped and counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from ..records.record_kinds import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    CollectiveRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
)
from ..workload.operators import OperatorKind, Phase
from ._shapes import Shape, canonical_shape
from ._waits import TransferTimes, Waits, exposures, host_times, lags_of, waits_for_host
from .step_marks import (
    NO_SHAPE,
    NO_SPAN,
    NO_TIME,
    STEP_STREAM,
    WAITING,
    Code,
    StepMarks,
    TransferKind,
    unpack_mark,
)


@dataclass(slots=True)
class OpenOperator:
    """An open operator: ``instance`` is the number of its forward span.

    ``num_breaks`` counts the clock jumps and lost marks before it.
    """

    site: int
    instance: int
    phase: Phase
    depth: int
    microbatch: int
    start_ns: int
    num_breaks: int
    self_time_ns: int = 0
    host_bound_ns: int = 0
    host_ns: int = 0
    """Host time; ``NO_TIME`` if unknown for any part."""


_BROKEN = -1
"""Impossible number of clock jumps: marks a bracket without a begin or an end."""


@dataclass(slots=True)
class _Bracket:
    number: int
    start_ns: int
    num_jumps: int
    wait_ns: int = 0
    hook_ns: int = 0


class Attribution:
    """Records of one resolved step.

    ``weights`` maps each kind of transfer to the number of calls inside passes that a timed one
    stands for, and ``wait_ns`` maps names of passes to the waiting of those without timed
    transfers.

    ``fired`` collects (site, is_backward) of the operators that have a record, for the coverage,
    and ``aside`` those that ran on another stream; ``num_dropped`` counts records lost to clock
    jumps and lost marks.
    """

    def __init__(
        self,
        log: StepMarks,
        *,
        weights: Mapping[TransferKind, float] | None = None,
        wait_ns: Mapping[str, int] | None = None,
    ) -> None:
        self.log = log
        self.fired: set[tuple[int, bool]] = set()
        self.aside: set[tuple[int, bool]] = set()
        self.num_dropped = 0
        self._weights, self._wait_ns = weights or {}, wait_ns or {}
        num_spans = len(log.span_sites)
        self._now_ns = next((mark for mark in log.marks if mark != NO_TIME), 0)
        self._num_jumps = self._num_breaks = self._num_pauses = 0
        self._open: list[OpenOperator] = []
        self._brackets: list[_Bracket] = []
        self._stalls: list[tuple[int, int]] = []
        self._stalled_ns = NO_TIME
        self._lag_ns, self._ours_ns = NO_TIME, 0
        self._owed_ns, self._is_idle = 0, False
        self._host_ns = NO_TIME
        self._spans_aside: set[int] = set()
        self._incomplete: set[int] = set()
        self._waits = Waits(len(log.transfer_kinds), is_host=log.is_host)
        self._depths = array("h", [0]) * num_spans
        self._parents = array("i", [NO_SPAN]) * num_spans
        self._shapes: list[Shape | None] = [None] * num_spans
        self._interned: dict[Shape, Shape] = {}
        self._parts: dict[int, dict[OperatorKind, Shape]] = {}

    def records(self) -> Iterator[Record]:
        """Yield all records of the step, operators first in the order of their ends, transfers
        last."""
        log = self.log
        streams: Sequence[int] = log.streams or (STEP_STREAM,) * len(log.what)
        lags: Sequence[int] = lags_of(log) or (NO_TIME,) * len(log.what)
        hook_times_ns, hosts = chain(log.hook_times_ns, repeat(0)), host_times(log, lags)
        before = -1
        for what, mark, stream, lag_ns in zip(log.what, log.marks, streams, lags, strict=True):
            self._host_ns = next(hosts)
            code, number = unpack_mark(what)
            ours_ns = next(hook_times_ns)
            if code == Code.REFUSED:
                self._refuse(is_all=bool(number))
            elif stream != STEP_STREAM:
                self._mark_aside(code, number, mark, is_next=before == number)
            elif mark == NO_TIME:
                self._lose(code, number)
                yield from self._mark(code, number, is_next=before == number)
                self._lose(code, number)
            else:
                self._compare(mark, lag_ns)
                self._spend(mark, is_ours=code == Code.HOOK_END)
                yield from self._mark(code, number, is_next=before == number)
                self._lag_ns, self._ours_ns = lag_ns, ours_ns
            before = number if code == Code.WAIT_END else -1
        yield from self._close(self._open)
        yield from self._transfers()

    def _mark(self, code: int, number: int, *, is_next: bool) -> Iterator[Record]:
        if code <= Code.BACKWARD_END:
            yield from self._mark_span(code, number)
        elif code == Code.ENCLOSING_RESUMED:
            yield from self._close(self._inside(self._parents[number]))
        elif code == Code.PHASE_BEGIN:
            self._brackets.append(_Bracket(number, self._now_ns, self._num_jumps))
            self._owed_ns = 0
        elif code == Code.PHASE_END:
            yield from self._end_phase(number)
        elif code == Code.WAIT_BEGIN:
            self._waits.begin(number, self._now_ns, self._num_jumps, is_next=is_next)
        elif code == Code.STALL_BEGIN:
            self._stalled_ns = self._now_ns
        elif code == Code.STALL_END:
            self._end_stall()
        elif code == Code.PAUSE_BEGIN:
            self._num_pauses += 1
        elif code == Code.PAUSE_END:
            self._num_pauses = max(0, self._num_pauses - 1)
        elif code != Code.HOOK_END:
            is_done = code == Code.CALL_DONE
            self._waits.end(number, self._now_ns, self._num_jumps, is_done=is_done)

    def _mark_aside(self, code: int, number: int, mark: int, *, is_next: bool) -> None:
        """Process a mark on another stream, which begins or ends nothing on the step's own
        stream."""
        if code <= Code.BACKWARD_END:
            self._spans_aside.add(number)
            self._open = [span for span in self._open if span.instance != number]
            is_backward = code in (Code.BACKWARD_BEGIN, Code.BACKWARD_END)
            self.aside.add((self.log.span_sites[number], is_backward))
        elif code == Code.WAIT_BEGIN:
            self._waits.begin(number, mark, self._num_jumps, is_next=is_next, is_aside=True)
        elif code in (Code.WAIT_END, Code.CALL_DONE):
            is_done = code == Code.CALL_DONE
            self._waits.end(number, mark, self._num_jumps, is_done=is_done, is_aside=True)

    def _lose(self, code: int, number: int) -> None:
        """Process a mark without a time: its span has no duration, nor do the operators around
        it."""
        self._num_breaks += 1
        if code in WAITING:
            self._num_jumps += 1
            self._stalled_ns = NO_TIME
        elif code in (Code.PHASE_BEGIN, Code.PHASE_END):
            for bracket in self._brackets:
                if bracket.number == number:
                    bracket.num_jumps = _BROKEN

    def _refuse(self, *, is_all: bool) -> None:
        """Drop the open operators, which would otherwise receive the time of the unmarked ones."""
        self._num_breaks += 1
        self._num_jumps += is_all
        # Their backward passes are incomplete too: they contain the unmarked ones.
        self._incomplete.update(span.instance for span in self._open)

    def _end_stall(self) -> None:
        if self._stalled_ns != NO_TIME and self._now_ns > self._stalled_ns:
            self._stalls.append((self._stalled_ns, self._now_ns))
        self._stalled_ns = NO_TIME

    def _compare(self, mark: int, lag_ns: int) -> None:
        """Determine if the device has waited for the host, and so for our hooks, since the last
        mark."""
        self._is_idle = NO_TIME not in (self._lag_ns, lag_ns) and waits_for_host(
            self._lag_ns, lag_ns, mark - self._now_ns
        )
        if self._is_idle:
            # Accumulate: time that a kernel hides now delays the device later.
            self._owed_ns += self._ours_ns
        else:
            # A device with a larger lag had work all the time.
            self._owed_ns = max(0, self._ours_ns - max(0, self._lag_ns))

    def _spend(self, mark: int, *, is_ours: bool) -> None:
        spent = mark - self._now_ns
        if spent < 0:
            self._num_jumps += 1
            self._num_breaks += 1
            spent = 0
        self._now_ns = mark
        if self._waits.num_open or self._stalled_ns != NO_TIME:
            for bracket in self._brackets:
                bracket.wait_ns += spent
            return
        hook_ns = spent if is_ours else min(self._owed_ns, spent)
        self._owed_ns = max(0, self._owed_ns - hook_ns)
        for bracket in self._brackets:
            bracket.hook_ns += hook_ns
        if self._open and not self._num_pauses:
            span = deepest(self._open)
            span.self_time_ns += spent - hook_ns
            span.host_bound_ns += self._is_idle * (spent - hook_ns)
            is_known = NO_TIME not in (span.host_ns, self._host_ns)
            span.host_ns = span.host_ns + self._host_ns if is_known else NO_TIME

    def _mark_span(self, code: int, number: int) -> Iterator[Record]:
        if number in self._spans_aside:
            return
        if code == Code.SPAN_BEGIN:
            restarted = [s for s in self._open if s.instance == number]
            self._open = (
                [s for s in self._open if s.instance != number] if restarted else self._open
            )
            self._begin(number)
        elif code == Code.BACKWARD_BEGIN:
            yield from self._close(self._unrelated(number))
            self._open.append(self._span(number, Phase.BACKWARD))
        else:
            is_backward = code == Code.BACKWARD_END
            ended = [
                span
                for span in self._open
                if span.instance == number and (span.phase is Phase.BACKWARD) == is_backward
            ]
            yield from self._close(ended)

    def _begin(self, number: int) -> None:
        is_recompute = any(self.log.phases[b.number][0] == BACKWARD for b in self._brackets)
        around = [span for span in self._open if span.phase is not Phase.BACKWARD]
        parent = around[-1].instance if around else NO_SPAN
        if parent == NO_SPAN and is_recompute and self._open:
            # Recomputed inside the backward pass of the open operator.
            parent = deepest(self._open).instance
        self._parents[number] = parent
        self._depths[number] = self._depths[parent] + 1 if parent != NO_SPAN else 0
        self._open.append(self._span(number, Phase.RECOMPUTE if is_recompute else Phase.FORWARD))

    def _span(self, instance: int, phase: Phase) -> OpenOperator:
        return OpenOperator(
            self.log.span_sites[instance],
            instance,
            phase,
            self._depths[instance],
            self._microbatch(),
            self._now_ns,
            self._num_breaks,
        )

    def _microbatch(self) -> int:
        for bracket in reversed(self._brackets):
            name, count = self.log.phases[bracket.number]
            if name in (FORWARD, BACKWARD):
                return count
        return 0

    def _unrelated(self, instance: int) -> list[OpenOperator]:
        """Return open backward spans that are neither inside nor around ``instance``."""
        line = {instance, *self._ancestors(instance)}
        return [
            span
            for span in self._open
            if span.phase is Phase.BACKWARD
            and span.instance not in line
            and instance not in self._ancestors(span.instance)
        ]

    def _inside(self, instance: int) -> list[OpenOperator]:
        """Return open backward spans inside ``instance``."""
        return [
            span
            for span in self._open
            if span.phase is Phase.BACKWARD and instance in self._ancestors(span.instance)
        ]

    def _ancestors(self, instance: int) -> set[int]:
        ancestors = set()
        while (instance := self._parents[instance]) != NO_SPAN:
            ancestors.add(instance)
        return ancestors

    def _close(self, spans: list[OpenOperator]) -> Iterator[Record]:
        log = self.log
        for span in list(spans):
            self._open.remove(span)
            shape = self._shape(span.instance)
            if shape is None:
                continue
            if span.num_breaks != self._num_breaks or span.instance in self._incomplete:
                self.num_dropped += 1
                continue
            self.fired.add((span.site, span.phase is Phase.BACKWARD))
            if span.self_time_ns <= 0 and not log.is_host:
                continue  # none of its kernels was on the step's stream, so zero is not its time
            site = log.sites[span.site]
            yield OperatorRecord(
                step=log.step,
                window=log.window,
                microbatch=span.microbatch,
                kind=site.kind,
                phase=span.phase,
                shape=shape,
                element_nbytes=log.shapes[log.span_shapes[span.instance]][1],
                layer=site.layer,
                start_ns=span.start_ns,
                duration_ns=span.self_time_ns,
                host_bound_ns=span.host_bound_ns,
                host_ns=max(0, span.host_ns),
                stands_for=log.site_weights[span.site] if log.site_weights else 1.0,
                rows=self._rows(span) if site.kind is OperatorKind.GROUPED_LINEAR else (),
            )

    def _rows(self, span: OpenOperator) -> tuple[int, ...]:
        """Return the rows of each expert, only with the forward pass."""
        raw = self.log.shapes[self.log.span_shapes[span.instance]][0]
        return raw[3] if span.phase is Phase.FORWARD and len(raw) > 3 else ()

    def _shape(self, instance: int) -> Shape | None:
        """Return the canonical shape, known once the inner operators are; None if the call broke
        off."""
        known = self._shapes[instance]
        number = self.log.span_shapes[instance]
        if known is not None or number == NO_SHAPE:
            return known
        kind = self.log.sites[self.log.span_sites[instance]].kind
        raw, _ = self.log.shapes[number]
        shape = canonical_shape(kind, raw, self._parts.pop(instance, {}))
        shape = self._shapes[instance] = self._interned.setdefault(shape, shape)
        parent = self._parents[instance]
        if parent != NO_SPAN and self._shapes[parent] is None:
            self._parts.setdefault(parent, {})[kind] = shape
        return shape

    def _end_phase(self, number: int) -> Iterator[Record]:
        bracket = next((b for b in self._brackets if b.number == number), None)
        if bracket is None:
            return
        self._brackets.remove(bracket)
        name, count = self.log.phases[number]
        if name in (FORWARD, BACKWARD):
            yield from self._close(self._open)
        if bracket.num_jumps != self._num_jumps:
            self.num_dropped += 1
            return
        duration_ns = self._now_ns - bracket.start_ns
        if number in self.log.untimed_passes:
            wait_ns = min(self._wait_ns.get(name, 0), duration_ns)
            for around in (bracket, *self._brackets):
                around.wait_ns += wait_ns
        common: dict[str, Any] = {
            "step": self.log.step,
            "window": self.log.window,
            "microbatch": count,
            "start_ns": bracket.start_ns,
        }
        yield PhaseRecord(
            name=name,
            duration_ns=duration_ns,
            wait_ns=bracket.wait_ns,
            hook_ns=bracket.hook_ns,
            **common,
        )
        updated = self.log.optimizer
        if name == OPTIMIZER and updated is not None:
            yield OperatorRecord(
                kind=updated.kind,
                phase=updated.phase,
                shape=updated.shape,
                element_nbytes=updated.element_nbytes,
                layer=0,
                duration_ns=duration_ns - bracket.wait_ns - bracket.hook_ns,
                **common,
            )

    def _transfers(self) -> Iterator[Record]:
        log = self.log
        known: dict[int, TransferTimes] = {}
        for number in range(1, len(log.transfer_kinds)):
            times = self._waits.times(number, self._now_ns, self._num_jumps)
            if times is not None and times.is_broken:
                self.num_dropped += 1
            elif times is not None:
                known[number] = times
        aside = {number: times for number, times in known.items() if times.is_aside}
        stood_ns = exposures(self._stalls, aside)
        for number, times in known.items():
            transfer = log.transfer(number)
            is_weighed = log.transfer_passes[number] >= 0
            yield CollectiveRecord(
                step=log.step,
                window=log.window,
                **transfer.called,
                is_async=times.is_aside or not times.is_sync,
                is_bound=not times.is_known,
                issue_ns=times.issue_ns,
                duration_ns=times.end_ns - times.issue_ns,
                exposed_ns=times.exposed_ns + stood_ns.get(number, 0),
                stands_for=self._weights.get(transfer.kind, 1.0) if is_weighed else 1.0,
            )


def deepest(spans: list[OpenOperator]) -> OpenOperator:
    """Return the innermost of the open operators; the latest if several are equally deep."""
    best = spans[0]
    for span in spans:
        if span.depth >= best.depth:
            best = span
    return best
