"""Sites of a model's operators: modules and methods of Megatron, transformers and torchtitan.

Megatron's are known by name and class.  In a transformers model queries, keys and values, and the
two halves of a gated MLP, are separate products; attention outside its products is one operator
with the rotation of its heads; and a configuration has the shapes.  torchtitan uses other names,
and its attention without the rotation is a module.

Layers of experts of both are known by their parts and not by their names: such a layer has a router
and the experts.  The router with its product is one operator, and so are the experts with theirs;
the rest of torchtitan's layer is copies of rows between them, which in transformers' are inside the
experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import FunctionType
from typing import Any

import torch

from ...calib.workload.operators import (
    MODULES_BY_ATTRIBUTE,
    MODULES_BY_CLASS,
    OPAQUE_OPERATORS,
    OperatorKind,
)
from ..process.inspection import (
    attribute,
    class_names,
    classes,
    contents,
    is_tensor,
    module_name,
    named_tree,
    tree,
    weights,
)
from .captured import hidden_by_graphs, is_compiled
from .step_log import Site

_GROUPED = "TEGroupedLinear"
_LAYERS = frozenset({"TransformerLayer", "MambaLayer"})
_NOTHING_INSIDE = frozenset({"IdentityOp", "IdentityFuncOp"})
FORWARD = "forward"
_CAPTURED, _COMPILED, _FUSED = "captured", "compiled", "fused"
_OVERLAPPED = "overlapped"
_FUSED_MLPS = frozenset({"TEFusedMLP", "FusedSharedExpertMLP"})
"""MLPs that never call their products: one chain of TransformerEngine does their work."""
_LOCAL_EXPERTS = ".local_experts."
"""Part of the name of an expert that is one of several run in sequence."""
_LOSS = "compute_language_model_loss"
_JOIN = "_concat_embeddings"
"""Method of a prediction layer that joins its two inputs, which may be recomputed."""
_AT_EXPERTS = ("dispatch_postprocess", "combine_preprocess")
_AT_HOME = ("dispatch_preprocess", "combine_postprocess")
"""Methods of a token dispatcher that copy rows, after their transfer and before it."""


Shape = tuple[int, ...]

_BY_NAME = (
    (r"(embed_tokens|wte|embed_in)", OperatorKind.EMBEDDING),
    (r"(input_layernorm|post_attention_layernorm|norm|ln_1|ln_2|ln_f)", OperatorKind.NORM),
    (r"(q_norm|k_norm|final_layer_norm)", OperatorKind.NORM),
    (r"(q_proj|k_proj|v_proj|gate_proj|up_proj)", OperatorKind.LINEAR),
    (r"(c_attn|query_key_value)", OperatorKind.LINEAR_QKV),
    (r"(o_proj|attn\.c_proj|attention\.dense)", OperatorKind.LINEAR_PROJ),
    (r"(c_fc|dense_h_to_4h)", OperatorKind.LINEAR_FC1),
    (r"(down_proj|mlp\.c_proj|dense_4h_to_h)", OperatorKind.LINEAR_FC2),
    (r"(lm_head|embed_out)", OperatorKind.LOGITS),
    (r"(self_attn|attn|attention)", OperatorKind.CORE_ATTENTION),
    (r"mlp", OperatorKind.ACTIVATION),
    (r"(layers|h)\.\d+", OperatorKind.RESIDUAL),
)
_BY_TITAN_NAME = (
    (r"tok_embeddings", OperatorKind.EMBEDDING),
    (r"(attention_norm|ffn_norm|norm|q_norm|k_norm|kv_norm)", OperatorKind.NORM),
    (r"(wq|wk|wv|wq_a|wq_b|wkv_a|wkv_b|w1|w3)", OperatorKind.LINEAR),
    (r"wqkv", OperatorKind.LINEAR_QKV),
    (r"wo", OperatorKind.LINEAR_PROJ),
    (r"w2", OperatorKind.LINEAR_FC2),
    (r"(output|lm_head)", OperatorKind.LOGITS),
    (r"inner_attention", OperatorKind.CORE_ATTENTION),
    (r"attention", OperatorKind.POSITION),
    (r"(feed_forward|shared_experts)", OperatorKind.ACTIVATION),
    (r"layers\.\d+", OperatorKind.RESIDUAL),
)
_Patterns = tuple[tuple[re.Pattern[str], OperatorKind], ...]
_ROUTERS = ("router", "gate")
_LAST = ("down_proj", "w2", "w2_EDF")
"""Second product of the experts, whose weight shows their inner width."""
_COPIES = ("reorderer", "token_dispatcher", "inner_experts")
"""Parts of modules that copy rows themselves."""
_OF_EXPERTS, _OF_WIDTHS = ("ep",), ("tp", "etp")
"""Mesh dimensions that split a tensor of experts by expert, and within each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An operator, and the function from its result's shape to its canonical shape."""

    kind: OperatorKind
    shape_of: Callable[[Shape], Shape] | None = None


