"""Records of a traced step: a kernel belongs to the operator that was open at its launch.

The step's marks and its kernels have one clock, that of the trace, and work is attributed to
operators as in every other step.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ..records.chrome_trace import from_chrome
from ..records.kineto_trace import (
    KERNEL,
    TracedCollective,
    TracedWork,
    busy_ns,
    num_products,
    products_of,
    work_of,
)
from ..records.record_kinds import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    CollectiveRecord,
    CoverageRecord,
    OperatorRecord,
    PhaseRecord,
    Record,
    TraceRecord,
)
from ..workload.operators import OperatorKind, Phase
from ._attribution import Attribution, OpenOperator, deepest
from .step_marks import NO_TIME, StepMarks, Transfer
from .traced_step import COVERAGE, MARK, TracedStep

_NUMBERS = ("External id", "correlation")
UNOWNED_REMARK_FRAC = 0.05
"""Share of kernel time without an operator above which it is reported; sums between layers and of
gradients in the autograd engine are less."""


def traced_records(step: TracedStep, chrome_events: Iterable[object]) -> Iterator[Record]:
    """Yield work of operators, transfers, and the coverage, which says what the trace lacks.

    ``chrome_events`` are those of the trace's file.
    """
    log, events = step.log, from_chrome(map(slim, chrome_events))
    times_ns = sorted(event.start_ns for event in events if event.name == MARK)
    if len(times_ns) != step.num_marks or not times_ns:
        text = f"{COVERAGE}: the trace has {len(times_ns)} of {step.num_marks} marks"
        yield CoverageRecord.remark(log.window, text)
        return
    if step.is_device and not any(event.category == KERNEL for event in events):
        yield CoverageRecord.remark(
            log.window,
            f"{COVERAGE}: the trace has no kernels: the driver does not let this process profile, "
            "or another profiler is attached",
        )
        return
    # Mark 0 stands for all time before the trace.
    times_ns.insert(0, times_ns[0])
    marks = (times_ns[mark] if mark != NO_TIME else NO_TIME for mark in log.marks)
    reading = _Reading(replace(log, marks=array("q", marks)), work_of(events), step.first_transfer)
    yield from reading.records()
    yield CoverageRecord(window=log.window, name=COVERAGE, installed=1, fired=1)
    if reading.unowned_frac > UNOWNED_REMARK_FRAC:
        share = f"{reading.unowned_frac * 100:.0f} %"
        text = f"{COVERAGE}: {share} of the time of kernels in passes belongs to no operator"
        yield CoverageRecord.remark(log.window, text)


def slim(event: object) -> object:
    """Return the event without shapes and the like, which are most of it and not read here."""
    if not isinstance(event, dict):
        return event
    details = event.get("args")
    if isinstance(details, dict) and "Collective name" not in details:
        event["args"] = {name: details[name] for name in _NUMBERS if name in details}
    return event


@dataclass(slots=True)
class _Pass:
    """Kernels launched in one pass, by operators and by none."""

    has_operators: bool = False
    owned_ns: int = 0
    unowned: list[TracedWork] = field(default_factory=list)

    def give(self, work: Sequence[TracedWork]) -> None:
        """Assign work of this pass to an operator."""
        given = set(map(id, work))
        self.owned_ns += sum(w.duration_ns for w in self.unowned if id(w) in given)
        self.unowned = [w for w in self.unowned if id(w) not in given]


@dataclass(frozen=True, slots=True)
class _DeferredWeightGradient:
    """The backward pass of a linear that lacks ``count`` products of its weights."""

    record: OperatorRecord
    work: Sequence[TracedWork]
    count: int


class _Reading(Attribution):
    """Attribution of work as well as of time.

    Work launched while nothing is open belongs to no operator, except deferred products of linears.
    """

    def __init__(self, log: StepMarks, work: Sequence[TracedWork], first_transfer: int) -> None:
        super().__init__(log)
        self._first_transfer = first_transfer
        self._work = [item for item in work if item.message is None]
        self._messages = [item for item in work if item.message is not None]
        self._launches = [item.launched_ns for item in self._work]
        self._taken: dict[int, list[TracedWork]] = {}
        self._num_forward: dict[int, int] = {}
        self._passes: dict[int, _Pass] = {}
        self._put_off: list[_DeferredWeightGradient] = []

    @property
    def unowned_frac(self) -> float:
        """Share of the kernels' time in the recorded passes that no operator has launched."""
        passes = [one for n, one in self._passes.items() if one.has_operators and n != _BETWEEN]
        # Deferred products belong to a pass, wherever they are called.
        late = {id(w): w for w in self._launched_late()}
        late |= {id(w): w for one in passes for w in one.unowned}
        unowned_ns = sum(item.duration_ns for item in late.values())
        return unowned_ns / max(1, unowned_ns + sum(one.owned_ns for one in passes))

    def records(self) -> Iterator[Record]:
        """Yield operators in the order of their ends, then deferred ones, then transfers."""
        bounds = (0, 0)
        for record in super().records():
            if isinstance(record, TraceRecord):
                yield record
            elif isinstance(record, PhaseRecord) and record.name == OPTIMIZER:
                bounds = (record.start_ns, record.start_ns + record.duration_ns)
            elif isinstance(record, OperatorRecord):
                yield from _traced(record, self._launched(*bounds))
        behind = self._launched(self._now_ns, _NEVER_NS)
        self._passes.setdefault(_BETWEEN, _Pass()).unowned += behind
        yield from self._late()
        yield from self._known_transfers()

    def _spend(self, mark: int, *, is_ours: bool) -> None:
        launched = self._launched(self._now_ns, mark)
        one = self._passes.setdefault(self._pass_number(), _Pass())
        if self._open and not self._waits.num_open:
            on_time = [item for item in launched if not item.is_late]
            self._taken.setdefault(id(deepest(self._open)), []).extend(on_time)
            one.has_operators = True
            one.owned_ns += sum(item.duration_ns for item in on_time)
            launched = [item for item in launched if item.is_late]
        one.unowned += launched
        super()._spend(mark, is_ours=is_ours)

    def _pass_number(self) -> int:
        """Return the number of the innermost open pass; ``_BETWEEN`` if none is open."""
        open_passes = (b.number for b in reversed(self._brackets) if self._is_pass(b.number))
        return next(open_passes, _BETWEEN)

    def _is_pass(self, number: int) -> bool:
        return self.log.phases[number][0] in (FORWARD, BACKWARD)

    def _close(self, spans: list[OpenOperator]) -> Iterator[Record]:
        for span in list(spans):
            work = self._taken.pop(id(span), [])
            late = 0
            if self.log.sites[span.site].kind not in _WITH_WEIGHTS:
                pass
            elif span.phase is not Phase.BACKWARD:
                self._num_forward[span.instance] = num_products(work)
            else:
                late = self._num_late(span, work)
            for record in super()._close([span]):
                if isinstance(record, OperatorRecord) and late:
                    self._put_off.append(_DeferredWeightGradient(record, work, late))
                elif isinstance(record, OperatorRecord):
                    yield from _traced(record, work)

    def _num_late(self, span: OpenOperator, work: list[TracedWork]) -> int:
        """Return the number of missing weight products, which equals the number of input
        products."""
        # One product for all experts, or one for each; a linear has one, possibly in pieces.
        is_grouped = self.log.sites[span.site].kind is OperatorKind.GROUPED_LINEAR
        count = self._num_forward.get(span.instance, 0) if is_grouped else 1
        return count if num_products(work) == count else 0

    def _late(self) -> Iterator[Record]:
        """Yield the backward passes of deferred linears, with the late products if there are any.

        Megatron's node computes them in the order of the backward pass.  A loop of the user's own
        may use any order: then products cannot be assigned, and the pass is left out.
        """
        late = self._launched_late()
        in_order = [item for item in late if item.is_late]
        products = products_of(in_order or late)
        is_complete = len(products) == sum(one.count for one in self._put_off)
        for one in self._put_off:
            deferred_work = (
                [w for product in products[: one.count] for w in product] if in_order else []
            )
            del products[: one.count]
            if in_order or not is_complete:
                late_work = deferred_work if is_complete else []
                yield from _traced(one.record, [*one.work, *late_work])
            for item in self._passes.values() if is_complete else ():
                item.give(deferred_work)

    def _launched_late(self) -> list[TracedWork]:
        """Return work without an operator since the first deferral: Megatron's node, products."""
        begin_ns = min((one.record.start_ns for one in self._put_off), default=_NEVER_NS)
        passes = (one for n, one in self._passes.items() if one.has_operators or n == _BETWEEN)
        unowned = (w for one in passes for w in one.unowned if w.launched_ns >= begin_ns)
        return sorted(
            (w for w in unowned if w.is_late or w.is_product), key=lambda w: w.launched_ns
        )

    def _transfers(self) -> Iterator[Record]:
        yield from ()

    def _launched(self, start_ns: int, end_ns: int) -> list[TracedWork]:
        return self._work[
            bisect_left(self._launches, start_ns) : bisect_left(self._launches, end_ns)
        ]

    def _known_transfers(self) -> Iterator[Record]:
        """Yield transfers, matching calls and kernels of a group and collective if they are equally
        many."""
        transfers_by_message: dict[TracedCollective, list[Transfer]] = {}
        for number in range(max(1, self._first_transfer), len(self.log.transfer_kinds)):
            transfer = self.log.transfer(number)
            message = TracedCollective(
                collective=transfer.kind.collective, group=transfer.kind.group
            )
            transfers_by_message.setdefault(message, []).append(transfer)
        done: dict[TracedCollective, list[TracedWork]] = {}
        for item in _joined_copies(self._messages):
            if item.message is not None:
                done.setdefault(item.message, []).append(item)
        for message, transfers in transfers_by_message.items():
            kernels = done.get(message, [])
            if len(kernels) == len(transfers):
                for transfer, kernel in zip(transfers, kernels, strict=True):
                    yield self._transfer(transfer, kernel)

    def _transfer(self, transfer: Transfer, kernel: TracedWork) -> CollectiveRecord:
        return CollectiveRecord(
            step=self.log.step,
            window=self.log.window,
            **transfer.called,
            is_async=True,
            is_bound=False,
            issue_ns=kernel.start_ns,
            duration_ns=kernel.duration_ns,
            exposed_ns=0,
        )


