"""What FSDP2 does around a module that it shards is no part of any operator.

Its hook gathers the parameters inside the call of the module.  A span begins again where they are
there, with the arguments that the module then gets.  In the backward pass it gathers and reduces
between the nodes of the graph, while the operator before is still open: that is a pause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..process.guard import Guard
from ..process.stand_in import stand_in
from .recorder import Recorder

_HOMES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
"""Of torch 2.6 and later, and before."""
_CLASS, _BEFORE = "FSDPParamGroup", "pre_forward"
_BETWEEN = ("pre_backward", "post_backward")
SHARDED = "FSDPModule"
"""A class of every module that FSDP2 shards."""


class Gathers:
    """Stand-ins for what a group of sharded parameters does before and between operators."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self._recorder = recorder
        self._begin_again = guard.protect(self._again)
        self._pause = guard.protect(recorder.begin_pause)
        self._go_on = guard.protect(recorder.end_pause)
        self._spans: dict[int, int] = {}
        self._given: dict[int, tuple[Any, Any]] = {}
        self._saved: list[tuple[type, str, Any, Any]] = []

    def install(self) -> None:
        """Put them in, where FSDP2 is imported."""
        home = next((m for m in map(sys.modules.get, _HOMES) if m is not None), None)
        owner = vars(home).get(_CLASS) if home is not None else None
        if owner is None or self._saved:
            return
        self._put(owner, _BEFORE, self._beginning)
        for name in _BETWEEN:
            self._put(owner, name, self._pausing)

    def _put(self, owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
        original = vars(owner).get(name)
        if original is not None:
            ours = wrap(original)
            self._saved.append((owner, name, original, ours))
            setattr(owner, name, ours)

    def remove(self) -> None:
        """Put the originals back; what another has put there meanwhile stays his."""
        while self._saved:
            owner, name, original, ours = self._saved.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._spans.clear()
        self._given.clear()

    def begin(self, module: Any, span: int) -> None:
        """A span of a sharded module has begun, before its parameters are there."""
        self._spans[id(module)] = span

    def end(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Its call has returned: what the module itself was given, by what the call was."""
        self._spans.pop(id(module), None)
        return self._given.pop(id(module), (args, kwargs))

    def _beginning(self, original: Any) -> Any:
        def pre_forward(group: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
            given = original(group, module, *args, **kwargs)
            self._begin_again(module, given)
            return given

        return stand_in(original, pre_forward)

    def _pausing(self, original: Any) -> Any:
        def between(group: Any, *args: Any, **kwargs: Any) -> Any:
            is_paused = self._pause()
            try:
                return original(group, *args, **kwargs)
            finally:
                if is_paused:
                    self._go_on()

        return stand_in(original, between)

    def _again(self, module: Any, given: Any) -> None:
        span = self._spans.get(id(module))
        if span is None:
            return
        if type(given) is tuple and len(given) == 2:
            self._given[id(module)] = given
        self._recorder.begin_again(span)
