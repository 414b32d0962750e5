"""Parts of a model that run without Python, where hooks are silent: CUDA graphs and compiled code.

A CUDA graph replays parts of a layer, a layer, a module's forward, or the whole model.  A replay
calls no captured module, and the self time of a module around it is wrong.  Based on Megatron-LM
core_v0.12.0 to core_v0.19.0 and its main of August 2026, and on torch 2.13.

Hidden parts are named in the coverage; only the time of the pass around them is known.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch

from ..process.host import Reference, reference
from ..process.inspection import attribute, class_names, contents, is_a, tree

LOCAL = "local"
ENGINE = "transformer_engine"
FORWARD_ALONE = "make_graphed_callables"
WHOLE_ITERATION = "full_iteration"
_NONE = "none"
_SCOPES = ("cuda_graph_modules", "cuda_graph_scope")
"""Fields of a configuration, the newer one first: 0.18 renamed it."""
_NOT_PARTS = frozenset({"full", "full_iteration_inference"})
_IN_INFERENCE = frozenset({"TransformerBlock", "MambaStack", "GPTModel", "HybridModel"})
"""Classes to which Megatron gives a manager that only runs them during text generation."""
_EMPTY = frozenset({"IdentityOp", "IdentityFuncOp"})

_ATTENTION = (
    *("input_layernorm", "self_attention", "self_attention_hyper_connection"),
    *("pre_cross_attn_layernorm", "cross_attention"),
)
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_hyper_connection")
_ROUTER = ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts")
_BEFORE_DISPATCH = ("mlp.fc1_latent_proj", "mlp.token_dispatcher.dispatch_preprocess")
_AFTER_COMBINE = ("mlp.fc2_latent_proj", "mlp.token_dispatcher.combine_postprocess")
_LOCAL_PARTS = {
    "cudagraph_manager_router": (*_ROUTER, *_BEFORE_DISPATCH),
    "cudagraph_manager_postprocess": _AFTER_COMBINE,
}
"""Managers of a layer of experts, with the calls in the method that each of them replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Replayed parts of a module: the paths of its parts and methods, or all of it."""

    kind: str
    parts: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    is_replayed: bool = True
    """False until graphs exist: Megatron captures those of TransformerEngine after warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Objects that replays do not call, by ``id``."""

    modules: frozenset[int]
    """Modules, and token dispatchers, which are no modules."""
    methods: frozenset[tuple[int, str]]
    layers: frozenset[int]
    """Layers with a captured part: their code between the parts may be captured, too."""


def graph_of(module: Any) -> Graph | None:
    """Return the graph, or graphs, of a module or its parts; None if it has none."""
    if is_graphed_forward(contents(module).get("forward")):
        return Graph(kind=FORWARD_ALONE)
    return _local(module) or _by_engine(module)


def is_graphed_forward(forward: Any) -> bool:
    """Return True for a forward replaced by ``make_graphed_callables`` of torch or
    TransformerEngine."""
    if type(forward) is not FunctionType:
        return False
    home, name = forward.__module__, forward.__qualname__
    is_theirs = home in ("torch.cuda.graphs", "transformer_engine.pytorch.graph")
    return is_theirs and ".make_graphed_forward." in name


def _local(module: Any) -> Graph | None:
    """Return the graph of a module with managers, which exist from the start.

    A layer's manager captures its whole call, whatever the scope: that decides which layers have
    one.
    """
    if class_names(module) & _IN_INFERENCE:
        return None
    manager_names = [name for name in _LOCAL_PARTS if attribute(module, name) is not None]
    is_partial = attribute(module, "use_partial_cudagraphs", bool(manager_names))
    if is_partial is True:
        parts = tuple(part for name in manager_names for part in _LOCAL_PARTS[name])
        return _graph(module, LOCAL, parts) if parts else None
    has_manager = attribute(module, "cudagraph_manager") is not None
    return Graph(kind=LOCAL) if has_manager else None


def _by_engine(layer: Any) -> Graph | None:
    """Return the graph from a layer's list of graphs and the scope of its configuration."""
    graphs = contents(layer).get("cuda_graphs")
    if graphs is None or not is_a(graphs, list):
        return None
    is_replayed = list.__len__(graphs) > 0
    scope = scope_of(attribute(layer, "config"))
    if not scope or "MambaLayer" in class_names(layer):
        is_its = not scope or "mamba" in scope
        return Graph(kind=ENGINE, is_replayed=is_replayed) if is_its else None
    parts = tuple(_engine_parts(layer, scope))
    return _graph(layer, ENGINE, parts, is_replayed=is_replayed) if parts else None


