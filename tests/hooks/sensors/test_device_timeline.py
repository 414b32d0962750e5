"""The stand-in for a GPU that other tests lean on: does it behave as CUDA is documented to?"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from device_clock import LAUNCH_S, MAX_IN_FLIGHT
from device_streams import READ_S
from device_timeline import Timeline, capturing, installed
from device_transfers import BYTES_PER_S, LATENCY_S
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def device() -> Iterator[Timeline]:
    with installed() as one:
        yield one


_A = torch.ones(128, 128)


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def queue_products(times: int = 1) -> None:
    """Queue products of about 0.2 ms each."""
    for _ in range(times):
        torch.mm(_A, _A)


def kernels(device: Timeline, op: str = "mm") -> list[dict]:
    return [row for row in device.truth.rows("kernels") if row["op"] == op]


def test_host_is_ahead_and_learns_of_events_late(device: Timeline) -> None:
    first, last = timing_event(), timing_event()
    first.record()
    queue_products(3)
    last.record()
    assert not last.query()
    with pytest.raises(RuntimeError, match="not ready"):
        first.elapsed_time(last)
    last.synchronize()
    assert last.query()
    spent_ms = sum(row["end_s"] - row["begin_s"] for row in kernels(device)) * 1e3
    assert first.elapsed_time(last) == pytest.approx(spent_ms, rel=0.2)


def test_unrecorded_event_has_no_time(device: Timeline) -> None:
    event = timing_event()
    event.record()
    with pytest.raises(ValueError, match="recorded"):
        event.elapsed_time(timing_event())


@pytest.mark.parametrize("ask", [lambda t: t.item(), bool, lambda t: t.cpu(), float])
def test_reading_a_result_waits_for_it(device: Timeline, ask) -> None:
    last = timing_event()
    queue_products(3)
    total = torch.ones(16).sum()
    last.record()
    ask(total)
    assert last.query()


def test_streams_overlap_and_wait_for_each_other(device: Timeline) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch._C._cuda_getCurrentRawStream(0) == side.cuda_stream != 0
        queue_products(4)
    assert torch._C._cuda_getCurrentRawStream(0) == 0
    queue_products(1)
    torch.cuda.current_stream().wait_stream(side)
    queue_products(1)
    results = kernels(device)
    on_side = [row for row in results if row["stream"] == side.line.number]
    before, after = [row for row in results if row["stream"] == 0]
    assert before["begin_s"] < on_side[0]["end_s"]
    assert after["begin_s"] == pytest.approx(on_side[-1]["end_s"])
    (stall,) = device.truth.rows("stalls")
    assert stall["begin_s"] == pytest.approx(before["end_s"])
    assert {cause for _, _, cause in stall["parts"]} == {-1}


def test_side_stream_can_be_before_the_reference(device: Timeline) -> None:
    side = torch.cuda.Stream()
    queue_products(2)
    reference, early = timing_event(), timing_event()
    reference.record()
    early.record(side)
    torch.cuda.synchronize()
    assert reference.elapsed_time(early) < 0


def test_context_of_a_stream_is_entered_again_in_itself(device: Timeline) -> None:
    side = torch.cuda.Stream()
    context = torch.cuda.stream(side)
    with context:
        with context:
            assert torch.cuda.current_stream() == side
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_current_stream_is_the_threads(device: Timeline) -> None:
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]


def test_waits_go_through_the_class_event(device: Timeline, monkeypatch) -> None:
    seen = []
    wait = torch.cuda.Event.wait

    def watched(event, stream=None):
        seen.append(event)
        return wait(event, stream)

    monkeypatch.setattr(torch.cuda.Event, "wait", watched)
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
    assert len(seen) == 1


def test_times_have_single_precision_and_cost_real_time(device: Timeline) -> None:
    first, last = timing_event(), timing_event()
    first.record()
    device.clock.launch(device.device.line, 20.0123456789)
    last.record()
    torch.cuda.synchronize()
    exact_ms = (last.time_s - first.time_s) * 1e3
    begin_s = time.perf_counter()
    for _ in range(100):
        assert first.elapsed_time(last) == struct.unpack("f", struct.pack("f", exact_ms))[0]
    assert time.perf_counter() - begin_s >= 100 * READ_S
    assert first.elapsed_time(last) != exact_ms
    assert device.clock.counts["reads"] == 101


def test_launch_queue_makes_the_host_wait(device: Timeline) -> None:
    for _ in range(MAX_IN_FLIGHT):
        device.clock.launch(device.device.line, 1e-3)
    assert device.clock.host_s == pytest.approx(MAX_IN_FLIGHT * LAUNCH_S)
    device.clock.launch(device.device.line, 1e-3)
    assert device.clock.host_s > 1e-3


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_forbids_what_cuda_forbids(device: Timeline, mode: str) -> None:
    old = timing_event()
    old.record()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            assert not torch.cuda.is_current_stream_capturing()
            old.query()
        except RuntimeError as err:
            caught.append(err)

    thread = threading.Thread(target=elsewhere)
    is_broken = mode == "global"
    expectation = (
        pytest.raises(RuntimeError, match="previous error") if is_broken else nullcontext()
    )
    with expectation, capturing(mode) as capture:
        assert torch.cuda.is_current_stream_capturing()
        thread.start()
        thread.join()
        assert capture.invalidated_by == ("Event.query" if is_broken else "")
    assert bool(caught) == is_broken
    assert not torch.cuda.is_current_stream_capturing()


def test_record_in_a_capture(device: Timeline) -> None:
    with capturing() as capture:
        torch.cuda.Event(enable_timing=True, external=True).record()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        assert not capture.invalidated_by
    with pytest.raises(RuntimeError, match="capturing"), capturing() as capture:
        timing_event().record()
    assert capture.invalidated_by == "Event.record"


def test_torchs_graph_captures(device: Timeline) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        queue_products()
    assert not kernels(device)
    with pytest.raises(RuntimeError), torch.cuda.graph(graph):
        torch.cuda.synchronize()
    graph.replay()


class _Seen(torch.autograd.Function):
    """Notes on which thread its backward pass runs, and what is on there."""

    seen: ClassVar[list] = []

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Seen.seen.append((threading.get_ident(), torch._C._len_torch_dispatch_stack()))
        return gradient * 2


def test_backward_runs_in_a_thread_of_its_own(device: Timeline) -> None:
    _Seen.seen.clear()
    weight = torch.ones(4, requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _Seen.apply(weight).sum().backward()
    ((thread, num_modes),) = _Seen.seen
    assert thread != threading.get_ident()
    assert num_modes == torch._C._len_torch_dispatch_stack()
    assert weight.grad.tolist() == [2.0] * 4
    backward = [row for row in device.truth.rows("kernels") if row["phase"] == "backward"]
    assert {row["stream"] for row in backward} == {side.line.number}


def test_fault_of_a_backward_pass_reaches_the_caller(device: Timeline) -> None:
    weight = torch.ones(4, requires_grad=True)
    weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        weight.sum().backward()


class _Layers(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.reentrant = reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = torch.relu(self.first(value))
        if self.reentrant is None:
            return self.second(value)
        return checkpoint(self.second, value, use_reentrant=self.reentrant)


def products(device: Timeline) -> list[tuple[str, str, int]]:
    """Name of the module, phase and pass of each product, in order."""
    modules, calls = device.truth.modules, device.truth.rows("calls")
    return [
        (modules[calls[row["call"]]["module"]]["name"], row["phase"], row["ordinal"])
        for row in device.truth.rows("kernels")
        if row["flop"]
    ]


def test_products_belong_to_their_modules(device: Timeline) -> None:
    model = _Layers()
    device.name([model])
    value = torch.ones(64, 64)
    with device.step(0):
        losses = [model(value).sum(), model(value).sum()]
        for loss in losses:
            loss.backward()
    forward = (
        [("0.first", "forward", n) for n in (0, 1)],
        [("0.second", "forward", n) for n in (0, 1)],
    )
    expected = [row for pair in zip(*forward, strict=True) for row in pair]
    for number in (0, 1):
        expected += [("0.second", "backward", number)] * 2 + [("0.first", "backward", number)]
    assert products(device) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_told_apart(device: Timeline, reentrant: bool) -> None:
    model = _Layers(reentrant)
    model.second = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    device.name([model])
    with device.step(0):
        model(torch.ones(64, 64)).sum().backward()
    forward = [(f"0.{name}", "forward", 0) for name in ("first", "second.0", "second.1")]
    # Without reentrance torch stops before the last product, whose result nobody needs.
    recomputed = [(f"0.second.{n}", "recompute", 0) for n in range(1 + reentrant)]
    backward = [(f"0.second.{n}", "backward", 0) for n in (1, 1, 0, 0)]
    expected = [*forward, *recomputed, *backward, ("0.first", "backward", 0)]
    assert sorted(products(device)) == sorted(expected)


def test_charges_are_the_same_in_each_run() -> None:
    results = []
    for _ in range(2):
        with installed() as device:
            torch.manual_seed(0)
            _Layers()(torch.ones(64, 64)).sum().backward()
            results.append(device.truth.tables["kernels"])
    assert results[0] == results[1]


@pytest.fixture
def group(device: Timeline) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_synchronous_collective_stands_in_the_way(device: Timeline, group: None) -> None:
    value = torch.ones(1000)
    queue_products()
    assert dist.all_reduce(value) is None
    queue_products()
    before, after = kernels(device)
    (transfer,) = device.truth.rows("transfers")
    assert (transfer["method"], transfer["nbytes"], transfer["is_async"]) == (
        "allreduce",
        4000,
        False,
    )
    assert transfer["begin_s"] == pytest.approx(before["end_s"])
    assert transfer["end_s"] - transfer["begin_s"] == pytest.approx(LATENCY_S + 4000 / BYTES_PER_S)
    assert after["begin_s"] == pytest.approx(transfer["end_s"])
    (stall,) = device.truth.rows("stalls")
    assert [cause for _, _, cause in stall["parts"]] == [0]


def test_asynchronous_collective_is_hidden_behind_work(device: Timeline, group: None) -> None:
    value = torch.ones(1000)
    works = [dist.all_reduce(value, async_op=True) for _ in range(2)]
    first, second = device.truth.rows("transfers")
    assert second["begin_s"] == pytest.approx(first["end_s"])
    assert [first["sequence"], second["sequence"]] == [0, 1]
    queue_products()
    works[0].wait()
    assert device.truth.rows("stalls") == []
    for _ in range(3):
        dist.all_reduce(value, async_op=True)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    (stall,) = device.truth.rows("stalls")
    assert {cause for _, _, cause in stall["parts"]} <= {2, 3, 4, 5}
    assert stall["end_s"] == pytest.approx(device.truth.rows("transfers")[-1]["end_s"])
    assert not torch.cuda.current_stream().query()


def test_transfer_waits_for_the_stream_it_is_called_on(device: Timeline, group: None) -> None:
    side = torch.cuda.Stream()
    queue_products(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(torch.empty(10))
        done = side.record_event()
    queue_products(1)
    torch.cuda.current_stream().wait_event(done)
    (transfer,) = device.truth.rows("transfers")
    last = kernels(device)
    assert transfer["stream"] == side.line.number
    assert transfer["begin_s"] == pytest.approx(last[3]["end_s"])
    # Hidden behind the last product, the step's stream does not stand still for it.
    stalls = [row for row in device.truth.rows("stalls") if row["stream"] == 0]
    assert stalls == []


def test_barrier_holds_the_host(device: Timeline, group: None) -> None:
    queue_products(5)
    dist.barrier()
    assert torch.cuda.current_stream().query()


def test_steps_count_what_was_asked(device: Timeline) -> None:
    with device.step(7):
        first, last = timing_event(), timing_event()
        first.record()
        torch.cuda.Event().record()
        last.record()
        last.synchronize()
        last.query()
        first.elapsed_time(last)
    (step,) = device.truth.rows("steps")
    names = ("step", "records", "timed_records", "queries", "reads")
    assert [step[name] for name in names] == [7, 3, 2, 1, 1]


def test_free_memory_is_what_a_test_says(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 2000))
    with installed() as device:
        assert torch.cuda.mem_get_info() == (1000, 2000)
        device.free_nbytes = 123
        assert torch.cuda.mem_get_info(0) == (123, 2000)


def test_views_cost_nothing(device: Timeline) -> None:
    value = torch.empty(8, 8)
    value.view(64).detach().t()
    value[0].expand(4, 8)
    assert device.truth.rows("kernels") == []


def test_torch_is_as_it_was() -> None:
    names = ("Stream", "Event", "stream", "synchronize", "mem_get_info")
    before = [getattr(torch.cuda, name) for name in names]
    call, engine = nn.Module.__call__, torch.autograd.Variable._execution_engine
    with installed():
        assert torch.cuda.Event is not before[1]
    assert [getattr(torch.cuda, name) for name in names] == before
    assert nn.Module.__call__ is call
    assert torch.autograd.Variable._execution_engine is engine
    assert torch._C._len_torch_dispatch_stack() == 0
