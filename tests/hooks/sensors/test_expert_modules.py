"""Operators of a layer of experts that is built and named as with TransformerEngine."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch
from torch import nn

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import OperatorRecord, from_dict, to_dict
from forerun.calib.workload.operators import OperatorKind as K
from forerun.calib.workload.operators import Phase
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 8, 6, 4, 2, 16


class TEGroupedLinear(nn.Module):
    def __init__(self, num_gemms: int, size_in: int, size_out: int) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(size_in, size_out)) for _ in range(num_gemms)]
        )

    def forward(self, rows, splits):
        parts = torch.split(rows, splits)
        return torch.cat([p @ w for p, w in zip(parts, self.weights, strict=True)]), None


class TEGroupedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(gated_linear_unit=True)
        self.linear_fc1 = TEGroupedLinear(EXPERTS, HIDDEN, 2 * FFN)
        self.linear_fc2 = TEGroupedLinear(EXPERTS, FFN, HIDDEN)

    def forward(self, rows, splits, weights):
        gate, value = self.linear_fc1(rows, splits)[0].chunk(2, -1)
        inner = torch.sigmoid(gate) * value * weights.unsqueeze(-1)
        return self.linear_fc2(inner, splits)[0], None


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, hidden):
        scores = (hidden @ self.weight.T).softmax(-1).flatten(0, 1)
        chosen = torch.arange(TOKENS * TOP_K).reshape(TOKENS, TOP_K) % EXPERTS
        return scores, torch.zeros_like(scores).scatter(1, chosen, 1.0).bool()


class MoEAlltoAllTokenDispatcher:
    num_local_experts = EXPERTS

    def dispatch_preprocess(self, hidden, routing_map, scores):
        self.shape = hidden.shape
        taken = routing_map.T.nonzero()[:, 1]
        self.taken = taken
        weights = scores.T.masked_select(routing_map.T)
        return hidden.flatten(0, 1).index_select(0, taken), weights

    def dispatch_postprocess(self, rows, weights):
        return rows * 1.0, [TOKENS * TOP_K // EXPERTS] * EXPERTS, weights

    def combine_preprocess(self, rows):
        return rows * 1.0

    def combine_postprocess(self, rows):
        empty = torch.zeros(TOKENS, HIDDEN)
        return empty.index_add(0, self.taken, rows).view(self.shape)


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_number = 3
        self.router = TopKRouter()
        self.experts = TEGroupedMLP()
        self.token_dispatcher = MoEAlltoAllTokenDispatcher()

    def forward(self, hidden):
        scores, routing_map = self.router(hidden)
        dispatcher = self.token_dispatcher
        rows, weights = dispatcher.dispatch_preprocess(hidden, routing_map, scores)
        rows, splits, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows, _ = self.experts(rows, splits, weights)
        return dispatcher.combine_postprocess(dispatcher.combine_preprocess(rows))


def records_of(model: nn.Module, hidden: torch.Tensor) -> list[OperatorRecord]:
    recorder, guard = Recorder(HostStopwatch()), Guard()
    hooks = ModuleHooks([model], recorder, guard)
    hooks.install()
    recorder.open(StepLog(step=0, window=0, sites=hooks.sites))
    recorder.begin_phase("forward-compute")
    loss = model(hidden).square().sum()
    recorder.end_phase("forward-compute")
    recorder.begin_phase("backward-compute")
    loss.backward()
    recorder.end_phase("backward-compute")
    log = recorder.close()
    hooks.remove()
    assert guard.num_faults == 0 and log is not None
    return [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]


def test_a_layer_of_experts_is_seen_in_both_phases() -> None:
    hidden = torch.randn(4, 4, HIDDEN, requires_grad=True)
    records = records_of(MoELayer(), hidden)
    rows = TOKENS * TOP_K
    expected = {
        (K.ROUTER, (TOKENS, HIDDEN, EXPERTS)): 1,
        (K.PERMUTE, (rows, HIDDEN, 1)): 4,
        (K.GROUPED_LINEAR, (EXPERTS, rows, HIDDEN, 2 * FFN)): 1,
        (K.GROUPED_LINEAR, (EXPERTS, rows, FFN, HIDDEN)): 1,
        (K.ACTIVATION, (rows, 2 * FFN, FFN)): 1,
    }
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert Counter((r.kind, r.shape) for r in records if r.phase is phase) == expected
    assert {r.layer for r in records if r.kind is K.PERMUTE} == {2}


def test_a_grouped_product_keeps_the_rows_of_each_expert_once() -> None:
    records = records_of(MoELayer(), torch.randn(4, 4, HIDDEN, requires_grad=True))
    each = (TOKENS * TOP_K // EXPERTS,) * EXPERTS
    for r in records:
        has_rows = r.kind is K.GROUPED_LINEAR and r.phase is Phase.FORWARD
        assert r.rows == (each if has_rows else ())
        line = to_dict(r)
        assert ("rows" in line) == has_rows and from_dict(line) == r


def test_counts_in_a_tensor_are_not_waited_for() -> None:
    model = MoELayer()
    linear = model.experts.linear_fc1
    forward = type(linear).forward
    hidden = torch.randn(4, 4, HIDDEN, requires_grad=True)

    class OnDevice(TEGroupedLinear):
        def forward(self, rows, splits):
            return forward(self, rows, splits.tolist())

    for part in (model.experts.linear_fc1, model.experts.linear_fc2):
        part.__class__ = OnDevice
    dispatch = model.token_dispatcher.dispatch_postprocess

    def counted(rows, weights):
        rows, splits, weights = dispatch(rows, weights)
        return rows, torch.tensor(splits), weights

    model.token_dispatcher.dispatch_postprocess = counted
    records = records_of(model, hidden)
    assert any(r.kind is K.GROUPED_LINEAR for r in records)
    assert all(r.rows == () for r in records)


def test_gradients_are_bitwise_those_of_a_bare_step_and_no_method_stays_replaced() -> None:
    hidden = torch.randn(4, 4, HIDDEN, requires_grad=True)
    model = MoELayer()
    model(hidden).square().sum().backward()
    bare = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    records_of(model, hidden)
    seen = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(seen) == len(bare)
    assert all(torch.equal(one, other) for one, other in zip(seen, bare, strict=True))
    assert not {name for name in vars(model.token_dispatcher) if "process" in name}


def test_a_single_expert_of_a_rank_is_sorted_with_no_other() -> None:
    model = MoELayer()
    model.token_dispatcher.num_local_experts = 1
    hidden = torch.randn(4, 4, HIDDEN, requires_grad=True)
    kinds = Counter(r.kind for r in records_of(model, hidden))
    assert kinds[K.PERMUTE] == 2 * 2
