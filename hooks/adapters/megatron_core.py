"""Adapter for loops on ``megatron.core``, whose schedules and optimizer mark the steps.

It stands down if Megatron-LM's own training loop is the host.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ...calib.records.record_kinds import OPTIMIZER
from ..process.host import Host, Reference, live_objects, reference, references
from ..process.post_import import when_imported
from ..process.stand_ins import stand_in
from ..sensors.optimizer_steps import OptimizerSteps
from ..session.session import EVAL, SAVE, Session
from ._megatron_model import chunks_of, place, run_config, timer_holders
from ._patches import Patches, wrapped

_PACKAGE = "megatron.core.pipeline_parallel"
_GETTER = "get_forward_backward_func"
_STEP = "step"


def wait_for(session: Session) -> None:
    """Attach when the schedules are imported."""
    adapter = CoreLoop(session)
    when_imported(f"{_PACKAGE}.schedules", adapter.attach_schedules)
    when_imported("megatron.core.dist_checkpointing", adapter.attach_saving)


class CoreLoop:
    """Steps of a loop that calls ``get_forward_backward_func()(...)`` and ``optimizer.step()``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._patches = Patches(session)
        self._depth = 0
        self._call: dict[str, Any] = {}
        self._models: tuple[Reference, ...] = ()
        self._optimizers: tuple[Reference, ...] = ()
        self._has_optimizer_patches = False
        self._world: Reference = reference(None)
        protect = session.guard.protect
        self._standing_for = protect(functools.cache(self._wrap))
        self._before_training = protect(self._begin_training)
        self._before_step = protect(self._begin_optimizer)
        self._after_step = protect(self._end_optimizer)

    @property
    def is_standing_down(self) -> bool:
        """True if the running loop has an adapter of its own, such as Megatron-LM's."""
        return "megatron.training.training" in sys.modules or self._session.is_claimed

    def attach_schedules(self, schedules: ModuleType) -> None:
        """Wrap the result of ``get_forward_backward_func``, in all namespaces that have it."""
        original: Any = getattr(schedules, _GETTER, None)
        lost = "steps of a loop on megatron.core are not seen"
        if not self._patches.note(schedules, _GETTER, original is not None, lost):
            return

        def getter(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)
            return self._standing_for(schedule) or schedule

        self._patches.put(schedules, _GETTER, stand_in(original, getter))

    def attach_saving(self, module: ModuleType) -> None:
        """Bracket checkpoints."""
        if not self.is_standing_down:
            self._patches.bracket(module, "save", SAVE, lost="saves count as time between steps")

    def _wrap(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if self.is_standing_down:
                return schedule(*args, **kwargs)
            if not kwargs.get("forward_only", False):
                self._before_training(kwargs)
                try:
                    return schedule(*args, **kwargs)
                except BaseException:
                    self._session.abandon()  # whoever catches this goes on without our hooks
                    raise
            self._session.begin_bracket(EVAL)
            try:
                return schedule(*args, **kwargs)
            finally:
                self._session.end_bracket(EVAL)

        return stand_in(schedule, forward_backward)

    def _begin_training(self, call: dict[str, Any]) -> None:
        world = dist.group.WORLD if dist.is_available() else None
        is_new = self._models and self._models[0]() is not chunks_of(call["model"])[0]
        if is_new or (self._models and self._world() is not world):
            self._forget()
        if self._session.is_in_step:
            return
        if not self._has_optimizer_patches:
            self._has_optimizer_patches = True
            self._attach_optimizers()
        if not self._models:
            self._world = reference(world)
            self._call = {name: value for name, value in call.items() if isinstance(value, int)}
            self._models = references(chunks_of(call["model"]))
            self._describe()
        self._session.begin_step()

    def _forget(self) -> None:
        """Restart the session: another loop trains other objects in this process."""
        self._session.restart()
        self._models, self._optimizers, self._depth = (), (), 0

    def _describe(self) -> None:
        hint = self._session.settings.cadence
        known, call = self._models, self._call
        models, optimizers = live_objects(known), live_objects(self._optimizers)
        self._session.describe(
            Host(
                models=models,
                optimizers=optimizers,
                timer_holders=timer_holders(models, optimizers),
                unseen=self._patches.unseen,
                run_config=lambda: run_config(live_objects(known), call, hint),
                **(self._session.guard.protect(place)() or {}),
            )
        )

    def _attach_optimizers(self) -> None:
        """Wrap ``step`` of all optimizer classes that exist by the first step."""
        from megatron.core.optimizer import MegatronOptimizer

        for cls in (MegatronOptimizer, *_subclasses(MegatronOptimizer)):
            step = vars(cls).get(_STEP)
            if callable(step) and not getattr(step, "__isabstractmethod__", False):
                self._patches.put(cls, _STEP, wrapped(step, self._before_step, self._after_step))
        # A loop may drive torch's optimizer itself; inside Megatron's these are nested and ignored.
        OptimizerSteps(self._before_step, self._after_step)

    def _begin_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._session.begin_phase(OPTIMIZER)

    def _end_optimizer(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self._depth -= 1
        if self._depth or not self._session.is_in_step:
            return
        self._session.end_phase(OPTIMIZER)
        self._session.end_step()
        if not self._optimizers and not self.is_standing_down:
            self._optimizers = references((optimizer,))
            self._describe()


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
