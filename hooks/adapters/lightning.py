"""Adapter for Lightning's Trainer, by its callback events, under both its package names.

No callback of ours is in its list; we wrap the function that calls the list.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...calib.records.record_kinds import BACKWARD, FORWARD, OPTIMIZER
from ...calib.workload.config import Cadence
from ..process.post_import import when_imported
from ..process.stand_ins import function_at, is_stood_in, stand_in
from ..session.first_step import FrameworkSettings
from ..session.session import EVAL, SAVE, Session
from ._callbacks import Listeners, TrainingSetup, WatchedTraining, callback_class
from ._patches import Patches

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_CALL = "_call_callback_hooks"


def wait_for(session: Session) -> None:
    """Observe all Trainers once one of the packages is imported."""
    for package in _PACKAGES:
        when_imported(f"{package}.trainer.trainer", functools.partial(_listen, session, package))


def lightning_callback(package: str = _PACKAGES[0], **options: Any) -> Any:
    """Return a ``Callback`` for ``Trainer(callbacks=[...])``; options are those of ``attach``.

    ``package`` is the one that the Trainer comes from, ``lightning.pytorch`` or
    ``pytorch_lightning``.  If ``--calibrate`` started a session, that session is used.
    """
    make = functools.partial(lightning_callback, package)
    return callback_class(_Events, importlib.import_module(package).Callback)(make, options)


def _listen(session: Session, package: str, _: Any) -> None:
    calls: Any = sys.modules.get(f"{package}.trainer.call")
    patches, original = Patches(session), function_at(calls, _CALL)
    lost = "Trainers are not seen; give them forerun.lightning_callback()"
    if patches.note(calls, _CALL, original is not None, lost) and not is_stood_in(original):
        patches.put(calls, _CALL, _telling(original))


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notify ours first: other callbacks' work at a batch's end, such as saves, is not part of a
    step."""
    listeners = Listeners(_Events, "on_train_start")

    def call_callback_hooks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
        listeners.notify(trainer, hook_name, trainer, None, *args)
        original(trainer, hook_name, *args, **kwargs)

    return stand_in(original, call_callback_hooks)


class _Events(WatchedTraining):
    """Events of a Trainer; a step is all batches up to a change of ``global_step``."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Claim the session."""
        self.begin(lambda: _training_setup(trainer))

    def on_train_batch_start(self, trainer: Any, *given: Any) -> None:
        """Begin a micro-batch; the first one begins the step."""
        self.begin_step(trainer.global_step)
        self.begin_phase(FORWARD)

    def on_before_backward(self, trainer: Any, *given: Any) -> None:
        """End the forward phase: the loss is computed."""
        self.end_phase(FORWARD)
        self.begin_phase(BACKWARD)

    def on_after_backward(self, trainer: Any, *given: Any) -> None:
        """End the backward phase: gradients are computed."""
        self.end_phase(BACKWARD)

    def on_before_optimizer_step(self, trainer: Any, *given: Any) -> None:
        """Begin the optimizer phase: all gradients of the step are accumulated."""
        self.begin_phase(OPTIMIZER)

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        """End the micro-batch, and the step if the optimizer has stepped."""
        self.end_phase(FORWARD)  # manual optimization without Lightning's backward
        if trainer.global_step != self._number:
            self.end_phase(OPTIMIZER)
            self.end_step()
            if self.should_stop and trainer.checkpoint_callbacks and not trainer.should_stop:
                self.guard.protect(_save)(trainer)
                trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an evaluation between two steps."""
        self.begin_bracket(EVAL)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the evaluation."""
        self.end_bracket(EVAL)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove all patches and finish the session."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End training if it fails."""
        self.end()


def _save(trainer: Any) -> None:
    """Write a checkpoint of this step: Lightning saves at fixed steps only, not at a stop."""
    folder = Path(trainer.checkpoint_callback.dirpath or trainer.default_root_dir)
    with torch._C._EnableTorchFunction():  # the user's state may have tensor subclasses
        trainer.save_checkpoint(folder / f"stopped-step={trainer.global_step}.ckpt")


def _training_setup(trainer: Any) -> TrainingSetup:
    version = importlib.import_module(type(trainer).__module__.partition(".")[0]).__version__
    limit = int(trainer.max_steps)
    expected = min(trainer.estimated_stepping_batches, limit if limit > 0 else math.inf)
    steps = int(expected) if math.isfinite(expected) else 0
    return TrainingSetup(
        optimizer=trainer.optimizers[0],
        known=FrameworkSettings(
            cadence=Cadence(train_iters=steps),
            framework=f"Lightning {version}",
            num_microbatches=int(trainer.accumulate_grad_batches),
        ),
        brackets=((type(trainer), "save_checkpoint", SAVE),),
        reports_passes=True,
    )
