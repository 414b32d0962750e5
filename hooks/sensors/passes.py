"""Forward and backward passes of a model that no framework brackets: phases of hooked steps.

A forward pass is the outermost call of a module of the chain.  A backward pass is a run of the
engine that accumulates gradients: ``torch.autograd.backward`` and ``Tensor.backward`` look up a
private function for it, which has a stand-in during hooked steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...calib.records.record_kinds import BACKWARD, FORWARD
from ..process.guard import Guard
from ..process.host import live_objects, references
from ..process.stand_ins import StandIns
from .module_calls import CALLS, entries_of
from .recorder import Recorder

_ENGINE = "_engine_run_backward"
_COMPILED = "torch._dynamo.compiled_autograd"
_WithoutModes = torch._C.DisableTorchFunction


class PassHooks:
    """Marks of passes between ``install`` and ``remove``.

    ``drop_marks`` is called before a backward pass that will be compiled, which reads all hooks of
    the graph.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        recorder: Recorder,
        guard: Guard,
        *,
        drop_marks: Callable[[], object] = lambda: None,
    ) -> None:
        self._modules = references(modules)
        self._guard = guard
        self._begin = guard.protect(recorder.begin_phase)
        self._end = guard.protect(recorder.end_phase)
        self._drop_marks = guard.protect(drop_marks)
        self.enter, self.leave = guard.protect(self._enter), guard.protect(self._leave)
        self._depth = {FORWARD: 0, BACKWARD: 0}
        self._stand_ins = StandIns()

    def install(self) -> None:
        """Watch the modules and wrap the engine's function."""
        watch = ForwardPass(self)
        modules = ((module, watch) for module in live_objects(self._modules))
        CALLS.watch(self, entries_of(modules, self._guard))
        self._stand_ins.put(torch.autograd, _ENGINE, self._wrap)

    def remove(self) -> None:
        """Remove all hooks, except an engine wrapper that someone else has wrapped meanwhile."""
        CALLS.unwatch(self)
        self._depth = {FORWARD: 0, BACKWARD: 0}
        self._stand_ins.remove()

    def _enter(self, name: str) -> None:
        """Begin a pass, or a nested one.

        Modules of the chain call each other, and a checkpointed layer runs a backward pass of its
        own inside the one of the step.
        """
        self._depth[name] += 1
        if self._depth[name] == 1:
            self._begin(name)

    def _leave(self, name: str) -> None:
        """End a pass, or a nested one."""
        self._depth[name] -= 1
        if self._depth[name] == 0:
            self._end(name)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_phase = bool(self._modules)

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if getattr(sys.modules.get(_COMPILED), "compiled_autograd_enabled", False):
                self._drop_marks()
            if not (is_phase and kwargs.get("accumulate_grad", False)):
                return original(*args, **kwargs)
            self.enter(BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                self.leave(BACKWARD)

        return run_backward


class ForwardPass:
    """Calls of the modules of a chain while gradients are enabled."""

    __slots__ = ("_passes",)

    def __init__(self, passes: PassHooks) -> None:
        self._passes = passes

    def begin(self, module: Any) -> bool | None:
        """Return True if the call is (part of) a pass, else None."""
        with _WithoutModes():
            is_pass = torch.is_grad_enabled()
        if is_pass:
            self._passes.enter(FORWARD)
        return is_pass or None

    def end(self, begun: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """End the call."""
        self._passes.leave(FORWARD)

    def fail(self, begun: Any) -> None:
        """End a call that raised."""
        self._passes.leave(FORWARD)