def _joined_copies(messages: Sequence[TracedWork]) -> Iterator[TracedWork]:
    """Yield messages with the copies of one call joined: copy engines split a collective."""
    for (call, is_copy), items in groupby(messages, lambda m: (m.call, m.name.startswith(_COPY))):
        copies = list(items)
        if not (call and is_copy):
            yield from copies
            continue
        begin_ns = min(copy.start_ns for copy in copies)
        end_ns = max(copy.start_ns + copy.duration_ns for copy in copies)
        yield replace(copies[0], start_ns=begin_ns, duration_ns=end_ns - begin_ns)


_NEVER_NS = sys.maxsize
_BETWEEN = -1
_COPY = "Mem"
"""Prefix of Kineto's names of copies and fills."""
_SHARED = ("step", "window", "microbatch", "kind", "phase", "shape", "element_nbytes", "layer")
"""Fields that a traced operator copies from the one that was open."""
_WITH_WEIGHTS = frozenset(
    kind for kind in OperatorKind if kind.is_linear or kind is OperatorKind.GROUPED_LINEAR
)


def _traced(record: OperatorRecord, work: Sequence[TracedWork]) -> Iterator[TraceRecord]:
    if work:
        shared = {name: getattr(record, name) for name in _SHARED}
        yield TraceRecord(**shared, duration_ns=busy_ns(work), num_kernels=len(work))
