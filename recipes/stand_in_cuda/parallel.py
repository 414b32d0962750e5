"""Distributed side of the stand-in: groups over gloo, meshes and wrappers on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from ...hooks.process.post_import import when_imported
from .device import CPU


def patch() -> None:
    """Patch for the rest of this process.

    Model wrappers query the device in C++, or compare with the one that a script names, and would
    reject parameters on the CPU.
    """
    for name in ("init_process_group", "new_group"):
        setattr(torch.distributed, name, _over_gloo(getattr(torch.distributed, name)))
    _change(DistributedDataParallel, _without_ids)
    # FSDP2 and DTensor take their device from a mesh.
    when_imported("torch.distributed.device_mesh", _patch_meshes)
    when_imported("torch.distributed.fsdp.fully_sharded_data_parallel", _patch_fsdp1)


def _patch_meshes(module: ModuleType) -> None:
    _change(module.DeviceMesh, _mesh_on_the_cpu)


def _patch_fsdp1(module: ModuleType) -> None:
    _change(module.FullyShardedDataParallel, _sharded_on_the_cpu)


def _change(owner: Any, changed: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    owner.__init__ = functools.wraps(owner.__init__)(changed(owner.__init__))


def _without_ids(begin: Callable[..., None]) -> Callable[..., None]:
    def begun(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        begin(self, module, None, None, *args, **kwargs)

    return begun


def _mesh_on_the_cpu(begin: Callable[..., None]) -> Callable[..., None]:
    def begun(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return begun


def _sharded_on_the_cpu(begin: Callable[..., None]) -> Callable[..., None]:
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{**kwargs, "device_id": CPU})

    return begun


def _over_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if arg == "nccl" else arg for arg in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return make(*args, **kwargs)

    return wrapped
