"""Compiled code and activation checkpointing: no bit of a loss, and no compilation for our sake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils.checkpoint import checkpoint

from forerun.calib.records.record_kinds import CoverageRecord, StepRecord
from forerun.calib.samples.store import read_run
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.compiling import StallHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.session.attaching import attach

# torch's own, as it compiles a layer whose input is another's output.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
STEPS, EVERY = 36, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.linear_fc2(torch.relu(self.linear_fc1(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output_layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
        return self.output_layer(x)


def train(kind: str, directory: Path | None) -> tuple[list[str], int, int]:
    """Bits of the losses, graphs that were compiled, and breaks in them."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    called: Any = loss_of
    if kind == "function":
        called = torch.compile(loss_of, backend="aot_eager")
    elif kind == "model":
        model.compile(backend="aot_eager")
    else:
        for layer in model.layers:
            layer.compile(backend="aot_eager")

    def step(number: int) -> str:
        loss = called(torch.randn(4, 16, generator=torch.Generator().manual_seed(number)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item().hex()

    if directory is None:
        losses = [step(number) for number in range(STEPS)]
    else:
        losses = []
        with attach(
            model, optimizer, directory=directory, steps=4, every=EVERY, is_analysed=False
        ) as run:
            for number in range(STEPS):
                losses.append(step(number))
                run.step()
    return losses, counters["stats"]["unique_graphs"], counters["graph_break"].total()


@pytest.mark.parametrize("kind", ["function", "model", "layers"])
def test_compiled_and_checkpointed_code_trains_as_without_us(tmp_path: Path, kind: str) -> None:
    losses, num_graphs, num_breaks = train(kind, None)
    results, num_graphs_hooked, num_breaks_hooked = train(kind, tmp_path)
    assert results == losses and num_breaks_hooked == num_breaks
    # A function tells nobody what it compiles: once for hooked steps, however many windows follow.
    assert num_graphs_hooked - num_graphs <= (kind == "function")
    records = read_run(tmp_path).records[0]
    windows = {r.window for r in records if isinstance(r, StepRecord) and r.is_hooked}
    assert windows == set(range(1 + STEPS // EVERY))
    fired = {r.name: r.fired for r in records if isinstance(r, CoverageRecord) and r.window == 0}
    if kind == "function":
        assert fired["linear_fc1"] == 0
    else:
        assert any(name.startswith("inside compiled code") for name in fired)
        assert "linear_fc1:compiled" in fired


def test_a_compiled_wait_for_a_collective_is_compiled_once() -> None:
    """It is bound to the function that it was compiled with, so that stays where it is."""
    torch._dynamo.reset()
    counters.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def summed(x: torch.Tensor) -> torch.Tensor:
            whole = functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
            return functional_collectives.wait_tensor(whole) * 2

        called = torch.compile(summed, backend="aot_eager")
        called(torch.ones(4))
        stalls = StallHooks(Recorder(HostStopwatch()), Guard())
        for _ in range(3):
            stalls.install()
            assert called(torch.ones(4)).tolist() == [2.0] * 4
            stalls.remove()
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
