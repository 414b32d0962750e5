"""Operators at the modules of a small graph that is built and named as Megatron's."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_decoder import BATCH, SEQ, Model
from torch import nn
from torch.distributed.fsdp import fully_shard

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.workload.operators import OperatorKind as K
from forerun.calib.workload.operators import Phase
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors import module_calls, modules
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.sites import find_places
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Hooked:
    def __init__(self, model: nn.Module) -> None:
        self.guard = Guard()
        self.recorder = Recorder(HostStopwatch())
        self.hooks = ModuleHooks([model], self.recorder, self.guard)

    def run(self, model: nn.Module, ids: torch.Tensor) -> list[OperatorRecord]:
        self.hooks.install()
        self.recorder.open(StepLog(step=0, window=0, sites=self.hooks.sites))
        self.recorder.begin_phase("forward-compute")
        loss = model(ids)
        self.recorder.end_phase("forward-compute")
        self.recorder.begin_phase("backward-compute")
        loss.backward()
        self.recorder.end_phase("backward-compute")
        log = self.recorder.close()
        self.hooks.remove()
        assert self.guard.num_faults == 0
        return [r for r in Attribution(log).records() if isinstance(r, OperatorRecord)]


@pytest.fixture
def ids() -> Iterator[torch.Tensor]:
    yield torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 16


ONCE = {K.EMBEDDING: 1, K.LOGITS: 1, K.LOSS: 1}
PER_LAYER = {
    K.LINEAR_QKV: 2,
    K.POSITION: 2,
    K.CORE_ATTENTION: 2,
    K.LINEAR_PROJ: 2,
    K.RESIDUAL: 2,
    K.LINEAR_FC1: 2,
    K.ACTIVATION: 2,
    K.LINEAR_FC2: 2,
}


def test_every_operator_runs_once_forward_and_once_backward_with_one_shape(
    ids: torch.Tensor,
) -> None:
    model = Model()
    records = Hooked(model).run(model, ids)
    expected = {**ONCE, **PER_LAYER, K.NORM: 5}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert Counter(r.kind for r in records if r.phase is phase) == expected
    shapes = {(r.kind, r.shape) for r in records}
    assert shapes == {
        (K.EMBEDDING, (8, 8, 16)),
        (K.NORM, (8, 8)),
        (K.LINEAR_QKV, (8, 8, 24)),
        (K.POSITION, (8, 24)),
        (K.CORE_ATTENTION, (2, 2, 2, 4, 4)),
        (K.LINEAR_PROJ, (8, 8, 8)),
        (K.RESIDUAL, (8, 8)),
        (K.LINEAR_FC1, (8, 8, 32)),
        (K.ACTIVATION, (8, 32, 32)),
        (K.LINEAR_FC2, (8, 32, 8)),
        (K.LOGITS, (8, 8, 16)),
        (K.LOSS, (8, 16)),
    }
    assert {r.element_nbytes for r in records} == {4}
    assert {r.layer for r in records if r.kind is K.LINEAR_FC1} == {2, 3}
    assert {r.layer for r in records if r.kind is K.LOGITS} == {0}


def test_own_times_fill_the_step_and_none_is_negative(ids: torch.Tensor) -> None:
    model = Model()
    records = Hooked(model).run(model, ids)
    assert all(r.duration_ns >= 0 for r in records)
    assert sum(r.duration_ns > 0 for r in records) > 0.9 * len(records)


def test_recomputed_layers_run_again_in_the_backward_phase(ids: torch.Tensor) -> None:
    model = Model(recompute=True)
    records = Hooked(model).run(model, ids)
    recomputed = Counter(r.kind for r in records if r.phase is Phase.RECOMPUTE)
    assert recomputed == {**PER_LAYER, K.NORM: 4}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert Counter(r.kind for r in records if r.phase is phase) == {
            **ONCE,
            **PER_LAYER,
            K.NORM: 5,
        }


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_are_bitwise_those_of_a_bare_step(
    ids: torch.Tensor, recompute: bool
) -> None:
    torch.manual_seed(3)
    model = Model(recompute=recompute)
    model(ids).backward()
    bare = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    state = torch.get_rng_state()
    Hooked(model).run(model, ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), bare, strict=True))


def test_nothing_is_left_on_the_model_after_removal(ids: torch.Tensor, hooked) -> None:
    model = Model()
    hooks = Hooked(model)
    hooks.run(model, ids)
    assert not hooked(model)
    assert "compute_language_model_loss" not in vars(model)
    assert hooks.recorder.log is None
    model(ids).backward()


def test_a_backward_that_runs_after_the_step_is_ignored(ids: torch.Tensor) -> None:
    model = Model()
    hooks = Hooked(model)
    hooks.hooks.install()
    log = hooks.recorder.open(StepLog(step=0, window=0, sites=hooks.hooks.sites))
    loss = model(ids)
    hooks.recorder.close()
    hooks.hooks.remove()
    marks = len(log.what)
    loss.backward()
    assert len(log.what) == marks and hooks.guard.num_faults == 0


def test_a_fault_in_a_hook_leaves_the_forward_pass_alone(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    expected = model(ids)
    hooks = Hooked(model)
    monkeypatch.setattr("forerun.hooks.sensors.modules._activations", lambda *_: 1 / 0)
    hooks.hooks.install()
    hooks.recorder.open(StepLog(step=0, window=0, sites=hooks.hooks.sites))
    assert torch.equal(model(ids), expected)
    hooks.recorder.close()
    hooks.hooks.remove()
    assert hooks.guard.is_tripped


def test_a_model_of_another_make_has_no_sites() -> None:
    assert find_places([nn.Sequential(nn.Linear(2, 2), nn.ReLU())]) == []


def test_a_model_copied_or_pickled_while_hooked_is_a_model_without_us(ids: torch.Tensor) -> None:
    model = Model()
    hooks = Hooked(model)
    hooks.hooks.install()
    log = hooks.recorder.open(StepLog(step=0, window=0, sites=hooks.hooks.sites))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for weight in model.parameters():
        weight.data.zero_()
    losses = [twin(ids).item() for twin in copies]
    assert len(log.span_sites) == 0 and hooks.guard.num_faults == 0
    hooks.recorder.close()
    hooks.hooks.remove()
    bare = model(ids).item()
    assert losses[0] == losses[1] != bare


def test_a_forward_of_the_users_own_is_left_alone_and_named(
    ids: torch.Tensor, hooked: Callable[[nn.Module], bool]
) -> None:
    model = Model()
    linear = model.layers[0].mlp.linear_fc1
    linear.forward = user_forward = functools.partial(nn.functional.linear, weight=linear.weight)
    hooks = Hooked(model)
    records = hooks.run(model, ids)
    assert hooks.hooks.unseen == ("linear_fc1:replaced",)
    assert linear.forward is user_forward
    assert Counter(r.kind for r in records)[K.LINEAR_FC1] == 2


def test_what_the_user_puts_on_a_hooked_module_stays(ids: torch.Tensor) -> None:
    model = Model()
    hooks = Hooked(model)
    hooks.hooks.install()
    user_forward = model.final_layernorm.forward = nn.Identity().forward
    hooks.hooks.remove()
    assert vars(model.final_layernorm).pop("forward") is user_forward


def test_compiled_and_captured_regions_are_not_entered_and_named() -> None:
    model = Model()
    model.layers[0].compile(backend="eager")
    model.layers[1].cudagraph_manager = nn.Identity()
    hooks = Hooked(model).hooks
    per_layer = sum(PER_LAYER.values()) // 2 + 2
    reasons = Counter(name.partition(":")[2] for name in hooks.unseen)
    assert reasons == {"compiled": per_layer, "captured": per_layer}
    hooks.install()
    assert not any("forward" in vars(m) for layer in model.layers for m in layer.modules())
    hooks.remove()


def test_h5_a_graph_of_attention_leaves_the_mlp_to_the_hooks() -> None:
    model = Model()
    for layer in model.layers:
        vars(layer)["config"] = SimpleNamespace(
            cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"]
        )
        vars(layer)["cuda_graphs"] = [lambda hidden: hidden]
    hooks = Hooked(model).hooks
    kinds = Counter(site.kind for site in hooks.sites)
    assert kinds[K.LINEAR_FC1] == kinds[K.LINEAR_FC2] == kinds[K.ACTIVATION] == 2
    assert kinds[K.LINEAR_QKV] == kinds[K.CORE_ATTENTION] == kinds[K.RESIDUAL] == 0
    assert {"linear_qkv:captured", "residual:partly captured"} <= set(hooks.unseen)


def test_h5_a_manager_of_a_router_hides_the_norm_before_it() -> None:
    model = Model()
    model.layers[0].cudagraph_manager_router = nn.Identity()
    hooks = Hooked(model).hooks
    assert hooks.unseen == ("norm:captured", "residual:partly captured")


def test_h5_a_manager_of_the_block_hides_nothing_in_training() -> None:
    class TransformerBlock(nn.ModuleList): ...

    model = Model()
    model.layers = TransformerBlock(model.layers)
    model.layers.cudagraph_manager = nn.Identity()
    assert Hooked(model).hooks.unseen == ()


def test_a_gather_before_a_sharded_module_is_not_the_modules_time(
    ids: torch.Tensor, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    sharded = fully_shard(model.final_layernorm)
    gathered_ns = 20_000_000
    group = type(sharded._get_fsdp_state()._fsdp_param_group)
    unshard = group.wait_for_unshard

    def slowly(self: Any) -> Any:
        time.sleep(gathered_ns * 1e-9)
        return unshard(self)

    monkeypatch.setattr(group, "wait_for_unshard", slowly)
    records = Hooked(model).run(model, ids)
    norms = [r for r in records if r.kind is K.NORM]
    assert max(r.duration_ns for r in norms) < gathered_ns
    assert Counter(r.phase for r in norms) == {Phase.FORWARD: 5, Phase.BACKWARD: 5}


def test_the_input_of_a_sharded_module_that_raises_is_freed(one_rank: None) -> None:
    """As when a recomputed layer is stopped early."""

    class Raising(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise StopIteration

    model = Model()
    model.final_layernorm = fully_shard(Raising(2))
    hooked, hidden = Hooked(model), torch.ones(2, 2)
    hooked.hooks.install()
    hooked.recorder.open(StepLog(step=0, window=0, sites=hooked.hooks.sites))
    hooked.recorder.begin_phase("forward-compute")
    alive = weakref.ref(hidden)
    with pytest.raises(StopIteration):
        model.final_layernorm(hidden)
    del hidden
    gc.collect()
    assert alive() is None
    hooked.hooks.remove()


def test_a_class_is_not_changed_without_end(
    ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_calls, "MOST_CHANGES", 2)
    calls, original = module_calls.ModuleCalls(), nn.Module._call_impl
    monkeypatch.setattr(module_calls, "CALLS", calls)
    monkeypatch.setattr(modules, "CALLS", calls)
    monkeypatch.setattr(nn.Module, "_call_impl", original)
    seen, numbers = [], []
    for _ in range(4):
        model = Model()
        hooked = Hooked(model)
        numbers.append(len(hooked.run(model, ids)))
        seen.append(nn.Module._call_impl is original)
    assert seen == [True, False, False, False] and len(set(numbers)) == 1
    plain = Model()
    assert torch.equal(plain(ids), copy.deepcopy(plain)(ids))
