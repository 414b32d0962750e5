"""Adapter for torchtitan's Trainer, which has no callbacks: its methods are wrapped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from ...calib.records.record_kinds import OPTIMIZER
from ...calib.workload.config import Cadence
from ..process.host import reference
from ..process.inspection import contents, module_name
from ..process.post_import import when_imported
from ..process.stand_ins import function_at, is_stood_in, stand_in
from ..sensors.captured import register_captured
from ..sensors.optimizer_steps import OptimizerSteps
from ..session.attaching import new_session
from ..session.first_step import FrameworkSettings
from ..session.session import EVAL, SAVE, Session
from ._callbacks import TrainingSetup, Watched, WatchedTraining
from ._patches import Patches
from .torch_loop import savers

_READERS = ("torchtitan.config.manager", "torchtitan.config_manager")
"""Modules that parse a program's arguments, by release; the Trainer is defined by then."""
_LOST = "no steps are seen"


def wait_for(session: Session) -> None:
    """Wrap the Trainer's methods; its module was ``train`` up to 0.2.

    Those releases are launched as ``-m torchtitan.train``: the class is then in ``__main__``, and
    no import reveals it.
    """
    for name in ("torchtitan.trainer", "torchtitan.train"):
        when_imported(name, functools.partial(_watch_trainers, session))
    for name in _READERS:
        when_imported(name, functools.partial(_watch_program, session))


def _watch_program(session: Session, module: ModuleType) -> None:
    patches, manager = Patches(session), getattr(module, "ConfigManager", None)

    def look(*_: Any, **__: Any) -> None:
        patches.remove()
        program = sys.modules["__main__"]
        if getattr(program.__spec__, "name", "") == "torchtitan.train":
            _watch_trainers(session, program)

    if manager is not None:
        patches.around(manager, "parse_args", before=session.guard.protect(look), lost=_LOST)


def _watch_trainers(session: Session, module: ModuleType) -> None:
    trainer = getattr(module, "Trainer", None)
    if trainer is None or is_stood_in(function_at(trainer, "train")):
        return
    patches, watched = Patches(session), Watched()
    for name, wrap in (("train", _wrap_train), ("train_step", _wrap_step)):
        original = function_at(trainer, name)
        if patches.note(trainer, name, original is not None, _LOST):
            patches.put(trainer, name, wrap(original, watched))


def _wrap_train(original: Callable[..., Any], watched: Watched) -> Callable[..., Any]:
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = _Training(new_session)
        watched.put(self, training)
        training.begin(lambda: training.find(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            watched.drop(self)
            training.end()

    return stand_in(original, train)


def _wrap_step(original: Callable[..., Any], watched: Watched) -> Callable[..., Any]:
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        training = watched.of(self)
        if training is None:
            return original(self, *args, **kwargs)
        # The Trainer increments its counter before the step.
        training.begin_step(self.step - 1)
        result = original(self, *args, **kwargs)
        training.end_step()
        return result

    return stand_in(original, train_step)


def is_graphed(trainer: Any) -> bool:
    """True if forward and backward pass of a micro-batch are replayed as one CUDA graph.

    ``training.disable_cuda_graphs`` controls it, but passes are never graphed without NVIDIA's CUDA
    or with pipeline stages.  So the Trainer's function itself is inspected.
    """
    step = contents(trainer).get("fwd_bwd_fn")
    home = step.__module__ if type(step) is FunctionType else module_name(step)
    return home.startswith("torchtitan.") and home.rpartition(".")[2] == "cudagraph"


def _config_of(trainer: Any) -> Any:
    """Return the run's configuration, which was ``job_config`` up to 0.2."""
    return getattr(trainer, "config", None) or trainer.job_config


def num_microbatches(trainer: Any) -> int:
    """Return the passes of a rank in one step: a pipeline cuts each batch into several."""
    config, number = _config_of(trainer), int(trainer.gradient_accumulation_steps)
    layout = getattr(config, "parallelism", None)
    if getattr(layout, "pipeline_parallel_degree", 1) == 1:
        return number
    each = getattr(layout, "pipeline_parallel_microbatch_size", 1)
    return number * max(1, getattr(config.training, "local_batch_size", 1) // each)


class _Training(WatchedTraining):
    """One call of ``Trainer.train``."""

    def __init__(self, make_session: Callable[[], Session]) -> None:
        super().__init__(make_session)
        self._steps: OptimizerSteps | None = None

    def find(self, trainer: Any) -> TrainingSetup:
        """Return the setup, with the optimizers' steps marked as their phase."""
        config, optimizers = _config_of(trainer), trainer.optimizers
        if is_graphed(trainer):
            register_captured(trainer.model_parts, "forward and backward of each micro-batch")
        protect, is_watched = self.guard.protect, reference(optimizers)

        def marking(mark: Callable[[str], object]) -> Callable[[Any], object]:
            return protect(lambda one: mark(OPTIMIZER) if is_watched() is one else None)

        self._steps = OptimizerSteps(marking(self.begin_phase), marking(self.end_phase))
        # Its ``save`` is called after every step and returns at once in most.
        manager = type(trainer.checkpointer)
        is_dcp = function_at(manager, "dcp_save") is not None  # since 0.3 there is another
        brackets = [(manager, "dcp_save", SAVE)] if is_dcp else [*savers()]
        validator = getattr(trainer, "validator", None)
        if validator is not None:
            brackets.append((type(validator), "validate", EVAL))
        return TrainingSetup(
            optimizer=optimizers,
            models=tuple(trainer.model_parts),
            known=FrameworkSettings(
                cadence=Cadence(train_iters=int(config.training.steps)),
                framework="torchtitan",
                num_microbatches=num_microbatches(trainer),
            ),
            brackets=tuple(brackets),
        )

    def end(self) -> None:
        """Remove all hooks and finish the session."""
        if self._steps is not None:
            self._steps.remove()
        super().end()
