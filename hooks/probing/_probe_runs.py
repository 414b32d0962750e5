"""Execution of probes: marks around each repeat, and records once the marks can be read."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...calib.advice.probe_sizes import REPEATS, WARMUPS, CollectiveProbe, OperatorProbe
from ...calib.records.record_kinds import CollectiveRecord, OperatorRecord, Record
from ...calib.workload.collectives import Collective
from ...calib.workload.config import Precision, RunConfig
from ...calib.workload.operators import OperatorKind, Phase
from ..sensors.stopwatch import Readings, Stopwatch
from ._probe_operators import make_bench
from ._probe_transfers import TransferBench

_HEAD_START_CYCLES = 2_000_000
"""About a millisecond of sleep on the device, so that the host runs ahead and events enclose
kernels rather than launches."""


def dtype_of(element_nbytes: int, precision: Precision) -> torch.dtype:
    """Return the dtype of an operator's elements."""
    if element_nbytes == 4:
        return torch.float32
    return torch.float16 if precision is Precision.FP16 else torch.bfloat16


@dataclass(slots=True, kw_only=True)
class ProbeLog:
    """Marks of the probes of one slice, with the step that they ran before."""

    step: int
    window: int
    marks: array[int] = field(default_factory=lambda: array("q"))
    makers: list[Callable[[int, int], Record]] = field(default_factory=list)
    """Functions that make a record of the next two marks: begin and end, in nanoseconds."""
    readings: Readings | None = None

    def records(self) -> Iterator[Record] | None:
        """Return the records once all marks can be read without waiting; None until then."""
        if self.readings is None or not self.readings.is_ready():
            return None
        times = self.readings.read(self.marks)
        if times is None:
            return iter(())
        pairs = zip(times[::2], times[1::2], strict=True)
        return (make(*pair) for make, pair in zip(self.makers, pairs, strict=True))

    def note(self, begin: int, end: int, make: Callable[[int, int], Record]) -> None:
        """Add two marks and the maker of their record."""
        self.marks.extend((begin, end))
        self.makers.append(make)


class ProbeRuns:
    """Runner of probes of one run's configuration on one device."""

    def __init__(self, config: RunConfig, device: torch.device, stopwatch: Stopwatch) -> None:
        self._config = config
        self._device = device
        self._stopwatch = stopwatch
        self._sequence = 0

    def begin(self, step: int, window: int) -> ProbeLog:
        """Begin a slice of probes."""
        self._stopwatch.begin_step()
        return ProbeLog(step=step, window=window)

    def end(self, log: ProbeLog) -> None:
        """End the slice: its marks may be read from now on."""
        log.readings = self._stopwatch.end_step()

    def operator(self, probe: OperatorProbe, log: ProbeLog) -> None:
        """Warm up, then repeat one operator's forward and backward passes."""
        dtype = dtype_of(probe.element_nbytes, self._config.precision)
        bench = make_bench(probe.kind, probe.shape, self._config, dtype=dtype, device=self._device)
        is_step = probe.kind is OperatorKind.OPTIMIZER
        mark = self._stopwatch.mark
        for repeat in range(-WARMUPS, REPEATS):
            if repeat == 0:
                self._run_ahead()
            begin = mark()
            bench.forward()
            middle = mark()
            bench.backward()
            end = mark()
            if repeat < 0:
                continue
            first = Phase.STEP if is_step else Phase.FORWARD
            log.note(begin, middle, _operator_maker(probe, first, repeat, log))
            if not is_step:
                log.note(middle, end, _operator_maker(probe, Phase.BACKWARD, repeat, log))

    def transfers(
        self,
        benches: Sequence[tuple[CollectiveProbe, TransferBench]],
        log: ProbeLog,
        *,
        most_s: float,
    ) -> None:
        """Repeat collectives that every rank of their groups has agreed to join.

        The ranks of a group agree on the slowest first repeat, and from it on the number of repeats
        within ``most_s``; on a device this synchronises the stream and reads a value.
        """
        for probe, bench in benches:
            num_repeats = self._num_repeats(bench, most_s / len(benches))
            for _ in range(WARMUPS):
                bench.run()
            for _ in range(num_repeats):
                self._transfer(probe, bench, log)

    def transfers_once(
        self, benches: Sequence[tuple[CollectiveProbe, TransferBench]], log: ProbeLog
    ) -> None:
        """Run each collective once after one warm-up; all ranks of the groups have agreed to
        join."""
        for probe, bench in benches:
            bench.run()
            self._transfer(probe, bench, log)

    def _transfer(self, probe: CollectiveProbe, bench: TransferBench, log: ProbeLog) -> None:
        is_sender = bench.is_sender
        begin = self._stopwatch.mark()
        bench.run()
        end = self._stopwatch.mark()
        self._sequence += 1
        log.note(begin, end, _transfer_maker(probe, bench, is_sender, self._sequence, log))

    def _num_repeats(self, bench: TransferBench, most_s: float) -> int:
        bench.run()
        first = slowest_s(bench)
        affordable = int(min(WARMUPS + REPEATS, most_s / max(first, 1e-9)))
        return max(1, affordable - WARMUPS)

    def _run_ahead(self) -> None:
        if self._device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)


def slowest_s(bench: TransferBench) -> float:
    """Return the time of one repeat on the slowest rank of the group, the same on all its ranks."""
    begin_s = time.perf_counter()
    bench.run()
    device = bench.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    spent = torch.tensor([time.perf_counter() - begin_s], dtype=torch.float64, device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=bench.carrier.group)
    return float(spent.item())


def _operator_maker(
    probe: OperatorProbe, phase: Phase, repeat: int, log: ProbeLog
) -> Callable[[int, int], Record]:
    return lambda begin_ns, end_ns: OperatorRecord(
        step=log.step,
        window=log.window,
        microbatch=repeat,
        kind=probe.kind,
        phase=phase,
        shape=probe.shape,
        element_nbytes=probe.element_nbytes,
        layer=0,
        start_ns=begin_ns,
        duration_ns=max(0, end_ns - begin_ns),
        is_probe=True,
    )


def _transfer_maker(
    probe: CollectiveProbe, bench: TransferBench, is_sender: bool, sequence: int, log: ProbeLog
) -> Callable[[int, int], Record]:
    is_message = bench.collective is Collective.SEND
    collective = Collective.RECV if is_message and not is_sender else bench.collective

    return lambda begin_ns, end_ns: CollectiveRecord(
        step=log.step,
        window=log.window,
        collective=collective,
        role=probe.call.role,
        group=bench.carrier.name,
        ranks=bench.carrier.ranks,
        nbytes=probe.call.nbytes,
        sequence=sequence,
        peer=bench.peer,
        is_async=False,
        is_bound=False,
        issue_ns=begin_ns,
        duration_ns=max(0, end_ns - begin_ns),
        exposed_ns=max(0, end_ns - begin_ns),
        is_probe=True,
    )
