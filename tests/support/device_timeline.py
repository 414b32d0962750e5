"""Stand-in for a GPU in virtual time, as asynchronous as a real one, and the truth it charged.

Streams overlap, the host is ahead of them, events happen late and are read in single precision,
the backward pass runs in a thread of its own, and a capture forbids what CUDA forbids.  Nothing
computes faster or slower for it: the time is virtual, and the same in every run.

``installed()`` puts it over the CPU stand-in for the duration of a context.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_backward import Engine
from device_calls import Calls
from device_charges import Charges
from device_clock import AttributePatches, Clock
from device_streams import (
    Device,
    Event,
    Graph,
    Stream,
    StreamContext,
    capturing,
    graph,
    install_device,
    uninstall_device,
)
from device_truth import OUTSIDE, Truth

__all__ = ["Event", "Stream", "Timeline", "capturing", "installed", "timeline"]

FREE_NBYTES = "FORERUN_TEST_FREE_NBYTES"
"""Environment variable: free bytes that ``mem_get_info`` reports."""


class Timeline:
    """Device of one process: its clock, its truth, and its replacements in torch."""

    def __init__(self) -> None:
        self.truth = Truth()
        self.clock = Clock(self.truth)
        self.device = Device(self.clock)
        self.calls = Calls(self.clock)
        self.charges = Charges(self.clock, self.device, self.calls)
        self.transfers: Any = None
        text = os.environ.get(FREE_NBYTES)
        self.free_nbytes = int(text) if text else None
        self._places = AttributePatches()
        self._engine = Engine(torch.autograd.Variable._execution_engine, self.device, self.calls)
        self._begun: dict[str, Any] | None = None

    def install(self) -> None:
        """Install all replacements; ``remove`` undoes them."""
        install_device(self.device)
        self._put_names()
        self._patch_host_copies()
        self.calls.install(self._places)
        self._engine.install(self._places)
        if torch.distributed.is_available():
            from device_transfers import Transfers

            self.transfers = Transfers(self.clock, self.device, self.calls)
            self.transfers.install(self._places)
        self.charges.__enter__()

    def remove(self) -> None:
        """Restore torch."""
        self.charges.__exit__(None, None, None)
        self._engine.stop()
        self._places.restore()
        uninstall_device()

    def _put_names(self) -> None:
        device, put = self.device, self._places.put
        names = {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": graph,
            "stream": StreamContext,
            "current_stream": lambda *_, **__: device.current,
            "default_stream": lambda *_, **__: device.default,
            "set_stream": functools.partial(setattr, device, "current"),
            "is_current_stream_capturing": device.is_capturing,
            "synchronize": self._synchronize,
            "mem_get_info": functools.partial(self._memory, torch.cuda.mem_get_info),
        }
        for name, value in names.items():
            put(torch.cuda, name, value)
        put(torch._C, "_cuda_getCurrentRawStream", lambda *_: device.current.cuda_stream)
        if hasattr(torch, "accelerator"):  # torch 2.6 and later
            put(torch.accelerator, "current_stream", lambda *_: device.current)
            put(torch.accelerator, "synchronize", self._synchronize)

    def _memory(self, query: Callable[..., tuple[int, int]], *args: Any) -> tuple[int, int]:
        free, total = query(*args)
        return (free if self.free_nbytes is None else self.free_nbytes, total)

    def _synchronize(self, *_: Any, **__: Any) -> None:
        self.device.forbid("synchronize", is_of_thread=False)
        self.clock.synchronize()

    def _patch_host_copies(self) -> None:
        """Make copies to the host wait for the stream; on the CPU torch dispatches none."""
        for name in ("cpu", "tolist", "numpy"):
            original = getattr(torch.Tensor, name)

            def synchronized(tensor: Any, *args: Any, _f: Any = original, **kwargs: Any) -> Any:
                self.clock.synchronize(self.device.line)
                return _f(tensor, *args, **kwargs)

            self._places.put(torch.Tensor, name, functools.wraps(original)(synchronized))

    def name(self, models: Iterable[torch.nn.Module]) -> None:
        """Register the trained models."""
        self.calls.name(models)

    def begin_step(self, number: int) -> None:
        """Begin a step, independently of Forerun."""
        self.end_step()
        self.truth.step = number
        self.calls.begin_step()
        if self.transfers is not None:
            self.transfers.begin_step()
        self._begun = {
            "stream": self.device.line.number,
            "begin_s": self.clock.ready_s(self.device.line),
            "counts": dict(self.clock.counts),
        }

    def end_step(self) -> None:
        """End the step; later work belongs to none until the next begins."""
        if self._begun is None:
            return
        before = self._begun.pop("counts")
        counts = {name: count - before[name] for name, count in self.clock.counts.items()}
        end_s = self.clock.ready_s(self.device.line)
        self.truth.add("steps", **self._begun, end_s=end_s, **counts)
        self.truth.step = OUTSIDE
        self._begun = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enclose one step."""
        self.begin_step(number)
        try:
            yield
        finally:
            self.end_step()


_state: list[Timeline] = []


def timeline() -> Timeline | None:
    """Return the timeline that is installed in this process, or None."""
    return _state[-1] if _state else None


@contextmanager
def installed() -> Iterator[Timeline]:
    """Install a device for the duration of the context."""
    one = Timeline()
    one.install()
    _state.append(one)
    try:
        yield one
    finally:
        _state.remove(one)
        one.remove()
