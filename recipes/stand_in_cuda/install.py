"""Make a CPU answer to ``torch.cuda``, so that unmodified Megatron code trains over gloo.

For correctness, tests and dry runs.  Nothing here is meant to be fast, and its times say nothing
about a GPU.  One generator serves as CPU and as CUDA random state, so dropout and Megatron's state
tracker behave as on a device, and a loss is the same in every run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from . import megatron as stand_in_megatron
from . import parallel
from .device import CPU, accelerator_names, cuda_names, returning

_state = SimpleNamespace(mode=None)
_OWNER = "FORERUN_STAND_IN_PID"
"""Variable set here, never by a user: children have the stand-in too, and do not announce it
again."""


def install() -> None:
    """Put the CPU in CUDA's place, for the rest of this process; a second call does nothing."""
    if _state.mode is not None:
        return
    _turn_dynamo_off()
    for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
        for name, value in cuda_names().items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    if hasattr(torch, "accelerator"):  # torch 2.6 and later
        for name, value in accelerator_names().items():
            setattr(torch.accelerator, name, value)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, returning(None))
    _patch_tensor()
    _patch_loaders()
    parallel.patch()
    stand_in_megatron.prepare()
    _state.mode = _CpuMode()
    _state.mode.__enter__()
    _keep_mode_in_backward(_state.mode)
    owner = os.environ.setdefault(_OWNER, str(os.getpid()))
    if os.environ.get("RANK", "0") == "0" and owner == str(os.getpid()):
        print(
            "[forerun] CPU stand-in: torch.cuda is the CPU and nccl is gloo in this run; "
            "for correctness, tests and dry runs, not for speed",
            flush=True,
        )


class _CpuMode(TorchFunctionMode):
    """Redirects everything that names a CUDA device to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs) if kwargs else func(*args)


def _is_cuda(device: Any) -> bool:
    if device is None:
        return False
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return type(device) is int


def _patch_tensor() -> None:
    named = torch.Tensor.type

    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            # Under the mode ``named`` is dispatched back here by name, so the prefix may be there.
            return "torch.cuda." + named(self).rpartition(".")[2]
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return named(self, dtype, *args, **kwargs)

    def same(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.type = type_of  # type: ignore[method-assign]
    torch.Tensor.cuda = same  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = returning(None)  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _patch_loaders() -> None:
    """Draw a starting loader's seed from a private generator instead of the CPU's random state.

    On a GPU that never affects the device's state; here both are one, and a run that loads a
    checkpoint would continue with different dropout.
    """
    from torch.utils.data import dataloader

    seeds = torch.Generator()
    owner: Any = getattr(dataloader, "_BaseDataLoaderIter")  # noqa: B009
    begin = owner.__init__

    def begin_apart(self: Any, loader: Any) -> None:
        given, is_pinned = loader.generator, loader.pin_memory
        loader.generator = seeds if given is None else given
        loader.pin_memory = False
        try:
            begin(self, loader)
        finally:
            loader.generator, loader.pin_memory = given, is_pinned

    owner.__init__ = begin_apart


def _keep_mode_in_backward(mode: TorchFunctionMode) -> None:
    """Enable the mode in ``backward``, which runs Megatron's own functions.

    Otherwise a mode is off inside the functions that it intercepts.
    """
    run = getattr(torch.autograd, "_engine_run_backward")  # noqa: B009

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    setattr(torch.autograd, "_engine_run_backward", run_in_mode)  # noqa: B010


def _turn_dynamo_off() -> None:
    """Disable Dynamo, whose compiled code would use the real ``torch.cuda``."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.disable = True