def _graph(layer: Any, kind: str, parts: Iterable[str], *, is_replayed: bool = True) -> Graph:
    """Return a graph of parts, without shared experts that run inside the dispatch, which is not
    captured."""
    mlp = attribute(layer, "mlp")
    if attribute(mlp, "shared_expert_overlap") is True:
        parts = (part for part in parts if part != "mlp.shared_experts")
    scope = scope_of(attribute(layer, "config"))
    return Graph(kind=kind, parts=tuple(parts), scope=tuple(sorted(scope)), is_replayed=is_replayed)


def _engine_parts(layer: Any, scope: set[str]) -> Iterator[str]:
    """Yield the parts that a layer's ``_te_cuda_graph_capture`` calls for these words."""
    mlp = attribute(layer, "mlp")
    is_sparse = "MoELayer" in class_names(mlp)
    attentions = [attribute(layer, name) for name in ("self_attention", "cross_attention")]
    if "attn" in scope and not all(_is_empty(one) for one in attentions):
        yield from _ATTENTION
        if _hands_on_norm(layer):
            yield "pre_mlp_layernorm"
    if ("moe" if is_sparse else "mlp") in scope and not _is_empty(mlp):
        yield from _MLP
    elif is_sparse and "moe_router" in scope:
        yield from _ROUTER
        if "moe_preprocess" in scope:
            yield from _BEFORE_DISPATCH


def _is_empty(part: Any) -> bool:
    return part is None or bool(class_names(part) & _EMPTY)


def _hands_on_norm(layer: Any) -> bool:
    """Return True in core 0.12, where the norm before the MLP ended the attention's part."""
    method = attribute(layer, "_forward_mlp")
    taken = method.__code__.co_varnames if type(method) is FunctionType else ()
    return "pre_mlp_layernorm_output" in taken[1:2]


def scope_of(config: Any) -> set[str]:
    """Return the captured parts, from a name, a list of names or of enum members; empty means
    all."""
    value = next((v for name in _SCOPES if (v := attribute(config, name))), ())
    if isinstance(value, Enum):
        value = (value,)
    parts = value.split(",") if isinstance(value, str) else value
    return {str(part.name if isinstance(part, Enum) else part) for part in parts} - _NOT_PARTS


def implementation_of(config: Any) -> str:
    """Return Megatron's name of it, or ``none``; before core 0.15 two switches had this meaning."""
    named = attribute(config, "cuda_graph_impl")
    if named and named != _NONE:
        return str(named)
    if attribute(config, "enable_cuda_graph", False):
        return LOCAL
    return ENGINE if attribute(config, "external_cuda_graph", False) else _NONE


def config_in(model: Any) -> Any:
    """Return the configuration of a model or, else, of its first layer."""
    layers = (module for module in tree(model) if "TransformerLayer" in class_names(module))
    configs = (attribute(one, "config") for one in (model, *layers))
    return next((config for config in configs if config is not None), None)


def whole_model_capture(model: Any) -> str:
    """Return what captures all of a model, as text; empty if nothing does."""
    known = _captured_models.get(id(model))
    if known is not None and known[0]() is model:
        return known[1]
    config = config_in(model)
    implementation = implementation_of(config)
    if implementation != _NONE and WHOLE_ITERATION in {implementation, *scope_of(config)}:
        return "the whole iteration"
    return ""


_captured_models: dict[int, tuple[Reference, str]] = {}


def register_captured(models: Iterable[Any], what: str) -> None:
    """Register models whose calls a framework replays from a graph that is not theirs."""
    for key in [key for key, (known, _) in _captured_models.items() if known() is None]:
        del _captured_models[key]
    _captured_models.update((id(model), (reference(model), what)) for model in models)


def hidden_by_graphs(models: Iterable[Any]) -> Hidden:
    """Return all parts of these models that existing graphs hide."""
    modules: set[int] = set()
    methods: set[tuple[int, str]] = set()
    layers: set[int] = set()
    for model in models:
        if whole_model_capture(model):
            modules |= _with_dispatchers(model)
            continue
        for module in tree(model):
            graph = graph_of(module)
            if graph is None or not graph.is_replayed:
                continue
            if not graph.parts:
                modules |= _with_dispatchers(module)
                continue
            layers.add(id(module))
            for owner, name in (_at(module, path) for path in graph.parts):
                part = attribute(owner, name)
                if type(part) is FunctionType:
                    methods.add((id(owner), name))
                elif part is not None:
                    modules |= _with_dispatchers(part)
    return Hidden(modules=frozenset(modules), methods=frozenset(methods), layers=frozenset(layers))


def _at(module: Any, path: str) -> tuple[Any, str]:
    """Return the owner of the last name of a path, and that name."""
    owner, name = module, path
    while "." in name:
        first, _, name = name.partition(".")
        owner = attribute(owner, first)
    return owner, name


