"""Forward and backward passes of a model that no framework brackets: phases of hooked steps.

A forward pass is the outermost call of a module of the chain; a backward pass is a call of
``torch.autograd.backward``, which ``Tensor.backward`` looks up.  Both are replaced or hooked in
hooked steps alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..process.guard import Guard
from ..process.host import living, references
from .recorder import BACKWARD, FORWARD, Recorder
from .regions import is_being_compiled


class PassHooks:
    """Marks of passes between ``install`` and ``remove``."""

    def __init__(
        self, modules: Iterable[torch.nn.Module], recorder: Recorder, guard: Guard
    ) -> None:
        self._modules = references(modules)
        self._begin = guard.protect(recorder.begin_phase)
        self._end = guard.protect(recorder.end_phase)
        self._handles: list[Any] = []
        self._depth = {FORWARD: 0, BACKWARD: 0}
        self._saved: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None

    def install(self) -> None:
        """Hook the modules and stand before the backward pass."""
        if self._handles or not self._modules:
            return
        for module in living(self._modules):
            # Before the hooks that gather sharded parameters: they are part of the pass.
            self._handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_forward_hook(self._after_forward, always_call=True),
            ]
        self._saved = torch.autograd.backward
        self._replacement = self._wrap(self._saved)
        torch.autograd.backward = self._replacement

    def remove(self) -> None:
        """Take all of it away, unless another has stood before the backward pass meanwhile."""
        while self._handles:
            self._handles.pop().remove()
        self._depth = {FORWARD: 0, BACKWARD: 0}
        if self._saved is not None and torch.autograd.backward is self._replacement:
            torch.autograd.backward = self._saved
        self._saved = None

    def _enter(self, name: str) -> None:
        # Modules of the chain call each other, and a checkpointed layer runs a backward pass of
        # its own inside the one of the step.
        self._depth[name] += 1
        if self._depth[name] == 1:
            self._begin(name)

    def _leave(self, name: str) -> None:
        self._depth[name] -= 1
        if self._depth[name] == 0:
            self._end(name)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if not is_being_compiled() and torch.is_grad_enabled():
            self._enter(FORWARD)

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not is_being_compiled() and torch.is_grad_enabled():
            self._leave(FORWARD)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self._enter(BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave(BACKWARD)

        return backward
