"""M8: where operators cannot be timed they are not, and no accelerator is called a CPU."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.hooks.process.guard import Guard
from forerun.hooks.process.host import Host, WeakHost
from forerun.hooks.recording import kineto
from forerun.hooks.session.devices import (
    computing_device,
    name_if_started,
    name_of,
    why_no_marks,
)
from forerun.hooks.session.instruments import Instruments


class TransformerLayer(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.linear_fc1 = nn.Linear(4, 4)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on(model: nn.Module, place: str) -> nn.Module:
    """As if its parameters were there."""
    for module in model.modules():
        for name in module._parameters:
            kind = type("Elsewhere", (nn.Parameter,), {"device": torch.device(place)})
            kind.__module__ = "torch.nn.parameter"
            module._parameters[name] = kind(torch.zeros(4))
    return model


def test_asking_for_a_name_starts_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not chosen its GPU yet would get a context on the first one."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda one: asked.append(one) or "H200")
    model = on(TransformerLayer(), "cuda:1")
    for is_started, name in ((False, ""), (True, "H200")):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda it=is_started: it)
        assert name_if_started((model,)) == name
    assert asked == [torch.device("cuda:1")]


@pytest.mark.parametrize("place", ["xpu:0", "hpu"])
def test_m8_another_accelerator_stands_down_for_operators(place: str) -> None:
    model = on(TransformerLayer(), place)
    host = Host(models=(model,))
    instruments = Instruments(WeakHost(host), Guard())
    kind = place.partition(":")[0]
    assert instruments.device != "cpu" and kind in instruments.device
    names = [record.name for record in instruments.coverage(0)]
    assert [name for name in names if kind in name and "operators not recorded" in name]
    assert not [name for name in names if name.startswith("linear_fc1")]
    assert instruments.memory_peak_nbytes() >= 0 and not instruments.is_traceable


@pytest.mark.usefixtures("world")
def test_m8_parameters_that_fsdp_keeps_on_the_host_are_computed_with_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert computing_device((model,)).type == "cpu" and why_no_marks((model,)) == ""
    state: Any = model._get_fsdp_state()  # type: ignore[attr-defined, operator]
    several = getattr(state, "_fsdp_param_groups", None)
    (several[0] if several is not None else state._fsdp_param_group).device = torch.device("cuda")
    assert computing_device((model,)).type == "cuda"
    expected = "parameters lie on the cpu, cuda computes: operators not recorded"
    assert why_no_marks((model,)) == expected
    assert name_of(torch.device("cuda")) != "cpu"


def test_m8_a_model_on_the_cpu_is_timed_as_before() -> None:
    model = TransformerLayer()
    assert why_no_marks((model,)) == "" and name_of(computing_device((model,))) == "cpu"
    instruments = Instruments(WeakHost(Host(models=(model,))), Guard())
    assert "linear_fc1" in {record.name for record in instruments.coverage(0)}


def test_m8_rocm_is_told_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    reason = kineto.reason_against(0, is_device=True, is_graphed=True)
    assert "ROCm 6.4" in reason and "CUDA" not in reason


def test_h4_combined_1f1b_stands_down_for_operators() -> None:
    model = TransformerLayer(overlap_moe_expert_parallel_comm=True)
    instruments = Instruments(WeakHost(Host(models=(model,))), Guard())
    (remark,) = (
        record.name
        for record in instruments.coverage(0)
        if record.name.startswith("--overlap-moe-expert-parallel-comm")
    )
    assert "operators not recorded" in remark
    assert not instruments._modules.sites
    usual = TransformerLayer(overlap_moe_expert_parallel_comm=False)
    assert Instruments(WeakHost(Host(models=(usual,))), Guard())._modules.sites


def test_h4_the_switch_is_megatrons_own() -> None:
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = importlib.import_module("megatron.core.model_parallel_config")
    assert "overlap_moe_expert_parallel_comm" in {
        one.name for one in fields(settings.ModelParallelConfig)
    }
