"""Releases of Megatron that cannot run here, and torch's own graphs, by the marks that they leave.

Names and rules are those of Megatron-LM's source at each tag; ``test_graphed_layers`` runs one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_decoder import Model, TransformerLayer
from torch import nn
from unaskable import Unaskable

from forerun.calib.workload.operators import OperatorKind as K
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors import captured
from forerun.hooks.sensors.captured import (
    find_regions,
    hidden_by_graphs,
    is_graphed_forward,
    register_captured,
)
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.stopwatch import HostStopwatch


class CudaGraphModule(Enum):
    attn = auto()
    mlp = auto()
    moe = auto()
    moe_router = auto()
    moe_preprocess = auto()


ATTENTION = {"norm", "position", "linear_qkv", "core_attention", "linear_proj"}
MLP = {"norm", "activation", "linear_fc1", "linear_fc2"}


@pytest.fixture
def model() -> Iterator[Model]:
    yield Model()


def hooks_of(model: nn.Module) -> ModuleHooks:
    return ModuleHooks([model], Recorder(HostStopwatch()), Guard())


def by_engine(layer: Any, field: str, scope: Any) -> None:
    layer.config = SimpleNamespace(cuda_graph_impl="transformer_engine", **{field: scope})
    layer.cuda_graphs = [lambda hidden: hidden]


@pytest.mark.parametrize(
    ("field", "scope", "hidden"),
    [
        ("cuda_graph_scope", "attn", ATTENTION),  # core 0.12 to 0.15
        ("cuda_graph_scope", [CudaGraphModule.attn], ATTENTION),  # 0.16 and 0.17
        ("cuda_graph_modules", [CudaGraphModule.attn], ATTENTION),  # from 0.18 on
        ("cuda_graph_modules", [CudaGraphModule.mlp], MLP),
        ("cuda_graph_modules", ["attn", "mlp"], ATTENTION | MLP),
    ],
)
def test_a_graph_of_a_part_hides_what_it_holds_and_no_more(
    model: Model, field: str, scope: Any, hidden: set[str]
) -> None:
    for layer in model.layers:
        by_engine(layer, field, scope)
    hooks = hooks_of(model)
    counts = Counter(hooks.unseen)
    assert {name for name in counts if name.endswith(":captured")} == {
        f"{kind}:captured" for kind in hidden
    }
    assert counts["residual:partly captured"] == 2
    assert len(hooks.sites) + len(hooks.unseen) == len(hooks_of(Model()).sites)
    site_counts = Counter(site.kind for site in hooks.sites)
    assert site_counts[K.LINEAR_FC1] == (0 if "linear_fc1" in hidden else 2)
    assert site_counts[K.LINEAR_QKV] == (0 if "linear_qkv" in hidden else 2)
    assert site_counts[K.NORM] == 1 + 2 * (2 - len([p for p in (ATTENTION, MLP) if p <= hidden]))


def test_until_graphs_are_there_all_is_seen(model: Model) -> None:
    for layer in model.layers:
        by_engine(layer, "cuda_graph_scope", "attn")
        layer.cuda_graphs = []
    assert hooks_of(model).unseen == ()
    assert find_regions([model]).is_graphed


def test_in_core_0_12_the_norm_before_the_mlp_belongs_to_the_attention(model: Model) -> None:
    class Older(TransformerLayer):
        def _forward_mlp(self, pre_mlp_layernorm_output: Any, residual: Any) -> Any: ...

    model.layers[0] = Older(1)
    by_engine(model.layers[0], "cuda_graph_scope", "attn")
    counts = Counter(hooks_of(model).unseen)
    assert counts["norm:captured"] == 2 and counts["linear_fc1:captured"] == 0


def test_an_engine_s_graph_of_another_part_hides_nothing(model: Model) -> None:
    for layer in model.layers:
        by_engine(layer, "cuda_graph_modules", ["moe_router"])
    assert hooks_of(model).unseen == () and find_regions([model]).names == ()


def test_a_manager_of_a_block_is_for_inference(model: Model) -> None:
    class TransformerBlock(nn.ModuleList): ...

    model.layers = TransformerBlock(model.layers)
    model.layers.cudagraph_manager = nn.Identity()
    assert hooks_of(model).unseen == ()
    model.layers[1].cudagraph_manager = nn.Identity()
    assert {name.partition(":")[2] for name in hooks_of(model).unseen} == {"captured"}
    assert Counter(site.kind for site in hooks_of(model).sites)[K.LINEAR_FC1] == 1


@pytest.mark.parametrize("is_partly", [True, False])
def test_a_layer_of_experts_goes_back_to_its_whole_graph(model: Model, is_partly: bool) -> None:
    """From core 0.17 on it has all three managers after inference, and a switch."""
    layer: Any = model.layers[0]
    for name in ("", "_router", "_postprocess"):
        setattr(layer, f"cudagraph_manager{name}", nn.Identity())
    layer.use_partial_cudagraphs = is_partly
    counts = Counter(hooks_of(model).unseen)
    assert counts["linear_fc1:captured"] == (not is_partly)
    assert counts["residual:partly captured"] == is_partly
    assert counts["norm:captured"] == (1 if is_partly else 2)


@pytest.mark.parametrize("how", ["full_iteration", "told"])
def test_of_a_model_that_is_replayed_whole_no_operator_is_waited_for(
    model: Model, how: str
) -> None:
    expected = len(hooks_of(Model()).sites)
    if how == "told":
        register_captured([model], "forward and backward of each micro-batch")
    else:
        model.config = SimpleNamespace(cuda_graph_impl="full_iteration")
    hooks = hooks_of(model)
    assert hooks.sites == () and len(hooks.unseen) == expected
    assert all(name.endswith(":captured") for name in hooks.unseen)
    (name,) = find_regions([model]).names
    assert name.startswith("inside a CUDA graph: ") and name.endswith(", step time only")


def test_a_model_that_was_told_of_is_not_kept() -> None:
    register_captured([Model()], "all")
    model = Model()
    register_captured([model], "all")
    assert [known() for known, _ in captured._captured_models.values()] == [model]
    assert hooks_of(Model()).unseen == ()


def graphed_by_torch(module: nn.Module, home: str = "torch.cuda.graphs") -> None:
    """Change a module as ``make_graphed_callables`` does, compiled under torch's own names."""
    text = """
def make_graphed_callables(func):
    def make_graphed_forward(func, orig_fwd):
        def new_fwd(*args, **kwargs):
            return orig_fwd(*args, **kwargs)
        return new_fwd
    func.forward = make_graphed_forward(func, func.forward)
"""
    names: dict[str, Any] = {"__name__": home}
    exec(text, names)
    names["make_graphed_callables"](module)


