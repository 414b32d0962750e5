"""Transformer Engine's way to call: hooks and traces find the times that a device was charged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from device_timeline import Timeline, installed
from te_layers import TEExchangedLinear, TEGroupedLinear, TransformerLayer
from te_traces import node_events
from torch import nn

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.kineto_trace import (
    busy_ns,
    num_products,
    work_of,
)
from forerun.calib.records.record_kinds import BACKWARD, FORWARD, OperatorRecord
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import DeviceStopwatch

TOKENS, HIDDEN, FFN = 64, 96, 160
SPLITS = (40, 8, 24, 16)
MODES = [(False, False), (True, False), (True, True), (False, True)]


@pytest.fixture
def device() -> Iterator[Timeline]:
    with installed() as one:
        yield one


class Layers(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(number, HIDDEN, FFN, **options) for number in (1, 2, 3)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Experts(nn.Module):
    """Grouped products as in Megatron's layer of experts."""

    def __init__(self, *, num_streams: int, is_delayed: bool = False) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_streams": num_streams, "count": len(SPLITS)}
        options |= {"is_fused": True, "is_delayed": is_delayed}
        self.linear_fc1 = TEGroupedLinear(HIDDEN, FFN, **options)
        self.linear_fc2 = TEGroupedLinear(FFN, HIDDEN, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner, _ = self.linear_fc1(hidden, SPLITS)
        return self.linear_fc2(torch.relu(inner), SPLITS)[0]


def compute_delayed_weight_gradients(model: nn.Module) -> None:
    """Compute weight gradients after the backward pass, as a schedule does."""
    for module in model.modules():
        if hasattr(module, "backward_dw"):
            module.backward_dw()


def hooked_step(device: Timeline, model: nn.Module, hidden: torch.Tensor) -> list[OperatorRecord]:
    """One step under hooks over the device."""
    device.name([model])
    recorder, guard = Recorder(_stopwatch()), Guard()
    hooks = ModuleHooks([model], recorder, guard)
    hooks.install()
    busy = torch.ones(512, 512)
    busy.mm(busy)  # the host is ahead of the device, as in training
    recorder.open(StepLog(step=0, window=0, sites=hooks.sites, max_marks=1000))
    with device.step(0):
        recorder.begin_phase(FORWARD)
        loss = model(hidden).sum()
        recorder.end_phase(FORWARD)
        recorder.begin_phase(BACKWARD)
        loss.backward()
        recorder.end_phase(BACKWARD)
        compute_delayed_weight_gradients(model)
    log = recorder.close()
    hooks.remove()
    torch.cuda.synchronize()
    assert log is not None
    assert log.resolve()
    assert guard.num_faults == 0
    return [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]


def _stopwatch() -> DeviceStopwatch:
    return DeviceStopwatch(
        lambda: torch.cuda.Event(enable_timing=True),
        stream_key=lambda: torch.cuda.current_stream().cuda_stream,
        current_stream=torch.cuda.current_stream,
        is_capturing=torch.cuda.is_current_stream_capturing,
    )


def kernels_by_module(device: Timeline) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Kernels of the step by name of the module and pass, in the order of launching."""
    truth, result = device.truth, defaultdict(list)
    calls = truth.rows("calls")
    for row in truth.rows("kernels"):
        if row["step"] == 0 and row["call"] >= 0:
            name = truth.modules[calls[row["call"]]["module"]]["name"]
            result[name, row["phase"]].append(row)
    return result


def span_ns(rows: list[dict[str, Any]]) -> float:
    """From the first begin to the last end."""
    return 1e9 * (max(row["end_s"] for row in rows) - min(row["begin_s"] for row in rows))


def is_near(measured_ns: float, true_ns: float) -> bool:
    return abs(measured_ns - true_ns) <= 0.03 * true_ns + 2_000


@pytest.mark.parametrize(("is_fused", "is_delayed"), MODES)
def test_h2_hooks_find_both_passes_of_one_node(
    device: Timeline, is_fused: bool, is_delayed: bool
) -> None:
    model = Layers(is_fused=is_fused, is_delayed=is_delayed)
    hidden = torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    records = hooked_step(device, model, hidden)
    truth = kernels_by_module(device)
    for layer in range(3):
        for name in ("linear_fc1", "linear_fc2"):
            for phase in (Phase.FORWARD, Phase.BACKWARD):
                (operator_record,) = (
                    r for r in records if (r.layer, r.kind.value, r.phase) == (layer, name, phase)
                )
                rows = truth[f"0.layers.{layer}.{name}", phase.value]
                assert is_near(operator_record.duration_ns, span_ns(rows)), (layer, name, phase)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_h3_products_on_several_streams_take_the_time_of_their_union(
    device: Timeline, num_streams: int
) -> None:
    """The sum before: up to 4 times as long."""
    model = Experts(num_streams=num_streams)
    hidden = torch.randn(sum(SPLITS), HIDDEN, requires_grad=True)
    records = hooked_step(device, model, hidden)
    truth = kernels_by_module(device)
    for place, name in enumerate(("linear_fc1", "linear_fc2")):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            rows = [row for row in truth[f"0.{name}", phase.value] if row["flop"]]
            operator_records = [
                r for r in records if r.kind is OperatorKind.GROUPED_LINEAR and r.phase is phase
            ]
            operator_records = (
                operator_records if phase is Phase.FORWARD else operator_records[::-1]
            )
            assert is_near(operator_records[place].duration_ns, span_ns(rows))
            work = work_of(node_events("_GroupedLinear", rows, at_ns=1000, number=7))
            assert is_near(busy_ns(work), span_ns(rows))
            if num_streams > 1:
                assert busy_ns(work) < 0.9 * sum(item.duration_ns for item in work)


@pytest.mark.parametrize("is_delayed", [False, True])
def test_h2_grouped_products_are_counted_by_those_of_the_forward_pass(
    device: Timeline, is_delayed: bool
) -> None:
    """One call was one product before, whatever it launched."""
    model = Experts(num_streams=4, is_delayed=is_delayed)
    hooked_step(device, model, torch.randn(sum(SPLITS), HIDDEN, requires_grad=True))
    truth = kernels_by_module(device)
    forward, backward = (
        work_of(node_events("_GroupedLinear", truth["0.linear_fc1", name], at_ns=0, number=7))
        for name in ("forward", "backward")
    )
    passes = 1 if is_delayed else 2
    assert num_products(backward) == passes * num_products(forward) == passes * len(SPLITS)


class Exchanging(nn.Module):
    """A linear with its exchanges inside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear_fc1 = TEExchangedLinear(HIDDEN, FFN, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_fc1(hidden)[0]


@pytest.mark.parametrize("num_pieces", [2, 4, 8])
def test_h2_exchanges_between_pieces_of_a_product_are_transfers(
    device: Timeline, num_pieces: int
) -> None:
    model = Exchanging(num_pieces=num_pieces, is_frozen=False)
    hooked_step(device, model, torch.randn(TOKENS, HIDDEN, requires_grad=True))
    rows = kernels_by_module(device)["0.linear_fc1", "backward"]
    work = work_of(node_events("_LinearBackward", rows, at_ns=1000, number=7))
    assert sum("userbuffers_" in item.name for item in work) == num_pieces + 1
    products = [item for item in work if item.message is None]
    assert len(products) + num_pieces + 1 == len(work)
    computed = [row for row in rows if row["op"] != "roll"]
    assert is_near(busy_ns(products), union_ns(computed))


def union_ns(rows: list[dict[str, Any]]) -> float:
    """How long any of them ran, by steps of time between all begins and ends."""
    bounds = sorted({row[name] for row in rows for name in ("begin_s", "end_s")})
    return 1e9 * sum(
        after - before
        for before, after in pairwise(bounds)
        if any(row["begin_s"] <= before and after <= row["end_s"] for row in rows)
    )