def expert_parts(model: Any, top_k: int) -> Mapping[int, Part | None]:
    """Return the parts of the layers of experts by ``id``; None for modules inside a part.

    A row at the experts stands for ``top_k`` copies of a token.
    """
    parts_by_id: dict[int, Part | None] = {}
    for block in tree(model):
        submodules = _modules(block)
        router = next(
            (submodules[name] for name in _ROUTERS if submodules.get(name) is not None), None
        )
        around = submodules.get("routed_experts")
        experts = _modules(around).get("inner_experts") if around is not None else None
        experts = submodules.get("experts") if experts is None else experts
        if router is None or experts is None:
            continue
        parts_by_id |= dict.fromkeys(map(id, (*tree(router), *tree(experts))))
        chosen = int(attribute(router, "top_k", None) or 1)
        for module in (block, around) if around is not None else (block,):
            parts_by_id[id(module)] = _around(module, chosen)
        parts_by_id |= _routing(router)
        parts_by_id |= _products(block, experts, top_k)
    return parts_by_id


def _modules(owner: Any) -> Mapping[str, Any]:
    return contents(owner).get("_modules") or {}


def _around(module: Any, chosen: int) -> Part:
    if any(attribute(module, name) is not None for name in _COPIES):
        return Part(
            kind=OperatorKind.PERMUTE,
            shape_of=lambda result: (prod(result[:-1]), result[-1], chosen),
        )
    return Part(
        kind=OperatorKind.ELEMENTWISE, shape_of=lambda result: (prod(result[:-1]), result[-1])
    )


def _routing(router: Any) -> Iterator[tuple[int, Part]]:
    weight = next((w for w in weights((router,)) if len(w.shape) == 2), None)
    if weight is not None:
        num_experts, hidden = map(int, weight.shape)
        shape_of = _with(lambda result: prod(result[:-1]), hidden, num_experts)
        yield id(router), Part(kind=OperatorKind.ROUTER, shape_of=shape_of)


def _with(rows: Callable[[Shape], int], *sizes: int) -> Callable[[Shape], Shape]:
    return lambda result: (rows(result), *sizes)


def _products(block: Any, experts: Any, top_k: int) -> Iterator[tuple[int, Part]]:
    """Yield the experts, or the whole block if they are modules run in sequence."""
    weight, each = _last_of(experts), ()
    if weight is None and (each := tuple(_modules(experts).values())):
        weight = attribute(_last_of(each[0]), "weight")
    if weight is None or not is_tensor(weight) or len(weight.shape) != (2 if each else 3):
        return
    here = len(each) or int(weight.shape[0]) // _num_parts(weight, _OF_EXPERTS)
    inside = prod(weight.shape[-2:]) // _num_parts(weight, _OF_WIDTHS)

    def shape_of(result: Shape) -> Shape:
        # On average as many rows are sent to other ranks' experts as are received from them.
        return (prod(result[:-1]), result[-1], inside // result[-1], top_k, here, here)

    yield id(block if each else experts), Part(kind=OperatorKind.EXPERTS, shape_of=shape_of)


def _last_of(experts: Any) -> Any:
    return next((w for w in (attribute(experts, name) for name in _LAST) if w is not None), None)


def _num_parts(weight: Any, names: tuple[str, ...]) -> int:
    """Return the number of parts of a tensor along such mesh dimensions; 1 if it has none."""
    mesh = attribute(attribute(weight, "_spec"), "mesh")
    dims = getattr(mesh, "mesh_dim_names", None) or ()
    return prod(mesh.size(number) for number, name in enumerate(dims) if name in names)


def _patterns(names: Iterable[tuple[str, OperatorKind]]) -> _Patterns:
    return tuple((re.compile(rf"(^|.*\.){name}$"), kind) for name, kind in names)


_OF_TRANSFORMERS, _OF_TITAN = _patterns(_BY_NAME), _patterns(_BY_TITAN_NAME)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)(?:\.|$)")
_WRAPPED = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""Names of the wrapped module in torch's wrappers: checkpoints, FSDP1, compiled ones."""

