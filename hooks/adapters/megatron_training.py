"""Megatron-LM's own training loop, seen at module attributes that it looks up at each call.

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
from ..host import Host
from ..post_import import when_imported
from ..session import EVAL, SAVE, Session
from .megatron_model import chunks_of, place, timer_holders, with_device
from .seams import around, bracket

_TRAIN = "train"
_GETTER = "get_forward_backward_func"
_GLOBALS = "megatron.training.global_vars"
_TIMERS = "_GLOBAL_TIMERS"


def wait_for(session: Session) -> None:
    """Attach when Megatron's modules are imported."""
    adapter = TrainingLoop(session)
    when_imported("megatron.training.ft_integration", adapter.attach_lifecycle)
    when_imported("megatron.training.one_logger_utils", adapter.attach_end)
    when_imported("megatron.training.training", adapter.attach_training)


class TrainingLoop:
    """Steps, evaluation, saves and the end of ``megatron.training.pretrain``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._num_passes = 0
        protect = session.guard.protect
        self._before_train = protect(self._describe)
        self._before_step = protect(self._begin_step)
        self._after_step = protect(self._end_step)

    def attach_lifecycle(self, module: ModuleType) -> None:
        """Step boundaries."""
        around(module, "on_training_step_start", _nothing, self._before_step)
        around(module, "on_training_step_end", self._after_step, _nothing)

    def attach_end(self, module: ModuleType) -> None:
        """The last call of a run that ends by itself."""
        around(module, "finish", _nothing, self._session.finish)

    def attach_training(self, module: ModuleType) -> None:
        """Model and optimizer, passes per step, evaluation and checkpoints."""
        for name, wrap in ((_TRAIN, self._wrap_train), (_GETTER, self._wrap_getter)):
            original = getattr(module, name, None)
            if original is not None:
                setattr(module, name, wrap(original))
        bracket(self._session, module, "evaluate_and_print_results", EVAL)
        bracket(self._session, module, "save_checkpoint_and_time", SAVE)

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            self._before_train(signature, args, kwargs)
            return original(*args, **kwargs)

        return train

    def _wrap_getter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def getter(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)

            @functools.wraps(schedule)
            def forward_backward(*args: Any, **kwargs: Any) -> Any:
                self._num_passes += not kwargs.get("forward_only", False)
                return schedule(*args, **kwargs)

            return forward_backward

        return getter

    def _describe(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        given = signature.bind(*args, **kwargs).arguments
        models = chunks_of(given["model"])
        optimizers = (given["optimizer"],)
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
                run_config=functools.partial(_run_config, models),
                **place(),
            )
        )

    def _begin_step(self) -> None:
        self._num_passes = 0
        step = getattr(_arguments(), "curr_iteration", None)
        self._session.begin_step(step)

    def _end_step(self) -> None:
        self._session.end_step(is_rerun=self._num_passes > 1)


def _arguments() -> Any:
    return importlib.import_module(_GLOBALS).get_args()


def _run_config(models: tuple[Any, ...]) -> RunConfig:
    import megatron.core

    from ...calib.workload.megatron_namespace import from_namespace
    from ..instruments import device_name

    version = f"Megatron-LM {megatron.core.__version__}"
    return with_device(from_namespace(_arguments()), device_name(models), version)


def _nothing() -> None:
    """No action on this side."""
