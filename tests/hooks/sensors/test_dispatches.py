"""H1: exchanges of tokens that call no process group are transfers, and never a layer's residual.

Megatron's own dispatcher, manager and autograd functions, with a DeepEP below them that works on
the stand-in for a GPU.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import deep_ep_device
import pytest
import torch
import torch.distributed as dist
from deep_ep_device import COMBINE_S, DISPATCH_S, NUM_RANKS, Buffer
from device_timeline import Timeline, installed
from planted_stragglers import config_of
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from forerun.calib.layers._experts import expert_modules
from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord, PhaseRecord
from forerun.calib.workload.collectives import Collective, GroupRole
from forerun.calib.workload.config import Dispatcher, Experts, Parallelism
from forerun.calib.workload.operators import OperatorKind as K
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.dispatches import DispatchHooks, _ends, _shares
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.process_groups import ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.session import instruments

TOKENS, HIDDEN, EXPERTS = 64, 32, 4
_MOE = "megatron.core.transformer.moe"


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Megatron's modules; what they compile is run as it is written."""
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(torch, "compile", lambda function=None, **_: function or (lambda f: f))
        return SimpleNamespace(
            fused_a2a=importlib.import_module(f"{_MOE}.fused_a2a"),
            token_dispatcher=importlib.import_module(f"{_MOE}.token_dispatcher"),
            transformer=importlib.import_module("megatron.core.transformer"),
        )


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield dist.new_group([0, 1], group_desc="EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    dist.destroy_process_group()


@pytest.fixture
def dispatcher(megatron: Any, group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    fused_a2a, token_dispatcher = megatron.fused_a2a, megatron.token_dispatcher
    for name in ("Buffer", "EventHandle", "EventOverlap"):
        monkeypatch.setattr(fused_a2a, name, getattr(deep_ep_device, name), raising=False)
    monkeypatch.setattr(fused_a2a, "_buffer", None)
    monkeypatch.setattr(
        token_dispatcher,
        "fused_dispatch",
        lambda x, indices, probs, number, group, async_finish, allocate_on_comm_stream: (
            fused_a2a.FusedDispatch.apply(
                x.contiguous(), indices, probs, number, group, async_finish, allocate_on_comm_stream
            )
        ),
    )
    monkeypatch.setattr(
        token_dispatcher,
        "fused_combine",
        lambda x, group, handle, async_finish, allocate_on_comm_stream: (
            fused_a2a.FusedCombine.apply(x, group, handle, async_finish, allocate_on_comm_stream)
        ),
    )
    monkeypatch.setattr(token_dispatcher, "set_deepep_num_sms", lambda number: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = megatron.transformer.TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            num_moe_experts=EXPERTS,
            moe_router_topk=2,
            moe_ffn_hidden_size=HIDDEN,
            moe_token_dispatcher_type="flex",
            moe_router_dtype="fp32",
        )
    alone = dist.new_group([0])
    groups = SimpleNamespace(ep=group, expt_tp=alone, tp_ep=group)
    return token_dispatcher.MoEFlexTokenDispatcher(2, [0, 1], config, groups)


class MoELayer(nn.Module):
    def __init__(self, dispatcher: Any) -> None:
        super().__init__()
        self.layer_number = 3
        self.token_dispatcher = dispatcher
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dispatcher = self.token_dispatcher
        probs = torch.softmax(hidden[:, :EXPERTS], dim=-1)
        taken = probs * (torch.arange(EXPERTS) < 2)
        rows, weights = dispatcher.dispatch_preprocess(hidden, taken > 0, taken)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, _, weights = dispatcher.dispatch_postprocess(rows, weights)
        rows = rows * weights.unsqueeze(-1) * self.weight
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(rows)


class TransformerLayer(nn.Module):
    is_checkpointed = False

    def __init__(self, dispatcher: Any) -> None:
        super().__init__()
        self.layer_number = 3
        self.mlp = MoELayer(dispatcher)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            return hidden + checkpoint(self.mlp, hidden * 1.0, use_reentrant=True)
        return hidden + self.mlp(hidden * 1.0)


@dataclass
class Seen:
    """Recordings of a step."""

    log: StepLog
    records: list[Any]
    gradient: torch.Tensor

    def self_ns(self, kind: K) -> dict[str, int]:
        result: dict[str, int] = defaultdict(int)
        for one in self.records:
            if isinstance(one, OperatorRecord) and one.kind is kind:
                result[one.phase.value] += one.duration_ns
        return result

    @property
    def transfers(self) -> list[CollectiveRecord]:
        return [one for one in self.records if isinstance(one, CollectiveRecord)]


def step(
    dispatcher: Any, *, scale: float = 1.0, samples: tuple[int, ...] = (), is_bare: bool = False
) -> Seen:
    """A step with one pass each way."""
    model = TransformerLayer(dispatcher)
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with installed() as device:
        Buffer.begin(scale)
        watch = _watch(model)
        recorder, guard = Recorder(watch), Guard()
        hooks = [
            modules := ModuleHooks([model], recorder, guard),
            DispatchHooks([model], recorder, guard),
            ProcessGroupHooks(recorder, guard),
        ]
        for one in () if is_bare else hooks:
            one.install()
        log = recorder.open(
            StepLog(
                step=0,
                window=0,
                sites=modules.sites,
                samples=samples,
                samples_transfers=bool(samples),
                frequent=frozenset(_kinds(dispatcher)) if samples else None,
                max_marks=10_000,
            )
        )
        try:
            _passes(device, recorder, model, hidden)
        finally:
            recorder.close()
            for one in hooks:
                one.remove()
        device.clock.synchronize()
        assert guard.num_faults == 0 and log.resolve()
    assert hidden.grad is not None
    return Seen(log, list(Attribution(log).records()), hidden.grad)


def _watch(model: nn.Module) -> Any:
    """That of a device, whatever the CPU holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instruments, "_device", lambda models: torch.device("cuda"))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        return instruments.stopwatch_for((model,))


def _kinds(dispatcher: Any) -> list[Any]:
    return [end.kind for end in _ends(dispatcher)]


def _passes(device: Timeline, recorder: Recorder, model: nn.Module, hidden: Any) -> None:
    # The device still works on the step before, so that the host is ahead of it.
    device.clock.launch(device.device.line, 1.0)
    recorder.begin_phase("forward-compute")
    output = model(hidden)
    recorder.end_phase("forward-compute")
    recorder.begin_phase("backward-compute")
    torch.autograd.backward(output, torch.ones_like(output))
    recorder.end_phase("backward-compute")


def test_h1_dispatch_and_combine_are_transfers_both_ways(dispatcher: Any) -> None:
    seen = step(dispatcher)
    assert [one.duration_ns / 1e9 for one in seen.transfers] == pytest.approx(
        # Backwards the combine is a dispatch, and the dispatch a combine.
        [DISPATCH_S, COMBINE_S, DISPATCH_S, COMBINE_S],
        rel=0.03,
        abs=2e-6,
    )
    nbytes = NUM_RANKS * TOKENS * HIDDEN * 4
    for number, one in enumerate(seen.transfers):
        assert one.collective is Collective.ALL_TO_ALL and one.role is GroupRole.EXPERT_TP_EP
        assert one.nbytes == nbytes and one.ranks == (0, 1) and one.sequence == number
        assert one.exposed_ns == one.duration_ns and not one.is_async


def test_h1_the_residual_of_a_layer_holds_no_exchange(dispatcher: Any) -> None:
    usual, long = (step(dispatcher, scale=scale) for scale in (0.01, 1.0))
    for phase, self_ns in usual.self_ns(K.RESIDUAL).items():
        assert long.self_ns(K.RESIDUAL)[phase] == pytest.approx(self_ns, rel=0.03, abs=2000), phase
    for phase, self_ns in usual.self_ns(K.PERMUTE).items():
        assert long.self_ns(K.PERMUTE)[phase] == pytest.approx(self_ns, rel=0.03, abs=2000), phase
    waits = [one.wait_ns for one in long.records if isinstance(one, PhaseRecord)]
    expected_s = DISPATCH_S + COMBINE_S
    assert [wait / 1e9 for wait in waits] == pytest.approx([expected_s] * 2, rel=0.03)


def test_h1_a_group_that_is_called_inside_is_not_counted_beside(
    dispatcher: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = Buffer.dispatch

    def exchanged(buffer: Any, x: Any, **given: Any) -> Any:
        dist.all_to_all_single(torch.empty_like(x), x.detach(), group=group)
        return dispatch(buffer, x, **given)

    monkeypatch.setattr(Buffer, "dispatch", exchanged)
    assert len(step(dispatcher).transfers) == 4
    assert step(dispatcher).log.num_calls == [4]


def test_h1_what_is_not_timed_is_counted_with_its_bytes(dispatcher: Any) -> None:
    seen = step(dispatcher, samples=(-1, -1, 0))
    assert seen.transfers == [] and not seen.self_ns(K.RESIDUAL)
    assert dict(seen.log.counted) == {(0, NUM_RANKS * TOKENS * HIDDEN * 4): 4}


def test_h1_a_dispatcher_without_a_manager_counts_by_its_own_methods(group: Any) -> None:
    class MoEFlexTokenDispatcher:
        tp_ep_group = group

        def token_dispatch(self, hidden: Any, probs: Any) -> Any:
            return hidden * 1.0, probs

        def token_combine(self, hidden: Any) -> Any:
            return hidden * 1.0

        def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> Any:
            return hidden * 1.0, probs

        def dispatch_postprocess(self, hidden: Any, probs: Any) -> Any:
            return hidden, [], probs[:, 0]

        def combine_preprocess(self, hidden: Any) -> Any:
            return hidden

        combine_postprocess = combine_preprocess

    seen = step(MoEFlexTokenDispatcher())
    assert [one.nbytes for one in seen.transfers] == [TOKENS * HIDDEN * 4] * 4


def test_h1_gradients_are_bitwise_those_of_a_bare_step(dispatcher: Any) -> None:
    bare, seen = step(dispatcher, is_bare=True), step(dispatcher)
    assert not bare.transfers and torch.equal(bare.gradient, seen.gradient)


def test_h1_a_layer_that_runs_again_exchanges_again(
    dispatcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformerLayer, "is_checkpointed", True)
    expected_s = [DISPATCH_S, COMBINE_S] * 3
    times = [one.duration_ns / 1e9 for one in step(dispatcher).transfers]
    assert times == pytest.approx(expected_s, rel=0.03)


def test_h1_what_is_seen_of_a_layer_is_what_the_layout_has(
    dispatcher: Any,
) -> None:
    experts = Experts(
        num_experts=EXPERTS, top_k=2, ffn_hidden_size=HIDDEN, dispatcher=Dispatcher.FLEX
    )
    plain = config_of(Parallelism(tp=1, dp=2, pp=1))
    config = replace(
        plain,
        model=replace(plain.model, experts=experts),
        parallelism=replace(plain.parallelism, ep=2),
    )
    uses = expert_modules(config)[0].uses
    expected = Counter({(use.call.collective, use.call.role): 0 for use in uses})
    for use in uses:
        expected[use.call.collective, use.call.role] += use.count
    seen = Counter((one.collective, one.role) for one in step(dispatcher).transfers)
    assert seen == expected and {use.call.num_ranks for use in uses} == {NUM_RANKS}


def test_h1_rows_that_are_copies_count_once_for_each_rank(dispatcher: Any) -> None:
    """HybridEP's and NCCL EP's rows are one for each expert of a token; a rank has two of four."""

    class _HybridEPManager:
        pass

    class _NCCLEPManager:
        moe_expert_rank_capacity_factor = 1.5

    # Both experts of a token are on one rank in 2 of 6 pairs, else on two.
    distinct = (2 * 1 + 4 * 2) / 6
    assert _shares(dispatcher, dispatcher._comm_manager) == (1.0, 1.0)
    assert _shares(dispatcher, _HybridEPManager()) == pytest.approx((distinct / 2, distinct))
    assert _shares(dispatcher, _NCCLEPManager()) == pytest.approx((0.0, distinct))