Place = tuple[Any, str, Site]
"""An object, the name of a method of it, and the operator that the method computes."""


def find_places(models: Sequence[torch.nn.Module]) -> list[Place]:
    """Return all methods that are operators: modules, then losses, dispatchers and joins of
    inputs."""
    places: list[Place] = [(module, FORWARD, site) for module, site in find_sites(models)]
    modules = tree(*models)
    if places:
        loss = Site(kind=OperatorKind.LOSS)
        # A language model has the method on every stage, but computes the loss on the last.
        last = [m for m in modules if attribute(m, _LOSS) and attribute(m, "post_process", True)]
        places += [(module, _LOSS, loss) for module in last]
    places += _dispatches(modules)
    join = Site(kind=OperatorKind.ELEMENTWISE)
    return places + [(module, _JOIN, join) for module in modules if attribute(module, _JOIN)]


_PLACE = ("layer", "index", "idx")
"""Parts of the names of attributes with a layer's place, in which equal layers differ."""


def natures(places: Iterable[Place]) -> Mapping[int, Hashable]:
    """Return for each layer what equal layers have in common: operators, settings and shapes."""
    parts: dict[int, list[Hashable]] = {}
    for owner, name, site in places:
        shapes = tuple(tuple(weight.shape) for weight in weights((owner,)))
        settings = [item for item in contents(owner).items() if _is_setting(*item)]
        part = id(type(owner)), name, site.kind, shapes, tuple(settings)
        parts.setdefault(site.layer, []).append(part)
    return {layer: tuple(listed) for layer, listed in parts.items()}


def _is_setting(name: Any, value: Any) -> bool:
    values = value if type(value) is tuple else (value,)
    is_plain = all(type(one) in (bool, int, str, type(None)) for one in values)
    return type(name) is str and is_plain and not any(word in name for word in _PLACE)


def find_sites(models: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, Site]]:
    """Return the modules of these libraries' layers that are operators, and their layer."""
    sites = []
    for model in models:
        library_sites = _transformers_sites(model) or _titan_sites(model)
        if library_sites:
            sites += library_sites
            continue
        parts = _hybrid_parts(model)
        prefix, layer = "\0", 0
        for name, module in named_tree(model):
            names = class_names(module)
            if _LAYERS & names:
                prefix, layer = name + ".", int(attribute(module, "layer_number", 1)) - 1
            part = parts.get(id(module), _NO_PART)
            if part is _NO_PART:
                kind = _kind(name, names, module)
                part = None if kind is None else Part(kind=kind)
            if part is not None:
                is_inside = name.startswith(prefix) or name + "." == prefix
                site = Site(
                    kind=part.kind,
                    layer=layer if is_inside else 0,
                    shape_of=part.shape_of,
                    has_siblings=_LOCAL_EXPERTS in name,
                )
                sites.append((module, site))
    return sites


