"""Where a model computes, which is not always where its parameters lie, and what takes marks there.

Marks are events of CUDA, which ROCm has under the same names.  Elsewhere there is the host's clock
alone: on a CPU it times operators, on another device only that they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..process import attribute, class_names, tree, weights
from ..sensors import DeviceStopwatch, HostStopwatch, Stopwatch

_HOST = torch.device("cpu")
_NOWHERE = ("cpu", "meta")


def computing_device(models: Iterable[torch.nn.Module]) -> torch.device:
    """The device of the first parameter, or the one that FSDP brings it to from the host.

    ``torch.cuda.is_available`` is not asked: under the CPU stand-in it says yes.
    """
    chunks = tuple(models)
    weight_devices = [weight.device for weight in weights(chunks)]
    if weight_devices and weight_devices[0].type not in _NOWHERE:
        return weight_devices[0]
    brought = (*_offloaded(chunks), *weight_devices)
    return next((device for device in brought if device.type not in _NOWHERE), _HOST)


def why_no_marks(models: Iterable[torch.nn.Module]) -> str:
    """Why operators cannot be timed where this model computes, in words; empty where they can."""
    chunks = tuple(models)
    device = computing_device(chunks)
    if device.type not in ("cpu", "cuda"):
        return (
            f"on {device.type} there are no events that are read without waiting: operators not "
            "recorded, other times are those of the host"
        )
    weight_device_type = next((weight.device.type for weight in weights(chunks)), device.type)
    if weight_device_type != device.type:
        return f"parameters lie on the {weight_device_type}, {device.type} computes: operators not recorded"
    return ""


def name_of(device: torch.device) -> str:
    """Name of an accelerator, by its own word where torch has none; or ``cpu``."""
    if device.type == "cpu":
        return "cpu"
    ask = getattr(_module(device), "get_device_name", None)
    try:
        return str(ask(device)) if ask is not None else device.type
    except (RuntimeError, AssertionError):  # a torch that was built without it
        return device.type


def peak_nbytes(device: torch.device) -> int:
    """Peak of an accelerator's allocator; 0 where it does not tell."""
    ask = getattr(_module(device), "max_memory_allocated", None)
    return int(ask()) if ask is not None else 0


def memory_nbytes(device: torch.device) -> int:
    """Memory that an accelerator has; 0 where it does not tell."""
    module = _module(device)
    ask = getattr(module, "get_device_properties", None)
    properties = ask(module.current_device()) if ask is not None else None
    return int(getattr(properties, "total_memory", 0))


def stopwatch_on(device: torch.device) -> Stopwatch:
    """What takes marks there."""
    if device.type != "cuda":
        return HostStopwatch()
    number = torch.cuda.current_device()
    # Half the time of ``torch.cuda.current_stream``, which makes an object for each call.
    stream_key = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return DeviceStopwatch(
        lambda: torch.cuda.Event(enable_timing=True),
        stream_key=(
            (lambda: stream_key(number))
            if stream_key
            else (lambda: torch.cuda.current_stream().cuda_stream)
        ),
        current_stream=torch.cuda.current_stream,
        is_capturing=torch.cuda.is_current_stream_capturing,
    )


def _module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.xpu``, or what an extension has put beside them."""
    return getattr(torch, device.type, None)


def _offloaded(models: Iterable[torch.nn.Module]) -> Iterator[torch.device]:
    """Where FSDP1 and FSDP2 compute with parameters that they keep on the host."""
    for module in tree(*models):
        names = class_names(module)
        if "FullyShardedDataParallel" in names:
            policy = attribute(module, "cpu_offload")
            if attribute(policy, "offload_params") is True:
                yield torch.device(attribute(module, "compute_device", _HOST))
        elif "FSDPModule" in names:
            for group in _groups(module):
                if "CPUOffloadPolicy" in class_names(attribute(group, "offload_policy")):
                    yield torch.device(attribute(group, "device", _HOST))


def _groups(module: Any) -> tuple[Any, ...]:
    find = attribute(module, "_get_fsdp_state")
    state = find(module) if find is not None else None
    several = getattr(state, "_fsdp_param_groups", None)
    groups = several if several is not None else [getattr(state, "_fsdp_param_group", None)]
    return tuple(group for group in groups if group is not None)