def test_torch_still_leaves_what_is_recognised() -> None:
    made = torch.cuda.graphs.make_graphed_callables.__code__
    inner = [code for code in consts(made) if code.co_name == "new_fwd"]
    assert (
        [code.co_qualname for code in inner]
        == ["make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"]
        if hasattr(made, "co_qualname")
        else inner
    )
    assert torch.cuda.graphs.__name__ == "torch.cuda.graphs"


def consts(code: Any) -> Iterator[Any]:
    for inner in code.co_consts:
        if isinstance(inner, type(code)):
            yield inner
            yield from consts(inner)


@pytest.mark.parametrize("home", ["torch.cuda.graphs", "transformer_engine.pytorch.graph"])
def test_a_forward_that_is_a_graph_hides_its_module(model: Model, home: str) -> None:
    graphed_by_torch(model.layers[0].mlp, home)
    hooks = hooks_of(model)
    assert Counter(hooks.unseen) == {
        "activation:captured": 1,
        "linear_fc1:captured": 1,
        "linear_fc2:captured": 1,
        "residual:partly captured": 1,
    }
    assert find_regions([model]).names == (
        "inside a CUDA graph (make_graphed_callables): 1 module, outer time only",
    )


def test_an_operator_around_a_graph_of_a_product_is_not_recorded(model: Model) -> None:
    graphed_by_torch(model.layers[0].mlp.linear_fc1)
    assert Counter(hooks_of(model).unseen) == {
        "linear_fc1:captured": 1,
        "activation:partly captured": 1,
        "residual:partly captured": 1,
    }


def test_an_operator_around_compiled_ones_is_not_recorded(model: Model) -> None:
    model.layers[0].mlp.compile(backend="eager")
    assert Counter(hooks_of(model).unseen)["residual:partly compiled"] == 1


def test_a_graph_of_what_is_no_operator_takes_nothing_from_around_it(model: Model) -> None:
    model.layers[0].self_attention.rotary = nn.Identity()
    graphed_by_torch(model.layers[0].self_attention.rotary)
    assert hooks_of(model).unseen == ()


def test_what_the_user_has_under_these_names_is_not_asked(model: Model) -> None:
    for layer in model.layers:
        vars(layer)["cuda_graphs"] = Unaskable()
        layer.forward = functools.partial(layer.forward)
    assert not hidden_by_graphs([model]).modules
    assert not is_graphed_forward(Unaskable())
    assert not is_graphed_forward(FunctionType((lambda: None).__code__, {}))