def find_mixers(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the mixers of opaque layers: the symbol of their kind, the layer and the mixer."""
    for layer in tree(*models):
        names, attention = class_names(layer), attribute(layer, "self_attention")
        if "MambaLayer" in names:
            yield "M", layer, attribute(layer, "mixer")
        elif "TransformerLayer" in names and attention is not None:
            if "GatedDeltaNet" in class_names(attention):
                yield "G", layer, attention
            elif "DSAttention" in class_names(attribute(attention, "core_attention")):
                yield "D", layer, attention


def _hybrid_parts(model: Any) -> dict[int, Part | None]:
    """Return the parts of hybrid models by ``id``: mixers, None for modules inside one, norms, and
    the one residual sum of a layer that has attention, an MLP or a mixer alone."""
    parts: dict[int, Part | None] = {}
    for symbol, layer, mixer in find_mixers((model,)):
        config, numel = attribute(layer, "config"), sum(w.numel() for w in weights((mixer,)))
        is_split = attribute(config, "sequence_parallel") is True
        times = int(attribute(config, "tensor_model_parallel_size", 1)) if is_split else 1
        shape_of = partial(_mixer_shape, times, numel)
        parts |= dict.fromkeys(map(id, tree(mixer)))
        parts[id(mixer)] = Part(kind=OPAQUE_OPERATORS[symbol], shape_of=shape_of)
        norm = attribute(layer, "norm")
        if norm is not None and not class_names(norm) & _NOTHING_INSIDE:
            parts[id(norm)] = Part(kind=OperatorKind.NORM)
    for layer in tree(model):
        names = class_names(layer)
        halves = [attribute(layer, name) for name in ("self_attention", "mlp")]
        is_half = any(one is not None and class_names(one) & _NOTHING_INSIDE for one in halves)
        if "MambaLayer" in names or ("TransformerLayer" in names and is_half):
            parts[id(layer)] = Part(kind=OperatorKind.RESIDUAL, shape_of=_one_sum)
    return parts


def _mixer_shape(times: int, numel: int, result: Shape) -> Shape:
    return (prod(result[:-1]) * times, numel)


def _one_sum(result: Shape) -> Shape:
    """Return the shape of one residual sum: as both of a GPT's layer, of half of the tokens."""
    return (-(-prod(result[:-1]) // 2), result[-1])


def _transformers_sites(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Site]]:
    """Return the operators of a decoder with a transformers configuration.

    Empty if there is no such configuration.
    """
    config = transformers_config(model)
    if config is None:
        return []
    shapes = _Shapes(config)
    return _named_sites(model, _OF_TRANSFORMERS, lambda kind, _: shapes.of(kind), shapes.top_k)


def _titan_sites(model: torch.nn.Module) -> list[tuple[torch.nn.Module, Site]]:
    """Return the operators of a torchtitan decoder; empty if it is none."""
    if not any(module_name(module).startswith("torchtitan.models.") for module in tree(model)):
        return []
    parents = {
        id(part): module
        for module in tree(model)
        for part in dict.values(contents(module).get("_modules") or {})
    }

    def shape_of(kind: OperatorKind, module: Any) -> Any:
        if kind is OperatorKind.EMBEDDING:
            return partial(_rows_of, int(attribute(module, "num_embeddings", 0)))
        if kind is OperatorKind.CORE_ATTENTION:
            return _titan_attention(parents.get(id(module)))
        return None

    # Rows at the experts are copies already, one for each expert of a token.
    return _named_sites(model, _OF_TITAN, shape_of, 1)


def _titan_attention(around: Any) -> Any:
    """Return a function for the shape of attention, with heads before tokens, or without a batch.

    If keys (latent attention) and values differ in width, their mean counts.
    """
    heads = int(attribute(around, "n_heads", 1))
    per_group = heads // int(attribute(around, "n_kv_heads", None) or heads)
    key_channels = int(attribute(around, "qk_head_dim", 0))

    def shape(result: Shape) -> Shape:
        batch, heads, seq, channels = (
            result if len(result) == 4 else (1, result[1], result[0], result[2])
        )
        width = (channels + (key_channels or channels)) // 2
        return (batch, heads, heads // per_group, seq, width)

    return shape


def _rows_of(vocab: int, result: Shape) -> Shape:
    return (prod(result[:-1]), result[-1], vocab)


def _named_sites(
    model: torch.nn.Module,
    patterns: _Patterns,
    shape_of: Callable[[OperatorKind, Any], Any],
    top_k: int,
) -> list[tuple[torch.nn.Module, Site]]:
    """Return the modules that match a pattern, and the parts of layers of experts."""
    parts = expert_parts(model, top_k)
    sites = []
    for name, module in _unwrapped(model):
        part = parts.get(id(module), _NO_PART)
        if part is _NO_PART:
            kind = next((kind for pattern, kind in patterns if pattern.match(name)), None)
            part = None if kind is None else Part(kind=kind, shape_of=shape_of(kind, module))
        if part is not None:
            layer = _LAYER.search(name)
            number = int(layer[1]) if layer else 0
            site = Site(kind=part.kind, layer=number, shape_of=part.shape_of, has_siblings=True)
            sites.append((module, site))
    return sites


_NO_PART = Part(kind=OperatorKind.LAYER)


def _unwrapped(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that compute something, with their names without wrappers.

    The work of a wrapper around a layer (gathering parameters, or recompute) is not an operator of
    the layer.
    """
    for name, module in named_tree(model):
        if _WRAPPED.isdisjoint(contents(module).get("_modules") or ()):
            yield ".".join(part for part in name.split(".") if part not in _WRAPPED), module


def transformers_config(model: torch.nn.Module) -> Mapping[str, Any] | None:
    """Return the keys of a model's transformers configuration, which may be of a class of the
    user's own, under all their names; None without one."""
    for config in (attribute(module, "config") for module in tree(model)):
        is_theirs = any(
            cls.__module__.startswith("transformers.")
            and cls.__name__.lower() == "pretrainedconfig"
            for cls in classes(config)
        )
        if is_theirs and (keys := _keys_of(config))["model_type"]:
            return keys
    return None


def _keys_of(config: Any) -> dict[str, Any]:
    values, names = contents(config), attribute(config, "attribute_map", {})
    keys = {name: value for name, value in values.items() if type(value) in _PLAIN}
    keys |= {alias: keys[name] for alias, name in dict.items(names) if name in keys}
    if contents(text := values.get("text_config")):
        keys["text_config"] = _keys_of(text)
    return {**keys, "model_type": attribute(config, "model_type")}


_PLAIN = (bool, dict, float, int, list, str, tuple, type(None))


class _Shapes:
    """Canonical shapes of operators whose tensors do not suffice; batch comes first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._heads = int(config["num_attention_heads"])
        self._groups = int(config.get("num_key_value_heads") or self._heads)
        hidden = int(config["hidden_size"])
        self._channels = int(config.get("head_dim") or hidden // self._heads)
        inner = config.get("intermediate_size") or config.get("n_inner")
        self._ffn = int(inner or 4 * hidden)
        self._gates = 1 + ("intermediate_size" in config)
        self._vocab = int(config["vocab_size"])
        self.top_k = int(config.get("num_experts_per_tok") or 1)

    def of(self, kind: OperatorKind) -> Any:
        """Return the function from a module's result to the shape of this kind; None if tensors
        suffice."""
        known = {
            OperatorKind.CORE_ATTENTION: self._attention,
            OperatorKind.ACTIVATION: self._activation,
            OperatorKind.EMBEDDING: self._embedding,
        }
        return known.get(kind)

    def _attention(self, result: Shape) -> Shape:
        return (result[0], self._heads, self._groups, result[1], self._channels)

    def _activation(self, result: Shape) -> Shape:
        return (result[0] * result[1], self._gates * self._ffn, self._ffn)

    def _embedding(self, result: Shape) -> Shape:
        return (result[0] * result[1], result[2], self._vocab)


def _kind(name: str, names: set[str], module: torch.nn.Module) -> OperatorKind | None:
    if names & _NOTHING_INSIDE:
        return None
    kind = MODULES_BY_ATTRIBUTE.get(name.rpartition(".")[2])
    if kind is not None:
        return OperatorKind.GROUPED_LINEAR if _GROUPED in names else kind
    kind = next((kind for cls, kind in MODULES_BY_CLASS.items() if cls in names), None)
    if kind is OperatorKind.PERMUTE and attribute(module, "num_local_experts", 1) == 1:
        return None  # a single expert's result needs no combination
    return kind


def dispatch_methods(dispatcher: Any) -> tuple[str, ...]:
    """Return the methods of a token dispatcher that copy rows; core 0.12 uses two others for all of
    it."""
    is_exchange = "AlltoAll" in type(dispatcher).__name__
    names = _AT_HOME if is_exchange else ()
    if not is_exchange or attribute(dispatcher, "num_local_experts", 1) > 1:
        names = (*names, *_AT_EXPERTS)
    return names


def _dispatches(modules: Iterable[torch.nn.Module]) -> Iterator[Place]:
    """Yield token dispatchers of expert layers, each with the name of a method that copies rows."""
    for module in modules:
        dispatcher = attribute(module, "token_dispatcher")
        if dispatcher is not None:
            layer = int(attribute(module, "layer_number") or 1) - 1
            site = Site(kind=OperatorKind.PERMUTE, layer=layer)
            names = dispatch_methods(dispatcher)
            yield from ((dispatcher, name, site) for name in names if attribute(dispatcher, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnhookableParts:
    """Parts that Python does not run line by line, by ``id``, with the reason."""

    modules: Mapping[int, str]
    methods: Mapping[tuple[int, str], str]
    around: Mapping[int, str]
    """Modules whose self time cannot be separated from that of an operator inside."""

    def why(self, owner: Any, name: str) -> str | None:
        """Return why calls of this method are not recorded; None if they are."""
        reason = self.modules.get(id(owner)) or self.methods.get((id(owner), name))
        if reason is None and name == FORWARD and id(owner) in self.around:
            return f"partly {self.around[id(owner)]}"
        return reason


def find_unhookable(models: Iterable[torch.nn.Module], places: Iterable[Place]) -> UnhookableParts:
    """Return the regions that run without calling their modules, and the places around them.

    Modules inside a compiled, captured or fused region are not called.  Replicas of
    ``DataParallel`` are shallow copies: other modules, and gone with each pass.  A module around
    such a region is no operator that could be modelled by its shape: its time includes that of the
    operators inside.
    """
    chunks, all_places = list(models), list(places)
    hidden = hidden_by_graphs(chunks)
    modules = _regions(chunks) | dict.fromkeys(hidden.modules, _CAPTURED)
    methods = dict.fromkeys(hidden.methods, _CAPTURED)
    methods |= {
        (id(owner), FORWARD): _OVERLAPPED for owner, _, _ in all_places if _is_in_parts(owner)
    }
    silent = {
        id(owner): reason
        for owner, name, _ in all_places
        if (reason := modules.get(id(owner)) or methods.get((id(owner), name)))
    }
    around = dict.fromkeys(hidden.layers, _CAPTURED)
    for owner, name, _ in all_places if silent else ():
        if name == FORWARD and id(owner) not in modules:
            reasons = (silent.get(id(part)) for part in tree(owner))
            reason = next((r for r in reasons if r in (_CAPTURED, _COMPILED, _FUSED)), None)
            if reason is not None:
                around[id(owner)] = reason
    return UnhookableParts(modules=modules, methods=methods, around=around)


def _is_in_parts(module: Any) -> bool:
    """Return True for shared experts whose two products run between transfers, each by a method."""
    flag = attribute(attribute(module, "config"), "moe_shared_expert_overlap")
    return flag is True and "SharedExpertMLP" in class_names(module)


def _regions(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    reasons_by_id: dict[int, str] = {}
    for model in models:
        for module in tree(model):
            reason = _region(module)
            if reason is None or id(module) in reasons_by_id:
                continue
            for part in tree(module):
                reasons_by_id[id(part)] = reason
                reasons_by_id[id(attribute(part, "token_dispatcher", part))] = reason
    return reasons_by_id


def _region(module: torch.nn.Module) -> str | None:
    forward = contents(module).get("forward")
    if is_compiled(module) or "_torchdynamo_orig_callable" in contents(forward):
        return _COMPILED
    if issubclass(type(module), torch.nn.DataParallel):
        return "replicated"
    if class_names(module) & _FUSED_MLPS or attribute(module, "_with_fused_impl") is True:
        return _FUSED
    return "scripted" if issubclass(type(module), torch.jit.ScriptModule) else None


def unhookable_reason(owner: Any, name: str) -> str | None:
    """Return why calls of a method cannot be attributed to their object; None if they can."""
    override = contents(owner).get(name)
    if override is not None and not (name == FORWARD and _is_redistributing(override)):
        return "replaced"
    if type(attribute(owner, name)) is not FunctionType:
        return "not a method"
    return None if type(owner).__weakrefoffset__ else "no weak reference"


def _is_redistributing(forward: Any) -> bool:
    """Return True if torchtitan has wrapped a module's own forward in conversions of DTensors."""
    return type(forward) is FunctionType and forward.__module__ == "torchtitan.protocols.module"
