"""The parts of ``torch.cuda`` that Megatron uses, emulated on a CPU."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


def returning(value: Any) -> Callable[..., Any]:
    """Return a new function that returns ``value``: Dynamo rejects one object under two torch
    names."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


class Stream:
    """CUDA stream of a CPU, where work is done when the call returns: there is nothing to wait
    for."""

    device = CPU
    cuda_stream = 0
    wait_stream = wait_event = synchronize = __exit__ = returning(None)
    query = returning(True)
    is_capturing = returning(False)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self


class Event:
    """CUDA event with the host's clock; it has happened as soon as it is recorded."""

    wait = synchronize = returning(None)
    query = returning(True)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded_ns = 0

    def record(self, stream: Any = None) -> None:
        """Store the host time."""
        self.recorded_ns = time.perf_counter_ns()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        return (end.recorded_ns - self.recorded_ns) / 1e6


class _Generators:
    """``torch.cuda.default_generators``: the CPU's, whatever the index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _nothing(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Return a reusable context, since Megatron enters a stream for each reduction."""
    return nullcontext()


def accelerator_names() -> dict[str, Any]:
    """Return replacements for ``torch.accelerator``, whose attributes query the driver in a CUDA
    build."""
    return {
        "is_available": returning(False),
        "current_device_index": returning(0),
        "current_stream": returning(Stream()),
        "synchronize": returning(None),
    }


_CONSTANT = {
    **dict.fromkeys(
        ("set_device", "synchronize", "set_stream", "empty_cache", "reset_peak_memory_stats")
    ),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0
    ),
    "is_available": True,
    "is_initialized": True,
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "current_device": CPU,
}  # fmt: skip
"""Functions of ``torch.cuda`` by the value that they always return."""
_TENSORS = ("FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor")


def cuda_names() -> dict[str, Any]:
    """Return replacements for the attributes of ``torch.cuda``."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="CPU stand-in", major=9, minor=0, total_memory=total, multi_processor_count=1
    )
    answers = _CONSTANT | {
        "device_count": max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "mem_get_info": (total, total),
    }
    answers |= dict.fromkeys(("current_stream", "default_stream"), Stream())
    return {
        **{name: returning(value) for name, value in answers.items()},
        **{kind: getattr(torch, kind) for kind in _TENSORS},
        "memory_stats": lambda *_, **__: defaultdict(int),
        "default_generators": _Generators(),
        "get_rng_state": lambda *_, **__: torch.default_generator.get_state(),
        "set_rng_state": lambda state, *_, **__: torch.default_generator.set_state(state),
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "set_rng_state_all": lambda states: torch.default_generator.set_state(states[0]),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
        "initial_seed": lambda: torch.default_generator.initial_seed(),
        "Stream": Stream,
        "Event": Event,
        "stream": _nothing,
        "device": _nothing,
    }
