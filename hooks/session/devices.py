"""The device on which a model computes, not always that of its parameters, and its stopwatch.

Marks are CUDA events, which ROCm has under the same names.  Elsewhere there is only the host's
clock: on a CPU it times operators, on another device only their launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..process.inspection import attribute, class_names, tree, weights
from ..sensors.stopwatch import DeviceStopwatch, HostStopwatch, Stopwatch

_HOST = torch.device("cpu")
_NOWHERE = ("cpu", "meta")


def computing_device(models: Iterable[torch.nn.Module]) -> torch.device:
    """Return the device of the first parameter, or the one to which FSDP moves it from the host.

    ``torch.cuda.is_available`` is not used: it is True under the CPU stand-in.
    """
    chunks = tuple(models)
    weight_devices = [weight.device for weight in weights(chunks)]
    if weight_devices and weight_devices[0].type not in _NOWHERE:
        return weight_devices[0]
    brought = (*_offloaded(chunks), *weight_devices)
    return next((device for device in brought if device.type not in _NOWHERE), _HOST)


def why_no_marks(models: Iterable[torch.nn.Module]) -> str:
    """Return why operators cannot be timed on this model's device; empty if they can."""
    chunks = tuple(models)
    device = computing_device(chunks)
    if device.type not in ("cpu", "cuda"):
        return (
            f"on {device.type} there are no events that are read without waiting: operators not "
            "recorded, other times are those of the host"
        )
    weight_device_type = next((weight.device.type for weight in weights(chunks)), device.type)
    if weight_device_type != device.type:
        return (
            f"parameters lie on the {weight_device_type}, {device.type} computes: "
            "operators not recorded"
        )
    return ""


def name_of(device: torch.device) -> str:
    """Return the name of an accelerator, or its type if torch has no name; or ``cpu``."""
    if device.type == "cpu":
        return "cpu"
    ask = getattr(_module(device), "get_device_name", None)
    try:
        return str(ask(device)) if ask is not None else device.type
    except (RuntimeError, AssertionError):  # torch was built without it
        return device.type


def name_if_started(models: Iterable[torch.nn.Module]) -> str:
    """Return the name of the device that computes; empty if to ask would start its driver, on a GPU
    that the rank may not have chosen yet."""
    device = computing_device(models)
    is_started = getattr(_module(device), "is_initialized", None)
    return name_of(device) if is_started is None or is_started() else ""


def peak_nbytes(device: torch.device) -> int:
    """Return the peak of an accelerator's allocator; 0 if unknown."""
    ask = getattr(_module(device), "max_memory_allocated", None)
    return int(ask()) if ask is not None else 0


def memory_nbytes(device: torch.device) -> int:
    """Return an accelerator's total memory; 0 if unknown."""
    module = _module(device)
    ask = getattr(module, "get_device_properties", None)
    properties = ask(module.current_device()) if ask is not None else None
    return int(getattr(properties, "total_memory", 0))


def stopwatch_on(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    if device.type != "cuda":
        return HostStopwatch()
    number = torch.cuda.current_device()
    # Twice as fast as ``torch.cuda.current_stream``, which creates an object per call.
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
    """Return ``torch.cuda``, ``torch.xpu``, or an extension's module of the same kind."""
    return getattr(torch, device.type, None)


def _offloaded(models: Iterable[torch.nn.Module]) -> Iterator[torch.device]:
    """Yield the compute devices of FSDP1 and FSDP2 for parameters offloaded to the host."""
    for module in tree(*models):
        names = class_names(module)
        if "FullyShardedDataParallel" in names:
            policy = attribute(module, "cpu_offload")
            if attribute(policy, "offload_params") is True:
                yield torch.device(attribute(module, "compute_device", _HOST))
        elif "FSDPModule" in names:
            for group in sharded_groups(module):
                if "CPUOffloadPolicy" in class_names(attribute(group, "offload_policy")):
                    yield torch.device(attribute(group, "device", _HOST))


def sharded_groups(module: Any) -> tuple[Any, ...]:
    """Return FSDP2's groups of the parameters that it gathers with a module."""
    find = attribute(module, "_get_fsdp_state")
    state = find(module) if find is not None else None
    several = getattr(state, "_fsdp_param_groups", None)
    groups = several if several is not None else [getattr(state, "_fsdp_param_group", None)]
    return tuple(group for group in groups if group is not None)
