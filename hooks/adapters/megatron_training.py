"""Adapter for Megatron-LM's own training loop, through module attributes looked up at each call.

``ft_integration.on_training_step_start`` and ``_end`` bracket ``train_step`` in every release since
core 0.11; there is no callback interface.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...calib.workload.config import RunConfig
from ..process.host import Host, Reference, live_objects, references
from ..process.inspection import attribute, tree
from ..process.post_import import when_imported
from ..process.stand_ins import stand_in
from ..session.session import EVAL, SAVE, Session
from ._megatron_model import (
    chunks_of,
    place,
    timer_holders,
    with_device,
    with_layers,
    with_running_batch,
)
from ._patches import Patches

_TRAIN, _STEP, _SAVE = "train", "train_step", "save_checkpoint_and_time"
_STEP_START, _STEP_END = "on_training_step_start", "on_training_step_end"
_GETTER = "get_forward_backward_func"
_GLOBALS = "megatron.training.global_vars"
_TIMERS = "_GLOBAL_TIMERS"
_LOSSY = (
    "without --save a stop would lose what has been trained; give --save DIR; "
    "until then advice is logged, and the run goes on"
)


def wait_for(session: Session) -> None:
    """Attach when Megatron's modules are imported."""
    adapter = TrainingLoop(session)
    when_imported("megatron.training.ft_integration", adapter.attach_lifecycle)
    when_imported("megatron.training.one_logger_utils", adapter.attach_end)
    when_imported("megatron.training.training", adapter.attach_training)


def request_stop() -> bool:
    """Ask Megatron to save a checkpoint and exit with 0 after the running step; True if requested.

    It must be called on all ranks in the same step, before its ``on_training_step_end`` returns:
    Megatron reads ``exit_interval`` anew after every step and does not compare it between ranks.
    It then saves (with ``--save``), finishes asynchronous saves, waits for all ranks and exits.
    """
    args = _arguments()
    step = getattr(args, "curr_iteration", None)
    if step is None:
        return False
    args.exit_interval = step + 1
    return True


class TrainingLoop:
    """Steps, evaluation, saves and the end of ``megatron.training.pretrain``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._num_passes = 0
        self._patches = Patches(session)
        self._has_steps = False
        self._has_trained = False
        protect = session.guard.protect
        self._standing_for = protect(functools.cache(self._count_passes))
        self._before_train = protect(self._begin_training)
        self._before_step = protect(self._begin_step)
        self._after_step = protect(self._end_step)
        self._at_end = protect(lambda *_, **__: session.finish())

    def attach_lifecycle(self, module: ModuleType) -> None:
        """Wrap the step boundaries and the last call of a run that ends early."""
        names = (_STEP_START, _STEP_END)
        self._has_steps = all(
            self._patches.note(module, name, hasattr(module, name), "train_step marks the steps")
            for name in names
        )
        if self._has_steps:
            self._patches.around(module, _STEP_START, after=self._before_step)
            self._patches.around(module, _STEP_END, before=self._after_step)
        self._around_end(module, "shutdown")

    def attach_end(self, module: ModuleType) -> None:
        """Wrap the last call of a run that completes."""
        self._around_end(module, "finish")

    def attach_training(self, module: ModuleType) -> None:
        """Wrap ``train``, the schedule getter (to count passes per step), evaluation and saves."""
        for name, wrap, lost in (
            (_TRAIN, self._wrap_train, "no operators, phases or description are recorded"),
            (_GETTER, self._wrap_getter, "steps that Megatron ran twice are not recognized"),
        ):
            original: Any = getattr(module, name, None)
            if self._patches.note(module, name, original is not None, lost):
                self._patches.put(module, name, wrap(original))
        for name, label in (("evaluate_and_print_results", EVAL), (_SAVE, SAVE)):
            lost = f"the time of {label} counts as time between steps"
            self._patches.bracket(module, name, label, lost=lost)
        if not self._has_steps:
            lost = "no steps are detected, and nothing is recorded"
            marks = {"before": self._before_step, "after": self._after_step}
            self._patches.around(module, _STEP, **marks, lost=lost)

    def _around_end(self, module: ModuleType, name: str) -> None:
        lost = "the records are finished at the process's exit"
        self._patches.around(module, name, after=self._at_end, lost=lost)

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def train(*args: Any, **kwargs: Any) -> Any:
            self._before_train(signature, args, kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._session.abandon()  # an in-process restart creates new objects
                raise

        return stand_in(original, train)

    def _wrap_getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def getter(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)
            return self._standing_for(schedule) or schedule

        return stand_in(original, getter)

    def _count_passes(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            self._num_passes += not kwargs.get("forward_only", False)
            return schedule(*args, **kwargs)

        return stand_in(schedule, forward_backward)

    def _begin_training(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._has_trained:
            self._session.restart()
        self._has_trained = True
        self._session.claim(self)
        self._describe(signature, args, kwargs)

    def _describe(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = signature.bind(*args, **kwargs).arguments
        models = chunks_of(given["model"])
        optimizers = (given["optimizer"],)
        self._note_dispatchers(models)
        holders = [*timer_holders(models, optimizers)]
        if hasattr(given.get("config"), "timers"):
            holders.append((given["config"], "timers"))
        module = sys.modules.get(_GLOBALS)
        if module is not None:
            holders.append((module, _TIMERS))
        self._session.describe(
            Host(
                models=models,
                optimizers=optimizers,
                timer_holders=tuple(holders),
                unseen=self._patches.unseen,
                run_config=functools.partial(_run_config, references(models)),
                stop=request_stop if _saves() else None,
                stop_is_lossy="" if _saves() else _LOSSY,
                **(self._session.guard.protect(place)() or {}),
            )
        )

    def _note_dispatchers(self, models: tuple[Any, ...]) -> None:
        from ..sensors.sites import dispatch_methods

        dispatchers = (attribute(module, "token_dispatcher") for module in tree(*models))
        known = {type(dispatcher): dispatcher for dispatcher in dispatchers if dispatcher}
        lost = "the copies of rows to and from experts are not timed"
        for kind, dispatcher in known.items():
            for name in dispatch_methods(dispatcher):
                self._patches.note(kind, name, hasattr(kind, name), lost)

    def _begin_step(self, *_: Any, **__: Any) -> None:
        self._num_passes = 0
        step = getattr(_arguments(), "curr_iteration", None)
        self._session.begin_step(step)

    def _end_step(self, *_: Any, **__: Any) -> None:
        self._session.end_step(is_rerun=self._num_passes > 1)


def _arguments() -> Any:
    return importlib.import_module(_GLOBALS).get_args()


def _saves() -> bool:
    return bool(getattr(_arguments(), "save", None))


def _run_config(models: tuple[Reference, ...]) -> RunConfig:
    import megatron.core

    from ...calib.arguments.megatron_namespace import from_namespace
    from ..session.instruments import device_name

    version = f"Megatron-LM {megatron.core.__version__}"
    built = live_objects(models)
    config = with_device(from_namespace(_arguments()), device_name(built), version)
    return with_running_batch(with_layers(config, built))
