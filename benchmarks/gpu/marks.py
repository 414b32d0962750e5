"""Events, streams and captures: the basis of Forerun's marks, without any training."""

from __future__ import annotations

import os
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from forerun.benchmarks.gpu.bench import Bench, timed_event
from forerun.calib.records import CollectiveRecord, OperatorRecord
from forerun.calib.workload import Collective, GroupRole, OperatorKind
from forerun.hooks.process import Guard, Host, WeakHost
from forerun.hooks.recording import Attribution, capture_safe_dump, find_dumps, find_exchange
from forerun.hooks.sensors import (
    FORWARD,
    MAX_EVENTS,
    Recorder,
    Site,
    StallHooks,
    StepLog,
    TransferKind,
)
from forerun.hooks.session import Instruments, stopwatch_for

_QUEUED = 400
"""Kernels that a stream queues before the host has to wait for it."""
_KERNEL_S = 20e-6
_LAYERS, _LAYER_S, _GATHER_S = 8, 0.005, 0.004


def events(bench: Bench) -> None:
    """Measure host and stream time of recording, querying and reading events; their resolution."""
    bench.begin_device()
    count = MAX_EVENTS // 16 if bench.is_cpu else MAX_EVENTS
    pool = [timed_event() for _ in range(count)]
    for name in ("first_record_given_stream_s", "record_given_stream_s"):
        bench.put(**{name: _mean_s(partial(_record_all, pool, torch.cuda.current_stream()), count)})
        torch.cuda.synchronize()
    bench.put(query_s=_mean_s(lambda: [event.query() for event in pool], count))
    first = pool[0]
    bench.put(read_s=_mean_s(lambda: [first.elapsed_time(event) for event in pool], count))
    raw_stream = torch._C._cuda_getCurrentRawStream
    for name, call in {
        "capturing_s": torch.cuda.is_current_stream_capturing,
        "raw_stream_s": lambda: raw_stream(0),
        "current_stream_s": torch.cuda.current_stream,
    }.items():
        bench.put(**{name: _mean_s(lambda call=call: [call() for _ in range(2000)], 2000)})
    watch = stopwatch_for((torch.nn.Linear(1, 1).to("cuda"),))
    for name in ("first_mark_s", "mark_s"):  # the second reuses events from the first
        watch.begin_step()
        bench.put(**{name: _mean_s(lambda: [watch.mark() for _ in range(2000)], 2000)})
        torch.cuda.synchronize()
        readings = watch.end_step()
        if not readings.is_ready():
            raise ValueError("events that have happened could not be read")
        readings.read(array("q"))
    bench.put(record_of_stream_s=_record_of_stream_s(bench))
    for distance_s in (0.1, 1.0, 8.0):
        bench.put(**{f"error_after_{distance_s:g}_s_p90_frac": _error_frac(bench, distance_s)})


def _record_all(pool: Sequence[Any], stream: Any) -> None:
    """Record all events on a given stream, as Forerun does: looking it up takes longer."""
    for event in pool:
        event.record(stream)


def _mean_s(call: Callable[[], object], count: int) -> float:
    begin_s = time.perf_counter()
    call()
    return (time.perf_counter() - begin_s) / count


def _record_of_stream_s(bench: Bench) -> float:
    """Return the stream's delay per event between two kernels that wait in its queue."""
    value = torch.ones(1024, device="cuda")
    pool = [timed_event() for _ in range(_QUEUED)]

    def spent_s(*, is_marked: bool) -> float:
        begin, end = timed_event(), timed_event()
        torch.cuda.synchronize()
        bench.occupy(0.05)
        begin.record()
        for event in pool:
            value.add_(1.0)
            if is_marked:
                event.record()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    spent_s(is_marked=True)
    costs_s = [spent_s(is_marked=True) - spent_s(is_marked=False) for _ in range(9)]
    return statistics.median(costs_s) / _QUEUED


