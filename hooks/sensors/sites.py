"""Where the operators of a Megatron model are: modules and methods, by name and class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from inspect import isfunction
from typing import Any

import torch

from ...calib.workload.operators import (
    MODULES_BY_ATTRIBUTE,
    MODULES_BY_CLASS,
    OperatorKind,
)
from .step_log import Site
from .transformers_sites import transformers_sites

_GROUPED = "TEGroupedLinear"
_NOTHING_INSIDE = frozenset({"IdentityOp", "IdentityFuncOp"})
FORWARD = "forward"
_LOSS = "compute_language_model_loss"
_JOIN = "_concat_embeddings"
"""Method of a prediction layer that joins its two inputs, which may run again."""
_AT_EXPERTS = ("dispatch_postprocess", "combine_preprocess")
_AT_HOME = ("dispatch_preprocess", "combine_postprocess")
"""Methods of a token dispatcher that copy rows, after their transfer and before it."""


Place = tuple[Any, str, Site]
"""An object, the name of a method of it, and what the method computes."""


def find_places(models: Sequence[torch.nn.Module]) -> list[Place]:
    """All methods that are operators: modules, then losses, dispatchers and joins of inputs."""
    places: list[Place] = [(module, FORWARD, site) for module, site in find_sites(models)]
    modules = [module for model in models for module in model.modules()]
    if places:
        loss = Site(kind=OperatorKind.LOSS)
        # A language model has the method on every stage, and computes the loss on the last.
        last = [m for m in modules if hasattr(m, _LOSS) and getattr(m, "post_process", True)]
        places += [(module, _LOSS, loss) for module in last]
    places += _dispatches(modules)
    join = Site(kind=OperatorKind.ELEMENTWISE)
    return places + [(module, _JOIN, join) for module in modules if hasattr(module, _JOIN)]


def find_sites(models: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, Site]]:
    """The modules of Megatron's or transformers' layers that are operators, and their layer."""
    found = []
    for model in models:
        told = transformers_sites(model)
        if told:
            found += told
            continue
        prefix, layer = "\0", 0
        for name, module in model.named_modules():
            classes = {c.__name__ for c in type(module).__mro__}
            if "TransformerLayer" in classes:
                prefix, layer = name + ".", int(getattr(module, "layer_number", 1)) - 1
            kind = _kind(name, classes, module)
            if kind is not None:
                is_inside = name.startswith(prefix) or name + "." == prefix
                found.append((module, Site(kind=kind, layer=layer if is_inside else 0)))
    return found


def _kind(name: str, classes: set[str], module: torch.nn.Module) -> OperatorKind | None:
    if classes & _NOTHING_INSIDE:
        return None
    kind = MODULES_BY_ATTRIBUTE.get(name.rpartition(".")[2])
    if kind is not None:
        return OperatorKind.GROUPED_LINEAR if _GROUPED in classes else kind
    kind = next((kind for cls, kind in MODULES_BY_CLASS.items() if cls in classes), None)
    if kind is OperatorKind.PERMUTE and getattr(module, "num_local_experts", 1) == 1:
        return None  # a single expert's result is joined with no other
    return kind


def dispatch_methods(dispatcher: Any) -> tuple[str, ...]:
    """The methods of a token dispatcher that copy rows; core 0.12 does all of it in two others."""
    is_exchange = "AlltoAll" in type(dispatcher).__name__
    names = _AT_HOME if is_exchange else ()
    if not is_exchange or getattr(dispatcher, "num_local_experts", 1) > 1:
        names = (*names, *_AT_EXPERTS)
    return names


def _dispatches(modules: Iterable[torch.nn.Module]) -> Iterator[Place]:
    """Token dispatchers of expert layers, each with the name of a method that copies rows."""
    for module in modules:
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            layer = int(getattr(module, "layer_number", None) or 1) - 1
            site = Site(kind=OperatorKind.PERMUTE, layer=layer)
            names = dispatch_methods(dispatcher)
            yield from ((dispatcher, name, site) for name in names if hasattr(dispatcher, name))


def untraceable(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """By ``id``, modules (and dispatchers) inside a region that Python does not run line by line.

    A compiled or captured region has no inside to cover, and would be compiled or captured anew.
    Replicas of ``DataParallel`` are shallow copies, which a method of the original must not reach.
    """
    found: dict[int, str] = {}
    for model in models:
        for module in model.modules():
            reason = _region(module)
            if reason is None or id(module) in found:
                continue
            for part in module.modules():
                found[id(part)] = reason
                found[id(getattr(part, "token_dispatcher", part))] = reason
    return found


def _region(module: torch.nn.Module) -> str | None:
    own = vars(module)
    is_compiled = own.get("_compiled_call_impl") is not None
    is_wrapper = "_orig_mod" in own.get("_modules", ())
    if is_compiled or is_wrapper or hasattr(own.get("forward"), "_torchdynamo_orig_callable"):
        return "compiled"
    if "cudagraph_manager" in {*own, *own.get("_modules", ())} or own.get("cuda_graphs"):
        return "captured"
    if isinstance(module, torch.nn.DataParallel):
        return "replicated"
    return "scripted" if isinstance(module, torch.jit.ScriptModule) else None


def why_not(owner: Any, name: str) -> str | None:
    """Why a method of an object cannot be covered on the object; None where it can."""
    if not isfunction(getattr(type(owner), name, None)) or not hasattr(owner, "__dict__"):
        return "not a method"
    if not type(owner).__weakrefoffset__:
        return "no weak reference"
    return "replaced" if name in vars(owner) else None
