"""Hooked steps of one rank of a large run, marked by the real recorder on a clock of our own."""

from __future__ import annotations

import random
from collections.abc import Iterator

from forerun.calib.marks.step_marks import TransferKind
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, OPTIMIZER, Header, StepRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.operators import OperatorKind, optimizer_operator
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.ranks import group, position
from forerun.hooks.recording.window import samples
from forerun.hooks.sensors.recorder import Recorder, backward_mark
from forerun.hooks.sensors.step_log import Site, StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

KINDS = (
    OperatorKind.NORM,
    OperatorKind.LINEAR_QKV,
    OperatorKind.CORE_ATTENTION,
    OperatorKind.LINEAR_PROJ,
    OperatorKind.NORM,
    OperatorKind.LINEAR_FC1,
    OperatorKind.ACTIVATION,
    OperatorKind.LINEAR_FC2,
)
LINEAR_KINDS = (KINDS[1], KINDS[3], KINDS[5], KINDS[7])
SHAPE = (4096, 8192, 8192)


class Clock:
    """Nanoseconds that pass by small random amounts."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 10**15 + seed
        self._random = random.Random(seed)

    def __call__(self) -> int:
        self.now_ns += self._random.randrange(1_000, 400_000)
        return self.now_ns


class SimulatedRank:
    """One rank of a layout with ``num_layers`` and ``num_microbatches`` per stage.

    Each layer has eight operators and the four collectives of sequence parallelism both ways.
    """

    def __init__(
        self,
        layout: Parallelism,
        rank: int,
        *,
        num_layers: int = 5,
        num_microbatches: int = 64,
        has_operators: bool = True,
    ) -> None:
        self.layout, self.rank = layout, rank
        self.num_layers, self.num_microbatches = num_layers, num_microbatches
        self.has_operators = has_operators
        self.place = position(layout, rank)
        self.clock = Clock(rank)
        self._open: list[int] = []
        self.sites = tuple(Site(kind=kind, layer=n) for n in range(num_layers) for kind in KINDS)

    def header(self) -> Header:
        """Return the first line of the rank's file."""
        return Header(
            schema=1,
            run_id="simulated",
            rank=self.rank,
            world_size=self.layout.num_ranks,
            created_by="test",
            device="simulated",
            started_unix_s=1.0,
            stage=self.place.stage,
            tp_rank=self.place.tp_rank,
            dp_rank=self.place.dp_rank,
        )

    def step(self, number: int, num_hooked: int, window: int = 0) -> tuple[StepRecord, StepLog]:
        """Return a hooked step: its record and its marks."""
        recorder = Recorder(HostStopwatch(self.clock))
        log = recorder.open(
            StepLog(
                step=number,
                window=window,
                sites=self.sites if self.has_operators else (),
                samples=samples(tuple(range(self.num_microbatches)), num_hooked),
                optimizer=optimizer_operator(10**8),
            )
        )
        start_ns = self.clock()
        for _ in range(self.num_microbatches):
            self._pass(recorder, log, is_forward=True)
            self._pass(recorder, log, is_forward=False)
        recorder.begin_phase(OPTIMIZER)
        for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            for _ in range(4):
                self._transfer(recorder, log, collective, GroupRole.DP)
        recorder.end_phase(OPTIMIZER)
        recorder.close()
        assert log.resolve()
        record = StepRecord(
            step=number,
            window=window,
            start_ns=start_ns,
            duration_ns=self.clock() - start_ns,
            gap_ns=1000,
            is_hooked=True,
        )
        return record, log

    def _pass(self, recorder: Recorder, log: StepLog, *, is_forward: bool) -> None:
        if self.place.stage:
            self._message(recorder, log, is_forward=is_forward)
        name = FORWARD if is_forward else BACKWARD
        recorder.begin_phase(name)
        for site in range(self.num_layers * len(KINDS)):
            kind = KINDS[site % len(KINDS)]
            if is_forward:
                self._forward(recorder, log, site)
            else:
                self._backward(recorder, log)
            if kind in LINEAR_KINDS:
                is_gather = (kind in (KINDS[1], KINDS[5])) == is_forward
                gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
                self._transfer(recorder, log, gather if is_gather else scatter, GroupRole.TP)
        recorder.end_phase(name)

    def _forward(self, recorder: Recorder, log: StepLog, site: int) -> None:
        if not self.has_operators:
            return
        span = recorder.begin_span(site)
        recorder.end_span(span, recorder.stopwatch.mark(), (None, SHAPE), 2)
        if span >= 0:
            self._open.append(span)

    def _backward(self, recorder: Recorder, log: StepLog) -> None:
        if log.is_sampling and self._open:
            span = self._open.pop()
            recorder.mark_backward(log, [backward_mark(span, is_begin=True)])
            recorder.mark_backward(log, [backward_mark(span, is_begin=False)])

    def _transfer(
        self, recorder: Recorder, log: StepLog, collective: Collective, role: GroupRole
    ) -> None:
        kind = TransferKind(
            collective=collective,
            role=role,
            group=f"{role.value}#1",
            ranks=group(self.layout, role, self.rank),
        )
        number = recorder.add_transfer(log.kind_number(kind), 1 << 26)
        recorder.begin_wait(number)
        recorder.end_wait(number, is_done=True)

    def _message(self, recorder: Recorder, log: StepLog, *, is_forward: bool) -> None:
        ranks = group(self.layout, GroupRole.PP, self.rank)
        stage = self.place.stage
        kind = TransferKind(
            collective=Collective.RECV if is_forward else Collective.SEND,
            role=GroupRole.PP,
            group="pp#1",
            ranks=ranks,
            peer=ranks[stage - 1],
        )
        number = recorder.add_transfer(log.kind_number(kind), 1 << 26)
        recorder.begin_wait(number)
        recorder.end_wait(number, is_done=True)


def steps(rank: SimulatedRank, numbers: range) -> Iterator[tuple[StepRecord, StepLog]]:
    """Yield the hooked steps of a window, by number."""
    for num_hooked, number in enumerate(numbers):
        yield rank.step(number, num_hooked)