def _error_frac(bench: Bench, distance_s: float) -> float:
    """Return the error of 20 us kernels timed from an event ``distance_s`` before, over
    directly."""
    reference = timed_event()
    reference.record()
    for _ in range(max(1, round(distance_s / 0.5))):
        bench.occupy(min(distance_s, 0.5))
    pairs = [(timed_event(), timed_event()) for _ in range(200)]
    for begin, end in pairs:
        begin.record()
        bench.occupy(_KERNEL_S)
        end.record()
    torch.cuda.synchronize()
    errors = []
    for begin, end in pairs:
        far_ms = reference.elapsed_time(end) - reference.elapsed_time(begin)
        errors.append(abs(far_ms / begin.elapsed_time(end) - 1))
    return statistics.quantiles(errors, n=10)[-1]


def streams(bench: Bench) -> None:
    """Attribute gathers of 4 ms on a stream of their own that overlap layers of 5 ms."""
    bench.begin_device()
    bench.occupy(0.001)
    for name, is_hidden in (("hidden", True), ("exposed", False)):
        operators, transfers, truths = _overlapped(bench, is_hidden=is_hidden)
        errors = _errors(truths["layers"], [r.duration_ns for r in operators])
        moved = _errors(truths["gathers"], [r.duration_ns for r in transfers])
        bench.put(
            **{
                f"{name}_num_operators": len(operators),
                f"{name}_num_transfers": len(transfers),
                f"{name}_operators_largest_excess": max(errors, default=None),
                f"{name}_transfers_largest_excess": max(moved, default=None),
                f"{name}_exposed_frac": sum(r.exposed_ns for r in transfers)
                / 1e9
                / sum(truths["gathers"]),
                f"{name}_truths_s": truths,
            }
        )


def _errors(truths_s: Sequence[float], recorded_ns: Sequence[int]) -> list[float]:
    """Return each difference over 3 % + 2 us, so that 1 is the bar."""
    pairs = zip(truths_s, recorded_ns, strict=False)
    return [abs(ns / 1e9 - true_s) / (0.03 * true_s + 2e-6) for true_s, ns in pairs]


def _overlapped(
    bench: Bench, *, is_hidden: bool
) -> tuple[list[OperatorRecord], list[CollectiveRecord], dict[str, list[float]]]:
    """Return records of one step through recorder and attribution, and our own event timings."""
    model = torch.nn.Linear(1, 1).to("cuda")
    sites = tuple(Site(kind=OperatorKind.LINEAR_FC1, layer=layer) for layer in range(_LAYERS))
    recorder = Recorder(stopwatch_for((model,)))
    step = _Step(bench, recorder, is_hidden=is_hidden)
    bench.occupy(0.05)  # let the host run ahead
    log = recorder.open(
        StepLog(step=0, window=0, sites=sites, samples_transfers=True, largest_pass=1)
    )
    stalls = StallHooks(recorder, Guard())
    stalls.install()
    try:
        step.run(log)
    finally:
        stalls.remove()
    recorder.close()
    torch.cuda.synchronize()
    if not log.resolve():
        raise ValueError("events that have happened could not be read")
    records = list(Attribution(log).records())
    return (
        [r for r in records if isinstance(r, OperatorRecord)],
        [r for r in records if isinstance(r, CollectiveRecord)],
        step.truths_s(),
    )


