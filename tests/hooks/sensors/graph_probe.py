"""Real layers of megatron.core, one rank, with stand-ins for what captures and replays graphs.

Each line of stdin is settings of a layer as JSON; the answer is, by the path of an operator in the
layer, whether the replay called it and why the hooks do not record it.  What is captured, and what
a replay calls, is all upstream's: a stand-in graph runs its callable once and then gives back what
that returned, calling nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.captured import find_regions
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.sites import FORWARD, dispatch_methods, find_places, find_unhookable
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.recipes.stand_in_cuda import install as stand_in

TOKENS, HIDDEN = 8, 16


class Manager(torch.nn.Module):
    """Takes the calls that ``CudaGraphManager`` takes, and calls what that captures, once."""

    def __init__(
        self, config: Any, base_module: Any = None, function_name: str | None = None, **_: Any
    ) -> None:
        super().__init__()
        self.func = None
        if function_name is not None:
            self.func = getattr(base_module, function_name)
            setattr(
                base_module,
                function_name,
                lambda *args, **kwargs: self(base_module, args, kwargs),
            )
        self.result: Any = None

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self.result is None:
            func = super(MegatronModule, module).__call__ if self.func is None else self.func
            self.result = func(*args, **kwargs)
        return self.result


def main() -> None:
    stand_in.install()
    cuda_graphs.CudaGraphManager = Manager
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    for line in sys.stdin:
        print("RESULT" + json.dumps(probe(json.loads(line))), flush=True)


def probe(settings: dict[str, Any]) -> dict[str, Any]:
    layer = build(**settings)
    block = torch.nn.ModuleList([layer])
    hidden = torch.ones(TOKENS, 1, HIDDEN, requires_grad=True)
    names = {id(part): name for name, part in layer.named_modules()}
    if settings["implementation"] == "transformer_engine":
        capture(layer, hidden)
    else:
        layer(hidden_states=hidden, attention_mask=None)
    places = find_places([block])
    reach = find_unhookable([block], places)
    paths = {path(names, owner, name): reach.why(owner, name) for owner, name, _ in places}
    hooks = ModuleHooks([block], Recorder(HostStopwatch()), Guard())
    with called(layer, names) as result:
        layer(hidden_states=hidden, attention_mask=None)
    return {
        "places": paths,
        "called": sorted(set(result) & set(paths)),
        "num_sites": len(hooks.sites),
        "names": find_regions([block]).names,
    }


def build(
    *,
    implementation: str,
    scope: list[str],
    experts: int = 0,
    is_partly: bool = False,
    has_attention: bool = True,
    **settings: Any,
) -> TransformerLayer:
    sparse: dict[str, Any] = {"moe_router_load_balancing_type": "none", "moe_router_topk": 2}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=32,
        num_moe_experts=experts or None,
        add_bias_linear=False,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        cuda_graph_impl=implementation,
        cuda_graph_scope=scope,
        moe_token_dispatcher_type="alltoall",
        **(sparse if experts else {}),
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=False)
    if is_partly:
        spec.module = MoETransformerLayer
    if not has_attention:  # as in a hybrid pattern
        spec.submodules.input_layernorm = spec.submodules.self_attention = IdentityOp
        spec.submodules.self_attn_bda = IdentityFuncOp
    return build_module(spec, config=config).train()


def capture(layer: TransformerLayer, hidden: torch.Tensor) -> None:
    """As ``TECudaGraphHelper`` does: where its rule says that the layer is graphable."""
    if not cuda_graphs._layer_is_graphable(layer, layer.config):
        return
    cuda_graphs._set_capture_start()
    outputs = layer(hidden_states=hidden, attention_mask=None)
    cuda_graphs._set_capture_end()
    layer._get_te_cuda_graph_replay_args = lambda *args, **kwargs: ((), {})
    layer.cuda_graphs = [lambda *args, **kwargs: outputs]


def path(names: dict[int, str], owner: Any, name: str) -> str:
    if name == FORWARD:
        return names[id(owner)]
    return f"dispatcher.{name}"


@contextmanager
def called(layer: Any, names: dict[int, str]) -> Iterator[list[str]]:
    """Which modules, and methods of a dispatcher, are called inside the block."""
    results: list[str] = []
    handle = register_module_forward_pre_hook(lambda m, _: results.append(names.get(id(m), "?")))
    dispatcher = getattr(layer.mlp, "token_dispatcher", None)
    originals = {}
    for name in dispatch_methods(dispatcher) if dispatcher is not None else ():
        originals[name] = getattr(type(dispatcher), name)
        setattr(type(dispatcher), name, noting(originals[name], results, f"dispatcher.{name}"))
    try:
        yield results
    finally:
        handle.remove()
        for name, method in originals.items():
            setattr(type(dispatcher), name, method)


def noting(method: Any, calls: list[str], name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return method(*args, **kwargs)

    return call


if __name__ == "__main__":
    main()