def _with_dispatchers(module: Any) -> set[int]:
    """Return the ids of a module, all modules in it, and their token dispatchers, which are no
    modules."""
    parts = tree(module)
    dispatchers = (attribute(part, "token_dispatcher") for part in parts)
    return {id(part) for part in (*parts, *dispatchers) if part is not None}


def num_graphs() -> int:
    """Return the number of this process's graphs; scans every object that Python tracks."""
    if not torch.cuda.is_initialized():
        return 0
    kind = torch.cuda.CUDAGraph
    return sum(type(item) is kind for item in gc.get_objects())


_DEFAULT_WARMUP_STEPS = 3
"""Megatron's default, for configurations without the field."""
_CAPTURE_STEPS = 2
"""Steps after the eager ones: one in which graphs are captured, one that replays them first."""


_OUTER = ", outer time only"
_Words = tuple[str, str, str]
"""Text before and after a number, and the noun that it counts, if any, in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """Silent regions of a model, as text, and the steps until graphs are replayed."""

    names: tuple[str, ...] = ()
    warmup_steps: int = 0
    is_graphed: bool = False


def graphs_remark() -> tuple[str, ...]:
    """Return a remark if unexplained silence may be due to graphs of the process.

    All objects are scanned, which takes a while: only called if hooked operators never fired.
    """
    number = num_graphs()
    if not number:
        return ()
    graphs = f"{number} CUDA graph{'s' * (number > 1)} in this process"
    return (f"{graphs}: operators that they replay are not seen",)


_EP_OVERLAP_ATTRIBUTE = "overlap_moe_expert_parallel_comm"


def why_no_operators(models: Iterable[torch.nn.Module]) -> str:
    """Return why operators of these models cannot be separated; empty if they can.

    Megatron's combined 1F1B calls the parts of a layer, not the layer, and interleaves the forward
    pass of one micro-batch with the backward pass of another, on two streams.
    """
    if any(attribute(config_in(model), _EP_OVERLAP_ATTRIBUTE) is True for model in models):
        flag = "--" + _EP_OVERLAP_ATTRIBUTE.replace("_", "-")
        return (
            f"{flag} runs the forward pass of one micro-batch among the backward pass of another: "
            "operators not recorded, times of passes include both"
        )
    return ""


def find_regions(models: Iterable[torch.nn.Module]) -> Regions:
    """Return the silent regions of some virtual stages.

    Determined when hooks are first installed: parts that are compiled or captured later appear as
    operators that do not fire.
    """
    region_counts: Counter[_Words] = Counter()
    warmup_steps, is_graphed = 0, False
    for model in models:
        compiled: set[int] = set()
        for module in tree(model):
            if is_compiled(module) and id(module) not in compiled:
                compiled.update(map(id, tree(module)))
                region_counts["inside compiled code: ", "module", _OUTER] += 1
        for words, config in _graphed(model):
            region_counts[words] += 1
            is_graphed = True
            if implementation_of(config) != "none":
                steps = int(attribute(config, "cuda_graph_warmup_steps", _DEFAULT_WARMUP_STEPS))
                warmup_steps = max(warmup_steps, steps + _CAPTURE_STEPS)
    return Regions(
        names=tuple(sorted(_sentence(*words, number) for words, number in region_counts.items())),
        warmup_steps=warmup_steps,
        is_graphed=is_graphed,
    )


def _sentence(start: str, what: str, end: str, number: int) -> str:
    return f"{start}{number} {what}{'s' * (number > 1)}{end}" if what else start + end


def is_compiled(module: torch.nn.Module) -> bool:
    """Return True for the result of ``torch.compile(module)`` and after ``module.compile()``."""
    instance_dict = contents(module)
    is_wrapper = "_orig_mod" in (instance_dict.get("_modules") or ())
    return is_wrapper or instance_dict.get("_compiled_call_impl") is not None


is_being_compiled: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""True for the compiler as it traces our code: our hooks do nothing in compiled code.

A compiled function may call modules that are not compiled; a mark in them would break its graph,
and a guard on state that changes with every window would cause a recompilation for each.
"""


def _graphed(model: torch.nn.Module) -> Iterator[tuple[_Words, Any]]:
    """Yield text and configuration for each captured module, or once for a captured model."""
    whole = whole_model_capture(model)
    if whole:
        yield (f"inside a CUDA graph: {whole}", "", ", step time only"), config_in(model)
        return
    for module in tree(model):
        graph = graph_of(module)
        if graph is not None:
            yield _words(graph), attribute(module, "config")


def _words(graph: Graph) -> _Words:
    start = f"inside a CUDA graph ({graph.kind}): "
    if graph.kind == FORWARD_ALONE:
        return start, "module", _OUTER
    if not graph.parts:
        return start, "layer", _OUTER
    return f"{start}{','.join(graph.scope)} of ", "layer", ", whose residual is not seen either"
