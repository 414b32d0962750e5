"""Compiled modules are really compiled; graphs are Megatron's settings on layers of its names."""

from __future__ import annotations

from enum import Enum, auto
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forerun.hooks.sensors.captured import find_regions, graphs_remark, is_compiled


class Scope(Enum):
    full_iteration = auto()
    attn = auto()
    mlp = auto()


class TransformerLayer(nn.Module):
    def __init__(self, **config: object) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.self_attention = self.mlp = self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden).relu()


def graphed(model: nn.Sequential) -> nn.Sequential:
    """With what Megatron puts on a layer for its settings, as read in its source."""
    for layer in model:
        config = vars(layer.config)
        name = config.get("cuda_graph_impl")
        if name == "local" or config.get("enable_cuda_graph"):
            layer.cudagraph_manager = nn.Identity()
        if name == "transformer_engine" or config.get("external_cuda_graph"):
            layer.cuda_graphs = []
    return model


def stack(num_layers: int, **config: object) -> nn.Sequential:
    return nn.Sequential(*(TransformerLayer(**config) for _ in range(num_layers)))


def test_an_eager_model_has_no_region():
    regions = find_regions([stack(2), stack(1, cuda_graph_impl="none", enable_cuda_graph=False)])
    assert regions.names == ()
    assert (regions.warmup_steps, regions.is_graphed) == (0, False)


def test_compiled_modules_are_counted_at_their_outermost():
    model = stack(3)
    model[1].compile(backend="eager")
    model[2] = torch.compile(model[2], backend="eager")
    model[2](torch.ones(1, 4)).sum().backward()
    assert [is_compiled(module) for module in model] == [False, True, True]
    assert find_regions([model]).names == ("inside compiled code: 2 modules, outer time only",)


def test_a_compiled_model_is_one_region():
    model = stack(2)
    model[0].compile(backend="eager")
    whole = torch.compile(model, backend="eager")
    assert find_regions([whole]).names == ("inside compiled code: 1 module, outer time only",)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"enable_cuda_graph": True}, "inside a CUDA graph (local): 2 layers, outer time only"),
        (
            {"external_cuda_graph": True, "cuda_graph_scope": "full"},
            "inside a CUDA graph (transformer_engine): 2 layers, outer time only",
        ),
        (
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": [Scope.mlp, Scope.attn]},
            "inside a CUDA graph (transformer_engine): attn,mlp of 2 layers, "
            "whose residual is not seen either",
        ),
        (
            {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
            "inside a CUDA graph (transformer_engine): attn of 2 layers, "
            "whose residual is not seen either",
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": [Scope.attn]},
            "inside a CUDA graph (local): 2 layers, outer time only",
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},
            "inside a CUDA graph: the whole iteration, step time only",
        ),
        (
            {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
            "inside a CUDA graph: the whole iteration, step time only",
        ),
        (
            {"cuda_graph_impl": "full_iteration"},
            "inside a CUDA graph: the whole iteration, step time only",
        ),
    ],
)
def test_graphs_of_each_release_are_named(config, expected):
    regions = find_regions([graphed(stack(2, cuda_graph_warmup_steps=4, **config))])
    assert regions.names == (expected,)
    assert regions.is_graphed and regions.warmup_steps == 6


@pytest.mark.parametrize(
    "config",
    [
        {"cuda_graph_impl": "none", "cuda_graph_scope": [Scope.full_iteration]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["moe_router"]},
        {"cuda_graph_impl": "local"},
    ],
)
def test_without_a_manager_or_a_part_that_the_scope_names_there_is_no_graph(config):
    model = stack(1, **config)
    if config["cuda_graph_impl"] != "local":
        graphed(model)
    assert find_regions([model]).names == ()


def test_the_window_waits_until_graphs_are_replayed():
    models = [stack(1, cuda_graph_impl="local", cuda_graph_warmup_steps=n) for n in (1, 5)]
    assert find_regions(map(graphed, models)).warmup_steps == 7
    assert find_regions([graphed(stack(1, enable_cuda_graph=True))]).warmup_steps == 5


def test_graphs_that_nothing_known_has_made_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {}))
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    assert graphs_remark() == ()  # without a device nothing is looked for
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert graphs_remark() == (
        f"{len(graphs)} CUDA graphs in this process: operators that they replay are not seen",
    )