class _Step:
    """Layers on the step's stream, each preceded by the gather of the next one, as in FSDP2."""

    def __init__(self, bench: Bench, recorder: Recorder, *, is_hidden: bool) -> None:
        self._bench, self._recorder, self._is_hidden = bench, recorder, is_hidden
        self._side: Any = torch.cuda.Stream()
        self._layers: list[tuple[Any, Any]] = []
        self._gathers: list[tuple[Any, Any]] = []

    def run(self, log: StepLog) -> None:
        kind = log.kind_number(
            TransferKind(
                collective=Collective.ALL_GATHER, role=GroupRole.DP, group="dp#1", ranks=(0, 1)
            )
        )
        main = torch.cuda.current_stream()
        self._recorder.begin_phase(FORWARD)
        for layer in range(_LAYERS):
            self._gather(kind, main)
            if not self._is_hidden:
                main.wait_stream(self._side)
            self._layer(layer)
            main.wait_stream(self._side)
        self._recorder.end_phase(FORWARD)

    def _layer(self, layer: int) -> None:
        span = self._recorder.begin_span(layer)
        self._layers.append(self._timed(_LAYER_S))
        at = self._recorder.stopwatch.mark()
        self._recorder.end_span(span, at, ((layer, 1, 8), (layer, 1, 16)), 2)

    def _gather(self, kind: int, main: Any) -> None:
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            transfer = self._recorder.add_transfer(kind, 64)
            self._recorder.begin_wait(transfer)
            self._gathers.append(self._timed(_GATHER_S))
            self._recorder.end_wait(transfer, is_done=True)

    def _timed(self, time_s: float) -> tuple[Any, Any]:
        begin, end = timed_event(), timed_event()
        begin.record()
        self._bench.occupy(time_s)
        end.record()
        return begin, end

    def truths_s(self) -> dict[str, list[float]]:
        parts = {"layers": self._layers, "gathers": self._gathers}
        return {name: [b.elapsed_time(e) / 1e3 for b, e in of] for name, of in parts.items()}


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(256, 256)
        self.linear_fc2 = torch.nn.Linear(256, 256)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(torch.relu(self.linear_fc1(hidden)))


def capture(bench: Bench) -> None:
    """Capture a hooked model as a graph while a thread queries events, in our way and bare."""
    bench.begin_device()
    exchange = find_exchange()
    if bench.is_cpu:
        exchange = bench.timeline().install().device.exchange_mode
    event = timed_event()
    event.record()
    torch.cuda.synchronize()
    ours = capture_safe_dump(lambda: str(event.query()), exchange)
    bench.put(has_exchange=ours is not None)
    queries: dict[str, Callable[[], object] | None] = {"ours": ours, "dump": _real_dump(bench)}
    # Queries that may end a capture come last: they may disturb the ones after them.
    for name, ask in (queries | {"bare": event.query}).items():
        for mode in ("thread_local", "global"):
            if ask is not None:
                bench.put(**{f"{name}_{mode}": _captured(bench, mode, ask)})


def _real_dump(bench: Bench) -> Callable[[], object] | None:
    """Return Forerun's dump of a timed group of one rank; None if unavailable."""
    if bench.is_cpu:
        return None
    import torch.distributed as dist

    os.environ |= {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(1024, device="cuda")
    for _ in range(200):
        dist.all_reduce(value)
    torch.cuda.synchronize()
    dump = next(iter(find_dumps().values()), None)
    return None if dump is None else lambda: f"{len(dump())} bytes"


def _captured(bench: Bench, mode: str, ask: Callable[[], object]) -> dict[str, Any]:
    """Return whether the capture was valid, the query's result, and whether the replay computes."""
    model = torch.nn.Sequential(_Block(), _Block()).to("cuda")
    hidden = torch.ones(16, 1, 256, device="cuda")
    guard = Guard()
    instruments = Instruments(WeakHost(Host(models=(model,))), guard)
    instruments.put_on(step=0, window=0)
    outcome: dict[str, Any] = {"asked": [], "problem": ""}
    try:
        with torch.no_grad():
            expected = model(hidden)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                result = model(hidden)
                thread = threading.Thread(target=_ask, args=(ask, outcome["asked"]))
                thread.start()
                thread.join()
        if not bench.is_cpu:
            result.zero_()
            graph.replay()
            torch.cuda.synchronize()
            outcome["is_equal"] = bool(torch.equal(result, expected))
    except RuntimeError as err:
        outcome["problem"] = str(err)[:300]
    log = instruments.take_off()
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    if log is not None:
        outcome["is_resolved"] = bool(guard.protect(log.resolve)())
        outcome["num_operators"] = len(log.span_sites)
    return outcome | {"num_faults": guard.num_faults}


def _ask(ask: Callable[[], object], answers: list[str]) -> None:
    try:
        answers.append(f"answered: {ask()}")
    except RuntimeError as err:
        answers.append(f"refused: {err}"[:300])
