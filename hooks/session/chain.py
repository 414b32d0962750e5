"""Modules around a set of parameters: a model and its wrappers, among the live objects."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from ...calib.workload.collectives import GroupRole
from ..process.host import updated_by
from ..process.inspection import attribute, class_names, contents, direct_weights, tree, weights
from ..sensors.captured import is_compiled
from .devices import sharded_groups

_UNSEEN_DDP = "collectives inside DistributedDataParallel"
_UNSEEN_COMPILED = "collectives through torch.compile"
_UNSEEN_DTENSOR = "collectives through DTensor"


def chain_of(optimizer: Any) -> tuple[nn.Module, ...]:
    """Return the live modules that have all parameters of an optimizer, the outermost first.

    Every object that Python tracks is scanned once, which takes some tens of milliseconds: for
    warm-up only.  Empty if the objects are hidden from the collector (``gc.freeze``).  DeepSpeed's
    engine has the optimizer itself, which updates flat copies that no module has.
    """
    wanted = set(map(id, updated_by(optimizer)))
    parents: dict[int, list[nn.Module]] = {}
    owners: list[nn.Module] = []
    wrapped = set(map(id, _wrapped(optimizer)))
    for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
        if is_engine(module) and wrapped & set(map(id, _wrapped(attribute(module, "optimizer")))):
            return (module, attribute(module, "module"))
        if any(id(weight) in wanted for weight in direct_weights(module)):
            owners.append(module)
        for child in dict.values(contents(module).get("_modules") or {}):
            parents.setdefault(id(child), []).append(module)
    if not owners:
        return ()
    # A compiler's graph of the optimizer's step has the weights too.
    owner = min(reversed(owners), key=lambda module: issubclass(type(module), GraphModule))
    modules_by_id = {id(module): module for module in _line(owner, parents)}
    holding = [module for module in modules_by_id.values() if _holds(module, wanted)]
    return tuple(sorted(holding, key=lambda module: -len(tree(module))))


def is_engine(module: nn.Module) -> bool:
    """Return True for DeepSpeed's wrapper of a model."""
    return "DeepSpeedEngine" in class_names(module)


def _wrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = attribute(optimizer, "optimizer")


def _line(module: nn.Module, parents: dict[int, list[nn.Module]]) -> Iterable[nn.Module]:
    """Yield the module and all modules that contain it."""
    seen, pending = set[int](), [module]
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            pending += parents.get(id(module), ())


def _holds(module: nn.Module, wanted: set[int]) -> bool:
    return wanted <= set(map(id, weights((module,))))


def unseen_in(chain: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return names of collectives that the process-group hooks cannot see in these modules.

    DistributedDataParallel reduces its buckets in C++.  Compiled regions and DTensor call
    functional collectives; the shards of FSDP2 are DTensors too, but their collectives are visible.
    """
    names, modules = [], tree(*chain)
    if any(issubclass(type(module), DistributedDataParallel) for module in modules):
        names.append(_UNSEEN_DDP)
    if any(is_compiled(module) for module in modules):
        names.append(_UNSEEN_COMPILED)
    if is_split(modules):
        names.append(_UNSEEN_DTENSOR)
    return tuple(names)


def is_split(modules: Iterable[nn.Module]) -> bool:
    """Return True if ranks share the work on a sample (DTensor)."""
    return any(map(_is_split, weights(modules)))


def roles_in(chain: Iterable[nn.Module]) -> dict[str, GroupRole]:
    """Return the roles of the process groups of DDP, FSDP1, FSDP2 and DTensors, by name.

    The group that reduces gradients, or shards, is that of data parallelism; the one between copies
    of all shards (HSDP) is that of the optimizer's instances.  Groups along which a DTensor is
    split have the role that its mesh names.
    """
    models, roles = tuple(chain), dict[str, GroupRole]()
    for group, role in (*_groups_in(models), *_dimensions_in(models)):
        name = getattr(group, "group_name", None)
        if name is not None:
            roles.setdefault(name, role)
    return roles


def num_copies(chain: Iterable[nn.Module]) -> int:
    """Return the copies of all shards that train in parallel (HSDP); 1 if all ranks share one."""
    between = (g for g, role in _groups_in(chain) if role is GroupRole.DP_INSTANCES)
    return next((group.size() for group in between), 1)


def num_replicas(chain: Iterable[nn.Module]) -> int:
    """Return the ranks over which wrappers average gradients; 0 without wrappers."""
    sizes = {role: group.size() for group, role in _groups_in(chain)}
    return math.prod(sizes.values()) if sizes else 0


_OF_WRAPPERS = {GroupRole.DP: "process_group", GroupRole.DP_INSTANCES: "_inter_node_pg"}
"""Attributes of DDP and of FSDP1."""
_OF_MESHES = {
    GroupRole.DP: "shard_process_group",
    GroupRole.DP_INSTANCES: "replicate_process_group",
}
"""Attributes of FSDP2's mesh information on a group of parameters."""


def _groups_in(chain: Iterable[nn.Module]) -> Iterator[tuple[Any, GroupRole]]:
    for module in tree(*chain):
        names = class_names(module)
        if names & {"DistributedDataParallel", "FullyShardedDataParallel"}:
            owners, attributes = (module,), _OF_WRAPPERS
        elif "FSDPModule" in names:
            owners, attributes = _mesh_infos(module), _OF_MESHES
        else:
            continue
        for owner in owners:
            for role, name in attributes.items():
                group = attribute(owner, name)
                if group is not None:
                    yield group, role


_DIMENSIONS = {
    "tp": GroupRole.TP,
    "cp": GroupRole.CP,
    "ep": GroupRole.EP,
    "etp": GroupRole.EXPERT_TP,
}


def _dimensions_in(chain: Iterable[nn.Module]) -> Iterator[tuple[Any, GroupRole]]:
    split = [weight.device_mesh for weight in weights(chain) if "DTensor" in class_names(weight)]
    for mesh in {id(mesh): mesh for mesh in split}.values():
        for name in mesh.mesh_dim_names or ():
            if name in _DIMENSIONS:
                yield mesh.get_group(name), _DIMENSIONS[name]


def _mesh_infos(module: Any) -> tuple[Any, ...]:
    """Return the mesh information of the parameters that FSDP2 gathers with this module.

    The mesh of the parameters themselves is unsuitable: DTensor deduplicates equal meshes, even if
    their groups differ.
    """
    return tuple(group.mesh_info for group in sharded_groups(module))


def is_sharded(chain: Iterable[nn.Module]) -> bool:
    """Return True if parameters are sharded over the ranks (FSDP1 or FSDP2)."""
    return bool(_class_names(chain) & {"FullyShardedDataParallel", "FSDPModule"})


def is_flattened(chain: Iterable[nn.Module]) -> bool:
    """Return True if the shards of a unit are one plain tensor (FSDP1)."""
    return "FullyShardedDataParallel" in _class_names(chain)


def _class_names(chain: Iterable[nn.Module]) -> set[str]:
    return {name for module in tree(*chain) for name in class_names(module)}


def _is_split(weight: Any) -> bool:
    """Return True for a DTensor that is split along more than the dimension that FSDP2 splits."""
    mesh = weight.device_mesh if "DTensor" in class_names(weight) else None
    names = set(getattr(mesh, "mesh_dim_names", None) or ())
    return bool(names & _DIMENSIONS.keys())
