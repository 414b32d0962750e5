"""Parts of a model that run without Python: CUDA graphs and compiled code, where hooks are silent.

What is inside them is named in the coverage; the time around them is recorded as ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from ..process.looking import attribute, class_names, contents, tree

_NONE = "none"
_SCOPES = ("cuda_graph_modules", "cuda_graph_scope")
_DEFAULT_WARMUP_STEPS = 3
"""Megatron's own, where a configuration does not tell it."""
_CAPTURE_STEPS = 2
"""Steps after those run eagerly: one in which graphs are captured, one that replays them first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """What was found in a model, in words, and the steps until graphs are replayed."""

    names: tuple[str, ...] = ()
    warmup_steps: int = 0
    is_graphed: bool = False


def find_regions(models: Iterable[torch.nn.Module]) -> Regions:
    """The silent regions of some model chunks.

    Looked at when hooks are first put on: whatever is compiled or captured later is seen as
    operators that do not fire.
    """
    found: Counter[str] = Counter()
    warmup_steps = 0
    for model in models:
        compiled: set[int] = set()
        for module in tree(model):
            if is_compiled(module) and id(module) not in compiled:
                compiled.update(map(id, tree(module)))
                found["compiled"] += 1
        for what, config in _graphed(model):
            found[what] += 1
            steps = int(attribute(config, "cuda_graph_warmup_steps", _DEFAULT_WARMUP_STEPS))
            warmup_steps = max(warmup_steps, steps + _CAPTURE_STEPS)
    return Regions(
        names=tuple(_words(what, count) for what, count in sorted(found.items())),
        warmup_steps=warmup_steps,
        is_graphed=warmup_steps > 0,
    )


def is_compiled(module: torch.nn.Module) -> bool:
    """True for what ``torch.compile(module)`` returns and after ``module.compile()``."""
    own = contents(module)
    is_wrapper = "_orig_mod" in (own.get("_modules") or ())
    return is_wrapper or own.get("_compiled_call_impl") is not None


is_being_compiled: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
"""True, as the compiler reads our code, in what it compiles: there our hooks are nothing at all.

A function that is compiled may call modules that are not; a mark in them would be a break in its
graph, and a guard on what changes with every window a compilation more for each of them.
"""


def _graphed(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Per captured layer, or once for a whole iteration: what is captured, and its config."""
    layers = [module for module in tree(model) if "TransformerLayer" in class_names(module)]
    configs = (attribute(module, "config") for module in (model, *layers[:1]))
    config = next((one for one in configs if one is not None), None)
    if _implementation(config) == "full_iteration" or "full_iteration" in _scope(config):
        yield "whole iteration", config
        return
    for layer in layers:
        own = attribute(layer, "config")
        implementation = _implementation(own)
        if implementation != _NONE:
            scope = sorted(_scope(own) - {"full"})
            yield f"{implementation}:{','.join(scope)}", own


def _implementation(config: Any) -> str:
    """Megatron's name of it; before core 0.15 two switches said the same."""
    named = attribute(config, "cuda_graph_impl")
    if named and named != _NONE:
        return str(named)
    if attribute(config, "enable_cuda_graph", False):
        return "local"
    return "transformer_engine" if attribute(config, "external_cuda_graph", False) else _NONE


def _scope(config: Any) -> set[str]:
    """Which modules of a layer are captured: a name, a list of names or of enum members."""
    value = next((v for name in _SCOPES if (v := attribute(config, name))), ())
    parts = (value,) if isinstance(value, str) else value
    return {str(part.name if isinstance(part, Enum) else part) for part in parts}


def _words(what: str, count: int) -> str:
    if what == "compiled":
        return f"inside compiled code: {count} module{'s' * (count > 1)}, outer time only"
    if what == "whole iteration":
        return "inside a CUDA graph: the whole iteration, step time only"
    implementation, _, scope = what.partition(":")
    layers = f"{count} layer{'s' * (count > 1)}"
    parts = f" ({scope})" if scope else ""
    return f"inside a CUDA graph ({implementation}): {layers}{parts}, outer time only"
