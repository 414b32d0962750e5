"""torchtitan's Trainer, around its methods: it has no callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...calib.workload.config import Cadence
from ..process.post_import import when_imported
from ..sensors.recorder import OPTIMIZER
from ..session.attach import new_session
from ..session.first_step import Known
from ..session.session import EVAL, SAVE, Session
from .callbacks import Found, WatchedTraining


def wait_for(session: Session) -> None:
    """Stand around the Trainer's methods; its module was ``train`` up to 0.2."""
    for name in ("torchtitan.trainer", "torchtitan.train"):
        when_imported(name, _watch_trainers)


def _watch_trainers(module: ModuleType) -> None:
    trainer = getattr(module, "Trainer", None)
    if trainer is not None and not hasattr(trainer.train, "__wrapped_by_forerun__"):
        trainer.train = _wrap_train(trainer.train)
        trainer.train_step = _wrap_step(trainer.train_step)


def _wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = _Training(new_session)
        vars(self)[_WATCHED] = watched
        watched.begin(lambda: watched.find(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            del vars(self)[_WATCHED]
            watched.end()

    vars(train)["__wrapped_by_forerun__"] = True
    return train


def _wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = vars(self).get(_WATCHED)
        if watched is None:
            return original(self, *args, **kwargs)
        # The Trainer has counted the step that it begins.
        watched.begin_step(self.step - 1)
        result = original(self, *args, **kwargs)
        watched.end_step()
        return result

    return train_step


_WATCHED = "_forerun"


class _Training(WatchedTraining):
    """One call of ``Trainer.train``."""

    def __init__(self, make_session: Callable[[], Session]) -> None:
        super().__init__(make_session)
        self._handles: list[Any] = []

    def find(self, trainer: Any) -> Found:
        """What is trained; the optimizer's own hooks tell its phase."""
        config, optimizers = trainer.config, trainer.optimizers
        self._handles = [
            optimizers.register_step_pre_hook(lambda *_: self.begin_phase(OPTIMIZER)),
            optimizers.register_step_post_hook(lambda *_: self.end_phase(OPTIMIZER)),
        ]
        brackets = [(type(trainer.checkpointer), "save", SAVE)]
        validator = getattr(trainer, "validator", None)
        if validator is not None:
            brackets.append((type(validator), "validate", EVAL))
        return Found(
            optimizer=optimizers,
            models=tuple(trainer.model_parts),
            known=Known(
                cadence=Cadence(train_iters=int(config.training.steps)),
                framework="torchtitan",
                num_microbatches=int(trainer.gradient_accumulation_steps),
            ),
            brackets=tuple(brackets),
        )

    def end(self) -> None:
        """Nothing of ours is left."""
        while self._handles:
            self._handles.pop().remove()
        super().end()
