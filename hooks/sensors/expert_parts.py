"""Layers of experts of transformers and torchtitan, known by their parts and not by their names.

Such a layer holds a router and the experts.  The router with its product is one operator, and so
are the experts with theirs; copies of rows between them are what is left of torchtitan's layer, and
in transformers' they are inside the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ...calib.workload.operators import OperatorKind
from ..process.looking import attribute, contents, own_weights, tree

Shape = tuple[int, ...]
_ROUTERS = ("router", "gate")
_LAST = ("down_proj", "w2", "w2_EDF")
"""The second product of the experts, whose weight shows how wide they are inside."""
_COPIES = ("reorderer", "token_dispatcher", "inner_experts")
"""Parts of what copies rows by itself."""
_OF_EXPERTS, _OF_WIDTHS = ("ep",), ("tp", "etp")
"""Dimensions of a mesh that split a tensor of experts by expert, and inside each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An operator, and what computes its canonical shape from that of its result."""

    kind: OperatorKind
    shape_of: Callable[[Shape], Shape] | None = None


def expert_parts(model: Any, top_k: int) -> Mapping[int, Part | None]:
    """The parts of the layers of experts by ``id``; None for what is inside of a part.

    A row at the experts stands for ``top_k`` copies of a token.
    """
    found: dict[int, Part | None] = {}
    for block in tree(model):
        held = _modules(block)
        router = next((held[name] for name in _ROUTERS if held.get(name) is not None), None)
        around = held.get("routed_experts")
        experts = _modules(around).get("inner_experts") if around is not None else None
        experts = held.get("experts") if experts is None else experts
        if router is None or experts is None:
            continue
        found |= dict.fromkeys(map(id, (*tree(router), *tree(experts))))
        chosen = int(attribute(router, "top_k", None) or 1)
        for module in (block, around) if around is not None else (block,):
            found[id(module)] = _around(module, chosen)
        found |= _routing(router)
        found |= _products(block, experts, top_k)
    return found


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
    weight = next((w for m in tree(router) for w in own_weights(m) if len(w.shape) == 2), None)
    if weight is not None:
        num_experts, hidden = map(int, weight.shape)
        shape_of = _with(lambda result: prod(result[:-1]), hidden, num_experts)
        yield id(router), Part(kind=OperatorKind.ROUTER, shape_of=shape_of)


def _with(rows: Callable[[Shape], int], *sizes: int) -> Callable[[Shape], Shape]:
    return lambda result: (rows(result), *sizes)


def _products(block: Any, experts: Any, top_k: int) -> Iterator[tuple[int, Part]]:
    """The experts, or all of the block where they are modules, which run one after the other."""
    weight, each = _last_of(experts), ()
    if weight is None and (each := tuple(_modules(experts).values())):
        weight = attribute(_last_of(each[0]), "weight")
    if weight is None or len(weight.shape) != (2 if each else 3):
        return
    here = len(each) or int(weight.shape[0]) // _num_parts(weight, _OF_EXPERTS)
    inside = prod(weight.shape[-2:]) // _num_parts(weight, _OF_WIDTHS)

    def shape_of(result: Shape) -> Shape:
        # Rows that went to the experts of other ranks are as many as came from there, on average.
        return (prod(result[:-1]), result[-1], inside // result[-1], top_k, here, here)

    yield id(block if each else experts), Part(kind=OperatorKind.EXPERTS, shape_of=shape_of)


def _last_of(experts: Any) -> Any:
    return next((w for w in (attribute(experts, name) for name in _LAST) if w is not None), None)


def _num_parts(weight: Any, names: tuple[str, ...]) -> int:
    """How many parts a tensor is in along such dimensions of its mesh; 1 where it has none."""
    mesh = attribute(attribute(weight, "_spec"), "mesh")
    dims = getattr(mesh, "mesh_dim_names", None) or ()
    return prod(mesh.size(number) for number, name in enumerate(dims) if name in names)
