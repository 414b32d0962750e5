"""Attribution of kernels: to modules by their open calls, in backward by autograd's numbers.

Independent of Forerun: ``torch.nn.Module.__call__`` is wrapped, and each call knows between which
sequence numbers of autograd it lay.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_clock import AttributePatches, Clock
from device_truth import OUTSIDE

_ACCUMULATE = 2**63
"""Sequence number of nodes that accumulate gradients: the largest there is."""
_sequence = torch.autograd._get_sequence_nr


class _Thread(threading.local):
    """The calls that are open on one thread, and what was open at each sequence number."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.numbers: list[int] = [0]
        self.calls: list[int] = [OUTSIDE]
        self.depth = 0
        self.base = 0
        self.sought: tuple[list[int], list[int]] = (self.numbers, self.calls)
        self.last = OUTSIDE

    def note(self) -> None:
        """Attribute nodes made from now on to the deepest call."""
        number = _sequence()
        call = self.stack[-1] if self.stack else OUTSIDE
        if self.numbers[-1] == number:
            self.calls[-1] = call
        else:
            self.numbers.append(number)
            self.calls.append(call)


class Calls:
    """The open call of each thread, and the tables ``calls`` and ``modules`` of the truth."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._truth = clock.truth
        self._thread = _Thread()
        self._numbered: dict[Any, tuple[Any, int]] = {}
        self._names: dict[int, str] = {}
        self._roots: set[int] = set()
        self._forward = self._backward = OUTSIDE

    def name(self, models: Iterable[torch.nn.Module]) -> None:
        """Register the trained models: their calls are counted, their modules named."""
        for chunk, model in enumerate(models):
            self._roots.add(id(model))
            for name, module in model.named_modules():
                self._names.setdefault(id(module), f"{chunk}.{name}".rstrip("."))
                self._number(module)

    def begin_step(self) -> None:
        """Reset the counts of passes."""
        self._forward = self._backward = OUTSIDE

    def install(self, places: AttributePatches) -> None:
        """Wrap calls of modules."""
        original = torch.nn.Module.__call__
        number_of = self._number

        @functools.wraps(original)
        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            with self.open(number_of(module), is_root=id(module) in self._roots):
                return original(module, *args, **kwargs)

        places.put(torch.nn.Module, "__call__", called)

    def frame(self, name: str, *, classes: tuple[str, ...] = (), layer: int = 0) -> Any:
        """Open a call that is no module's; without ``classes`` it is attributed to nobody."""
        key = (name, classes, layer)
        if key not in self._numbered:
            self._numbered[key] = (None, self._described(name, list(classes), layer))
        return self.open(self._numbered[key][1])

    def _number(self, module: torch.nn.Module) -> int:
        known = self._numbered.get(id(module))
        if known is None:
            classes = [cls.__name__ for cls in type(module).__mro__[:-2]]
            number = self._described("", classes, int(getattr(module, "layer_number", 0) or 0))
            known = self._numbered[id(module)] = (module, number)
        if id(module) in self._names:
            self._truth.modules[known[1]]["name"] = self._names[id(module)]
        return known[1]

    def _described(self, name: str, classes: list[str], layer: int) -> int:
        self._truth.modules.append({"name": name, "classes": classes, "layer": layer})
        return len(self._truth.modules) - 1

    @contextmanager
    def open(self, module: int, *, is_root: bool = False) -> Iterator[None]:
        """Record one call, from its begin to its end."""
        thread = self._thread
        self._forward += is_root and not thread.stack and not thread.depth
        phase, ordinal = self._pass()
        call = self._truth.add(
            "calls",
            module=module,
            parent=self.current(),
            phase="recompute" if phase == "backward" else phase,
            ordinal=ordinal,
            begin_s=self._clock.host_s,
        )
        thread.stack.append(call)
        thread.note()
        try:
            yield
        finally:
            thread.stack.pop()
            thread.note()

    def _pass(self) -> tuple[str, int]:
        if self._thread.depth:
            return "backward", self._backward
        return "forward", self._forward

    def where(self) -> dict[str, Any]:
        """Return the columns of a kernel that is launched on this thread now."""
        phase, ordinal = self._pass()
        if self._is_recomputing():
            phase = "recompute"
        return {"call": self.current(), "phase": phase, "ordinal": ordinal}

    def _is_recomputing(self) -> bool:
        return self._thread.depth > 0 and len(self._thread.stack) > self._thread.base

    def current(self) -> int:
        """Return the deepest call that is open or whose backward pass runs."""
        thread = self._thread
        if not thread.depth or self._is_recomputing():
            return thread.stack[-1] if thread.stack else OUTSIDE
        node = torch._C._current_autograd_node()
        number = _ACCUMULATE if node is None else node._sequence_nr()
        if number < _ACCUMULATE:
            numbers, calls = thread.sought
            thread.last = calls[bisect_right(numbers, number) - 1]
        return thread.last

    def nodes_of_thread(self) -> tuple[list[int], list[int]]:
        """Return sequence numbers and calls of the nodes that were made on this thread."""
        return self._thread.numbers, self._thread.calls

    @contextmanager
    def backward(self, made: tuple[list[int], list[int]]) -> Iterator[None]:
        """Run the engine on this thread over nodes of the thread that ``made`` is from."""
        thread = self._thread
        before = (thread.depth, thread.base, thread.sought, thread.last)
        self._backward += thread.depth == 0
        thread.depth, thread.base, thread.sought = thread.depth + 1, len(thread.stack), made
        try:
            yield
        finally:
            thread.depth, thread.base, thread.sought, thread.last = before
