"""Begin and end of each step of a torch optimizer, without a hook in or for optimizers.

torch's hooks for all optimizers are read, and guarded, by code that compiles a step.  Two functions
that ``Optimizer.step`` calls around each step are not: the label that it puts on a profile, and the
empty function at its end that profilers look for.  Both have stand-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..process.guard import Guard
from ..process.inspection import local_variable
from ..process.stand_ins import StandIns, eager

Note = Callable[[Any], object]
_Label: Any = torch.autograd.profiler.record_function
_Optimizer: Any = Optimizer
_LABEL, _END = "__enter__", "_optimizer_step_code"
_STEP = _Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Code of torch's own that labels a step: a label of the user's may begin likewise."""


class OptimizerSteps:
    """Calls ``before`` and ``after`` with each optimizer that steps, until ``remove``.

    Both must be protected.  A step that is compiled as a whole calls neither.
    """

    def __init__(self, before: Note, after: Note) -> None:
        self.before, self.after = before, after
        self._handles: list[Any] = []
        if _END in vars(_Optimizer) and _LABEL in vars(_Label):
            _WATCHING.append(self)
            _STAND_INS.put(_Label, _LABEL, _labelling)
            _STAND_INS.put(_Optimizer, _END, _ending)
        else:
            self._handles = [
                register_optimizer_step_pre_hook(eager(before)),
                register_optimizer_step_post_hook(eager(after)),
            ]

    def remove(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()
        if self in _WATCHING:
            _WATCHING.remove(self)
        if not _WATCHING:
            _STAND_INS.remove()


def _labelling(original: Any) -> Any:
    def enter(label: Any) -> Any:
        result = original(label)
        if _WATCHING and (frame := sys._getframe(1)).f_code is _STEP:
            optimizer = _variable(frame, "self")
            for watching in tuple(_WATCHING):
                watching.before(optimizer)
        return result

    return enter


def _ending(original: Any) -> Any:
    def step_code(optimizer: Any) -> Any:
        result = original(optimizer)
        for watching in tuple(_WATCHING):
            watching.after(optimizer)
        return result

    return step_code


_variable = Guard().protect(local_variable)
_WATCHING: list[OptimizerSteps] = []
_STAND_INS = StandIns()
