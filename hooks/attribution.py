"""From the marks of one step to records: every moment belongs to the deepest open operator.

The marks lie in the order of execution.  The time between two of them goes to the transfer that is
waited for, else to the deepest open operator, and always to the open phases.  So a duration is
an operator's own: nested operators, synchronous collectives and our own hooks are out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..calib.samples.records import CollectiveRecord, OperatorRecord, PhaseRecord, Record
from ..calib.workload.operators import OperatorKind, Phase
from .recorder import BACKWARD, FORWARD, NO_PARENT, OPTIMIZER, Code, StepLog, split
from .shapes import Shape, canonical_shape

BLOCKED_NS = 20_000
"""A wait that took less found its transfer complete: the call itself takes some microseconds."""


@dataclass(slots=True)
class _Span:
    site: int
    instance: int
    phase: Phase
    depth: int
    microbatch: int
    start_ns: int
    own_ns: int = 0


@dataclass(slots=True)
class _Bracket:
    number: int
    start_ns: int
    wait_ns: int = 0
    hook_ns: int = 0


@dataclass(slots=True)
class _Waits:
    """Times of one transfer: in the call, then in each wait for it."""

    issue_ns: int
    begin_ns: int
    call_end_ns: int = -1
    end_ns: int = -1
    exposed_ns: int = 0
    blocked_ns: int = 0
    is_sync: bool = False


@dataclass(slots=True)
class Attribution:
    """Records of one resolved step.  ``fired`` collects (site, is_backward) for the coverage."""

    log: StepLog
    fired: set[tuple[int, bool]] = field(default_factory=set)
    _now_ns: int = 0
    _open: list[_Span] = field(default_factory=list)
    _brackets: list[_Bracket] = field(default_factory=list)
    _waits: dict[int, _Waits] = field(default_factory=dict)
    _waiting: int = 0
    _depths: dict[int, int] = field(default_factory=dict)
    _parents: dict[int, int] = field(default_factory=dict)
    _shapes: dict[int, Shape] = field(default_factory=dict)
    _parts: dict[int, dict[OperatorKind, Shape]] = field(default_factory=dict)

    def records(self) -> Iterator[Record]:
        """All records of the step, operators first as they ended, transfers last."""
        log = self.log
        before = -1
        for what, mark in zip(log.what, log.marks, strict=True):
            code, number = split(what)
            self._spend(mark, is_ours=code == Code.HOOK_END)
            if code == Code.SPAN_BEGIN:
                yield from self._begin(number)
            elif code == Code.SPAN_END:
                yield from self._end(number)
            elif code == Code.PHASE_BEGIN:
                self._brackets.append(_Bracket(number, mark))
            elif code == Code.PHASE_END:
                yield from self._end_phase(number)
            elif code == Code.WAIT_BEGIN:
                self._begin_wait(number, is_next=before == number)
            elif code == Code.WAIT_END:
                self._end_wait(number)
            before = number if code == Code.WAIT_END else -1
        yield from self._close(self._open)
        yield from self._transfers()

    def _spend(self, mark: int, *, is_ours: bool) -> None:
        spent = mark - self._now_ns
        self._now_ns = mark
        if self._waiting:
            for bracket in self._brackets:
                bracket.wait_ns += spent
        elif is_ours:
            for bracket in self._brackets:
                bracket.hook_ns += spent
        elif self._open:
            _deepest(self._open).own_ns += spent

    def _begin(self, number: int) -> Iterator[Record]:
        site, parent, _, _ = self.log.spans[number]
        if site is None:
            forward = self.log.spans[parent][0]
            yield from self._close(self._unrelated(parent))
            self._open.append(self._span(forward, parent, Phase.BACKWARD))
            return
        is_again = any(self.log.phases[b.number][0] == BACKWARD for b in self._brackets)
        if parent == NO_PARENT and is_again and self._open:
            # Recomputed inside the backward pass of the operator that is open now.
            parent = _deepest(self._open).instance
        self._parents[number] = parent
        self._depths[number] = self._depths.get(parent, -1) + 1
        self._open.append(self._span(site, number, Phase.RECOMPUTE if is_again else Phase.FORWARD))

    def _span(self, site: int, instance: int, phase: Phase) -> _Span:
        self.fired.add((site, phase is Phase.BACKWARD))
        return _Span(
            site, instance, phase, self._depths.get(instance, 0), self._microbatch(), self._now_ns
        )

    def _microbatch(self) -> int:
        for bracket in reversed(self._brackets):
            name, count = self.log.phases[bracket.number]
            if name in (FORWARD, BACKWARD):
                return count
        return 0

    def _unrelated(self, instance: int) -> list[_Span]:
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
        while (instance := self._parents.get(instance, NO_PARENT)) != NO_PARENT:
            found.add(instance)
        return found

    def _end(self, number: int) -> Iterator[Record]:
        site, parent, _, _ = self.log.spans[number]
        is_backward = site is None
        instance = parent if is_backward else number
        ended = [
            span
            for span in self._open
            if span.instance == instance and (span.phase is Phase.BACKWARD) == is_backward
        ]
        yield from self._close(ended)

    def _close(self, spans: list[_Span]) -> Iterator[Record]:
        for span in list(spans):
            self._open.remove(span)
            shape = self._shape(span.instance)
            if shape is None:
                continue
            site = self.log.sites[span.site]
            yield OperatorRecord(
                step=self.log.step,
                window=self.log.window,
                microbatch=span.microbatch,
                kind=site.kind,
                phase=span.phase,
                shape=shape,
                element_nbytes=self.log.spans[span.instance][3],
                layer=site.layer,
                start_ns=span.start_ns,
                duration_ns=span.own_ns,
            )

    def _shape(self, instance: int) -> Shape | None:
        """Canonical shape, known once the operators inside are; None where it broke off."""
        if instance in self._shapes:
            return self._shapes[instance]
        site, _, raw, _ = self.log.spans[instance]
        if raw is None:
            return None
        kind = self.log.sites[site].kind
        shape = canonical_shape(kind, raw, self._parts.get(instance, {}))
        self._shapes[instance] = shape
        parent = self._parents.get(instance, NO_PARENT)
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
        common = {
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
        if name == OPTIMIZER and self.log.num_parameters:
            yield OperatorRecord(
                kind=OperatorKind.OPTIMIZER,
                phase=Phase.STEP,
                shape=(self.log.num_parameters,),
                element_nbytes=4,
                layer=0,
                duration_ns=duration_ns - bracket.wait_ns - bracket.hook_ns,
                **common,
            )

    def _begin_wait(self, number: int, *, is_next: bool) -> None:
        self._waiting += 1
        waits = self._waits.get(number)
        if waits is None:
            self._waits[number] = _Waits(self._now_ns, self._now_ns)
            return
        waits.is_sync = waits.is_sync or (is_next and waits.end_ns < 0)
        waits.begin_ns = self._now_ns

    def _end_wait(self, number: int) -> None:
        self._waiting = max(0, self._waiting - 1)
        waits = self._waits.get(number)
        if waits is None:
            return
        spent = self._now_ns - waits.begin_ns
        waits.exposed_ns += spent
        if waits.call_end_ns < 0:
            waits.call_end_ns = self._now_ns
        elif waits.end_ns < 0:
            waits.end_ns, waits.blocked_ns = self._now_ns, spent

    def _transfers(self) -> Iterator[Record]:
        for number, transfer in enumerate(self.log.transfers):
            waits = self._waits.get(number)
            if transfer is None or waits is None or waits.call_end_ns < 0:
                continue
            is_sync = waits.is_sync or number in self.log.finished
            end_ns = waits.end_ns
            if end_ns < 0:
                end_ns = waits.call_end_ns if is_sync else self._now_ns
            is_known = is_sync or (waits.end_ns >= 0 and waits.blocked_ns >= BLOCKED_NS)
            yield CollectiveRecord(
                step=self.log.step,
                window=self.log.window,
                collective=transfer.collective,
                role=transfer.role,
                group=transfer.group,
                ranks=transfer.ranks,
                nbytes=transfer.nbytes,
                sequence=transfer.sequence,
                peer=transfer.peer,
                is_async=not is_sync,
                is_bound=not is_known,
                issue_ns=waits.issue_ns,
                duration_ns=end_ns - waits.issue_ns,
                exposed_ns=waits.exposed_ns,
            )


def _deepest(spans: list[_Span]) -> _Span:
    """The innermost of the open operators; of equals, the latest."""
    best = spans[0]
    for span in spans:
        if span.depth >= best.depth:
            best = span
    return best
