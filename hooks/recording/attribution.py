"""From the marks of one step to records: every moment belongs to the deepest open operator.

The marks lie in the order of execution.  The time between two of them goes to the transfer that is
waited for, else to the deepest open operator, and always to the open phases.  So a duration is
an operator's own: nested operators, synchronous collectives and our own hooks are out.

Where the host's clock jumps back, what is open at that moment has no duration: it is dropped and
counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...calib.records.record_kinds import CollectiveRecord, OperatorRecord, PhaseRecord, Record
from ...calib.workload.operators import OperatorKind, Phase
from ..sensors.recorder import BACKWARD, FORWARD, OPTIMIZER
from ..sensors.shapes import Shape, canonical_shape
from ..sensors.step_log import NO_SHAPE, NO_SPAN, Code, StepLog, split
from ..sensors.waits import Waits


@dataclass(slots=True)
class OpenOperator:
    """An operator that is open: ``instance`` is the number of its forward span."""

    site: int
    instance: int
    phase: Phase
    depth: int
    microbatch: int
    start_ns: int
    num_jumps: int
    own_ns: int = 0


@dataclass(slots=True)
class _Bracket:
    number: int
    start_ns: int
    num_jumps: int
    wait_ns: int = 0
    hook_ns: int = 0


class Attribution:
    """Records of one resolved step.

    ``fired`` collects (site, is_backward) of the operators that have a record, for the coverage;
    ``num_dropped`` counts what a jump of the clock has cost.
    """

    def __init__(self, log: StepLog) -> None:
        self.log = log
        self.fired: set[tuple[int, bool]] = set()
        self.num_dropped = 0
        num_spans = len(log.span_sites)
        self._now_ns = log.marks[0] if log.marks else 0
        self._num_jumps = 0
        self._open: list[OpenOperator] = []
        self._brackets: list[_Bracket] = []
        self._waits = Waits(len(log.transfer_kinds))
        self._depths = array("h", [0]) * num_spans
        self._parents = array("i", [NO_SPAN]) * num_spans
        self._shapes: list[Shape | None] = [None] * num_spans
        self._interned: dict[Shape, Shape] = {}
        self._parts: dict[int, dict[OperatorKind, Shape]] = {}

    def records(self) -> Iterator[Record]:
        """All records of the step, operators first as they ended, transfers last."""
        log = self.log
        before = -1
        for what, mark in zip(log.what, log.marks, strict=True):
            code, number = split(what)
            self._spend(mark, is_ours=code == Code.HOOK_END)
            if code <= Code.BACKWARD_END:
                yield from self._mark_span(code, number)
            elif code == Code.PHASE_BEGIN:
                self._brackets.append(_Bracket(number, self._now_ns, self._num_jumps))
            elif code == Code.PHASE_END:
                yield from self._end_phase(number)
            elif code == Code.WAIT_BEGIN:
                self._waits.begin(number, self._now_ns, self._num_jumps, is_next=before == number)
            elif code != Code.HOOK_END:
                is_done = code == Code.CALL_DONE
                self._waits.end(number, self._now_ns, self._num_jumps, is_done=is_done)
            before = number if code == Code.WAIT_END else -1
        yield from self._close(self._open)
        yield from self._transfers()

    def _spend(self, mark: int, *, is_ours: bool) -> None:
        spent = mark - self._now_ns
        if spent < 0:
            # Events of several streams need not pass in the order in which they were queued.
            if not self.log.is_host:
                return
            self._num_jumps += 1
            spent = 0
        self._now_ns = mark
        if self._waits.num_open:
            for bracket in self._brackets:
                bracket.wait_ns += spent
        elif is_ours:
            for bracket in self._brackets:
                bracket.hook_ns += spent
        elif self._open:
            deepest(self._open).own_ns += spent

    def _mark_span(self, code: int, number: int) -> Iterator[Record]:
        if code == Code.SPAN_BEGIN:
            again = [s for s in self._open if s.instance == number]
            self._open = [s for s in self._open if s.instance != number] if again else self._open
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
        is_again = any(self.log.phases[b.number][0] == BACKWARD for b in self._brackets)
        around = [span for span in self._open if span.phase is not Phase.BACKWARD]
        parent = around[-1].instance if around else NO_SPAN
        if parent == NO_SPAN and is_again and self._open:
            # Recomputed inside the backward pass of the operator that is open now.
            parent = deepest(self._open).instance
        self._parents[number] = parent
        self._depths[number] = self._depths[parent] + 1 if parent != NO_SPAN else 0
        self._open.append(self._span(number, Phase.RECOMPUTE if is_again else Phase.FORWARD))

    def _span(self, instance: int, phase: Phase) -> OpenOperator:
        return OpenOperator(
            self.log.span_sites[instance],
            instance,
            phase,
            self._depths[instance],
            self._microbatch(),
            self._now_ns,
            self._num_jumps,
        )

    def _microbatch(self) -> int:
        for bracket in reversed(self._brackets):
            name, count = self.log.phases[bracket.number]
            if name in (FORWARD, BACKWARD):
                return count
        return 0

    def _unrelated(self, instance: int) -> list[OpenOperator]:
        """Open backward spans that are neither inside nor around ``instance``."""
        line = {instance, *self._ancestors(instance)}
        return [
            span
            for span in self._open
            if span.phase is Phase.BACKWARD
            and span.instance not in line
            and instance not in self._ancestors(span.instance)
        ]

    def _ancestors(self, instance: int) -> set[int]:
        found = set()
        while (instance := self._parents[instance]) != NO_SPAN:
            found.add(instance)
        return found

    def _close(self, spans: list[OpenOperator]) -> Iterator[Record]:
        log = self.log
        for span in list(spans):
            self._open.remove(span)
            shape = self._shape(span.instance)
            if shape is None:
                continue
            if span.num_jumps != self._num_jumps:
                self.num_dropped += 1
                continue
            self.fired.add((span.site, span.phase is Phase.BACKWARD))
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
                duration_ns=span.own_ns,
                rows=self._rows(span) if site.kind is OperatorKind.GROUPED_LINEAR else (),
            )

    def _rows(self, span: OpenOperator) -> tuple[int, ...]:
        """Of each expert, once: with the forward pass."""
        raw = self.log.shapes[self.log.span_shapes[span.instance]][0]
        return raw[3] if span.phase is Phase.FORWARD and len(raw) > 3 else ()

    def _shape(self, instance: int) -> Shape | None:
        """Canonical shape, known once the operators inside are; None where it broke off."""
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
        common: dict[str, Any] = {
            "step": self.log.step,
            "window": self.log.window,
            "microbatch": count,
            "start_ns": bracket.start_ns,
        }
        duration_ns = self._now_ns - bracket.start_ns
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
        for number in range(1, len(log.transfer_kinds)):
            times = self._waits.times(number, self._now_ns, self._num_jumps)
            if times is None:
                continue
            if times.is_broken:
                self.num_dropped += 1
                continue
            transfer = log.transfer(number)
            yield CollectiveRecord(
                step=log.step,
                window=log.window,
                **transfer.called,
                is_async=not times.is_sync,
                is_bound=not times.is_known,
                issue_ns=times.issue_ns,
                duration_ns=times.end_ns - times.issue_ns,
                exposed_ns=times.exposed_ns,
            )


def deepest(spans: list[OpenOperator]) -> OpenOperator:
    """The innermost of the open operators; of equals, the latest."""
    best = spans[0]
    for span in spans:
        if span.depth >= best.depth:
            best = span
    return best
