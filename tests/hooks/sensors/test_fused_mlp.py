"""M9: an MLP that TransformerEngine's op fuser runs is left out, with the reason.

Its own products are never called: as an activation of no width it took their time, and the layer
around it would take it now.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.workload.operators import OperatorKind as K
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(self.linear_fc1(hidden).relu())


class TEFusedMLP(MLP):
    """As Megatron's: the weights are its modules', the work is not."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.linear(hidden, self.linear_fc1.weight, self.linear_fc1.bias)
        return nn.functional.linear(inner.relu(), self.linear_fc2.weight, self.linear_fc2.bias)


class TEGroupedMLP(TEFusedMLP):
    def __init__(self) -> None:
        super().__init__()
        self._with_fused_impl = True


class TransformerLayer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.layer_number = 1
        self.input_layernorm, self.mlp = nn.LayerNorm(8), mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.input_layernorm(hidden))


def seen(mlp: nn.Module) -> tuple[dict[K, tuple[int, ...]], tuple[str, ...]]:
    model = TransformerLayer(mlp)
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ModuleHooks([model], recorder, guard)
    hooks.install()
    log = recorder.open(StepLog(step=0, window=0, sites=hooks.sites))
    recorder.begin_phase("forward-compute")
    loss = model(torch.randn(4, 2, 8, requires_grad=True)).sum()
    recorder.end_phase("forward-compute")
    recorder.begin_phase("backward-compute")
    loss.backward()
    recorder.end_phase("backward-compute")
    recorder.close()
    hooks.remove()
    assert guard.num_faults == 0
    results: list[Any] = [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]
    return {r.kind: r.shape for r in results}, hooks.unseen


@pytest.mark.parametrize("kind", [TEFusedMLP, TEGroupedMLP])
def test_m9_a_fused_mlp_is_left_out_and_so_is_what_is_around_it(kind: type[nn.Module]) -> None:
    shapes, unseen = seen(kind())
    assert shapes == {K.NORM: (8, 8)}
    expected = {"activation:fused", "linear_fc1:fused", "linear_fc2:fused", "residual:partly fused"}
    assert set(unseen) == expected


def test_m9_another_is_seen_as_before() -> None:
    shapes, unseen = seen(MLP())
    assert shapes[K.ACTIVATION] == (8, 32, 32) and unseen == ()
    assert {K.LINEAR_FC1, K.LINEAR_FC2, K.RESIDUAL} <= set(shapes)
