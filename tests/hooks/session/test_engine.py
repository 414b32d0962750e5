"""The model of DeepSpeed's engine, whose optimizer updates flat copies that no module has.

The attributes are those of deepspeed 0.19.8 (``runtime/engine.py``, ``zero/stage_1_and_2.py``).
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forerun.hooks.process.guard import Guard  # noqa: E402
from forerun.hooks.process.settings import RankInfo  # noqa: E402
from forerun.hooks.session.chain import chain_of  # noqa: E402
from forerun.hooks.session.first_step import FirstStep, FrameworkSettings  # noqa: E402


class Wrapper:
    """An optimizer around another, as DeepSpeed's ZeRO and accelerate's are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class DeepSpeedEngine(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


def build() -> tuple[DeepSpeedEngine, torch.optim.Optimizer]:
    model = torch.nn.Embedding(8, 4)
    flat = torch.nn.Parameter(torch.zeros(32))
    inner = torch.optim.AdamW([flat])
    return DeepSpeedEngine(model, Wrapper(inner)), inner


def test_the_engine_is_found_by_its_optimizer_and_any_around_it() -> None:
    engine, inner = build()
    other, _ = build()
    for optimizer in (inner, engine.optimizer, Wrapper(engine.optimizer)):
        assert chain_of(optimizer) == (engine, engine.module)
    assert chain_of(torch.optim.SGD(other.module.parameters(), lr=0.1)) == (other, other.module)


def test_its_batch_is_read_and_its_layouts_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    engine, inner = build()
    chain = chain_of(inner)
    first = FirstStep(chain, Guard())
    engine(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    first.close()
    loop = first.loop(chain, FrameworkSettings())
    assert (loop.samples, loop.tokens) == (2, 6)
    rank = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, run_id="r")
    assert first.run_config(chain, inner, rank, FrameworkSettings()) is None
    (line,) = caplog.messages
    assert "DeepSpeed's engine partitions and reduces in ways that are not modelled" in line
