"""The backward pass in a thread of its own, as it runs for a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_calls import Calls
from device_clock import AttributePatches
from device_streams import Device
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Engine:
    """``Variable._execution_engine`` whose nodes run on one thread, while the caller waits."""

    def __init__(self, engine: Any, device: Device, calls: Calls) -> None:
        self._engine, self._device, self._calls = engine, device, calls
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self.thread = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def install(self, places: AttributePatches) -> None:
        """Replace the engine where torch looks for it."""
        places.put(torch.autograd.Variable, "_execution_engine", self)

    def stop(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._tasks.put(None)
            self._worker.join()
            self._worker = None

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass; one nested in another runs on the same thread."""
        made = self._calls.nodes_of_thread()
        if threading.get_ident() == self.thread:
            with self._calls.backward(made):
                return self._engine.run_backward(*args, **kwargs)
        if self._worker is None:
            self._start()
        context = _Context(self._device)
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def task() -> None:
            try:
                with context.entered(), self._calls.backward(made):
                    done.put((self._engine.run_backward(*args, **kwargs), None))
            except BaseException as err:  # whatever it is, it is the caller's
                done.put((None, err))

        self._tasks.put(task)
        result, err = done.get()
        if err is not None:
            raise err
        return result

    def _start(self) -> None:
        begun = threading.Event()

        def serve() -> None:
            self.thread = threading.get_ident()
            begun.set()
            while (task := self._tasks.get()) is not None:
                task()

        self._worker = threading.Thread(target=serve, name="device-backward", daemon=True)
        self._worker.start()
        begun.wait()


class _Context:
    """State that torch hands to a device's thread, and the caller's stream and modes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream, self._thread = device.current, device.thread
        self._functions = _get_current_function_mode_stack()
        self._dispatches = _get_current_dispatch_mode_stack()
        self._has_gradients = torch.is_grad_enabled()
        self._autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply that state on this thread."""
        self._device.current, self._device.thread = self._stream, self._thread
        for mode in self._functions:
            torch._C._push_on_torch_function_stack(mode)
        for mode in self._dispatches:
            torch._C._push_on_torch_dispatch_stack(mode)
        is_on, dtype = self._autocast
        try:
            with (
                torch.set_grad_enabled(self._has_gradients),
                torch.autocast("cpu", dtype=dtype, enabled=is_on),
            ):
                yield
        finally:
            for _ in self._dispatches:
                torch._C._pop_torch_dispatch_stack(None)
            for _ in self._functions:
                torch._C._pop_torch_function_stack()
