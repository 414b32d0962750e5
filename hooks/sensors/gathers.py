"""What FSDP2 does before a module that it shards is no part of that module's operator.

Its hook gathers the parameters inside the call of the module.  A span begins again where they are
there, with the arguments that the module then gets.
"""

from __future__ import annotations

import sys
from typing import Any

from ..process.guard import Guard
from ..process.stand_in import stand_in
from .recorder import Recorder

_HOMES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
"""Of torch 2.6 and later, and before."""
_CLASS, _NAME = "FSDPParamGroup", "pre_forward"
SHARDED = "FSDPModule"
"""A class of every module that FSDP2 shards."""


class Gathers:
    """A stand-in for what a group of sharded parameters does before a forward pass."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._begin_again = guard.protect(self._again)
        self._spans: dict[int, int] = {}
        self._given: dict[int, tuple[Any, Any]] = {}
        self._saved: tuple[type, Any, Any] | None = None

    def install(self) -> None:
        """Put it in, where FSDP2 is imported."""
        home = next((m for m in map(sys.modules.get, _HOMES) if m is not None), None)
        owner = vars(home).get(_CLASS) if home is not None else None
        if owner is None or self._saved is not None or _NAME not in vars(owner):
            return
        original = vars(owner)[_NAME]
        self._saved = owner, original, self._wrap(original)
        setattr(owner, _NAME, self._saved[2])

    def remove(self) -> None:
        """Put the original back."""
        saved, self._saved = self._saved, None
        if saved is not None and vars(saved[0]).get(_NAME) is saved[2]:
            setattr(saved[0], _NAME, saved[1])
        self._spans.clear()
        self._given.clear()

    def begin(self, module: Any, span: int) -> None:
        """A span of a sharded module has begun, before its parameters are there."""
        self._spans[id(module)] = span

    def end(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Its call has returned: what the module itself was given, by what the call was."""
        self._spans.pop(id(module), None)
        return self._given.pop(id(module), (args, kwargs))

    def _wrap(self, original: Any) -> Any:
        def pre_forward(group: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            given = original(group, module, *args, **kwargs)
            self._begin_again(module, given)
            return given

        return stand_in(original, pre_forward)

    def _again(self, module: Any, given: Any) -> None:
        span = self._spans.get(id(module))
        if span is None:
            return
        if type(given) is tuple and len(given) == 2:
            self._given[id(module)] = given
        self._recorder.begin_again(span)
