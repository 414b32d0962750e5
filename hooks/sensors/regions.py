"""Parts of a model that run without Python: CUDA graphs and compiled code, where hooks are silent.

What is inside them is named in the coverage; the time around them is that of the pass alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..process.looking import attribute, contents, tree
from .captured import (
    FORWARD_ALONE,
    Graph,
    config_in,
    graph_of,
    implementation_of,
    num_graphs,
    whole_of,
)

_DEFAULT_WARMUP_STEPS = 3
"""Megatron's own, where a configuration does not tell it."""
_CAPTURE_STEPS = 2
"""Steps after those run eagerly: one in which graphs are captured, one that replays them first."""


_OUTER = ", outer time only"
_Words = tuple[str, str, str]
"""Before and after a number, with the word for one of what is counted, if anything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """What was found in a model, in words, and the steps until graphs are replayed."""

    names: tuple[str, ...] = ()
    warmup_steps: int = 0
    is_graphed: bool = False


def graphs_remark() -> tuple[str, ...]:
    """Why operators may be silent where nothing known says it: graphs that the process holds.

    All objects are looked at, which takes a while: only where operators that are watched were never
    called.
    """
    number = num_graphs()
    if not number:
        return ()
    graphs = f"{number} CUDA graph{'s' * (number > 1)} in this process"
    return (f"{graphs}: operators that they replay are not seen",)


_BESIDE = "overlap_moe_expert_parallel_comm"


def why_no_operators(models: Iterable[torch.nn.Module]) -> str:
    """Why no operator of these models can be told from another, in words; empty where all can.

    Megatron's combined 1F1B calls the parts of a layer, not the layer, and those of one micro-batch
    forwards between those of another backwards, on two streams.
    """
    if any(attribute(config_in(model), _BESIDE) is True for model in models):
        flag = "--" + _BESIDE.replace("_", "-")
        return (
            f"{flag} runs the forward pass of one micro-batch among the backward pass of another: "
            "operators not recorded, passes hold both"
        )
    return ""


def find_regions(models: Iterable[torch.nn.Module]) -> Regions:
    """The silent regions of some model chunks.

    Looked at when hooks are first put on: whatever is compiled or captured later is seen as
    operators that do not fire.
    """
    found: Counter[_Words] = Counter()
    warmup_steps, is_graphed = 0, False
    for model in models:
        compiled: set[int] = set()
        for module in tree(model):
            if is_compiled(module) and id(module) not in compiled:
                compiled.update(map(id, tree(module)))
                found["inside compiled code: ", "module", _OUTER] += 1
        for words, config in _graphed(model):
            found[words] += 1
            is_graphed = True
            if implementation_of(config) != "none":
                steps = int(attribute(config, "cuda_graph_warmup_steps", _DEFAULT_WARMUP_STEPS))
                warmup_steps = max(warmup_steps, steps + _CAPTURE_STEPS)
    return Regions(
        names=tuple(sorted(_sentence(*words, number) for words, number in found.items())),
        warmup_steps=warmup_steps,
        is_graphed=is_graphed,
    )


def _sentence(start: str, what: str, end: str, number: int) -> str:
    return f"{start}{number} {what}{'s' * (number > 1)}{end}" if what else start + end


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


def _graphed(model: torch.nn.Module) -> Iterator[tuple[_Words, Any]]:
    """Per captured module, or once for all of a model: the words for it, and its configuration."""
    whole = whole_of(model)
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
