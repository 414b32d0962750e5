"""Adapter for the transformers Trainer: callback events, and wrappers around its methods.

No callback of ours is in its list; we wrap the handler method that calls the list.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...calib.records.record_kinds import OPTIMIZER
from ...calib.workload.config import Cadence
from ..process.inspection import contents
from ..process.post_import import when_imported
from ..process.stand_ins import function_at, is_stood_in, stand_in
from ..session.first_step import FrameworkSettings
from ..session.session import EVAL, SAVE, Session
from ._callbacks import Listeners, TrainingSetup, WatchedTraining, callback_class
from ._patches import Patches

_CALL = "call_event"
_STEPS = "steps"
_EVERY = ("eval", "save")


def wait_for(session: Session) -> None:
    """Observe the callback handlers of all Trainers once transformers is imported."""
    listen = functools.partial(_listen, session)
    when_imported("transformers.trainer", listen)


def hugging_face_callback(**options: Any) -> Any:
    """Return a ``TrainerCallback`` for ``Trainer(callbacks=[...])``, with the options of
    ``attach``.

    If ``--calibrate`` started a session, that session is used and the options are ignored.
    """
    from transformers import TrainerCallback

    return callback_class(_Events, TrainerCallback)(hugging_face_callback, options)


def _listen(session: Session, _: ModuleType) -> None:
    from transformers.trainer_callback import CallbackHandler

    patches, original = Patches(session), function_at(CallbackHandler, _CALL)
    lost = "Trainers are not seen; give them forerun.hugging_face_callback()"
    if patches.note(CallbackHandler, _CALL, original is not None, lost) and not is_stood_in(
        original
    ):
        patches.put(CallbackHandler, _CALL, _telling(original))


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    listeners = Listeners(_Events, "on_train_begin")

    def call_event(
        self: Any, event: str, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        updated_control = original(self, event, args, state, control, **kwargs)
        optimizer = contents(self).get("optimizer")
        listeners.notify(self, event, args, state, updated_control, optimizer=optimizer)
        return updated_control

    return stand_in(original, call_event)


class _Events(WatchedTraining):
    """Events of a Trainer; a step lasts from ``on_step_begin`` to ``on_step_end``."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Claim the session, and bracket evaluation and saves."""
        self.begin(lambda: _training_setup(args, state, given["optimizer"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin a step at its first micro-batch."""
        self.begin_step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin the optimizer phase, after gradient clipping."""
        self.begin_phase(OPTIMIZER)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the optimizer phase, after the update."""
        self.end_phase(OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """End the step, before the Trainer logs, evaluates and saves."""
        self.end_step()
        if self.should_stop:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Remove all patches and finish the session."""
        self.end()


def _training_setup(args: Any, state: Any, optimizer: Any) -> TrainingSetup:
    import transformers

    trainer = transformers.Trainer
    is_steps = {name: getattr(args, f"{name}_strategy", None) == _STEPS for name in _EVERY}
    every = {name: int(getattr(args, f"{name}_steps") or 0) for name in _EVERY if is_steps[name]}
    return TrainingSetup(
        optimizer=optimizer,
        known=FrameworkSettings(
            cadence=Cadence(
                train_iters=int(state.max_steps),
                eval_interval=every.get("eval", 0),
                save_interval=every.get("save", 0),
            ),
            autocast_dtype="bfloat16" if args.bf16 else "float16" if args.fp16 else "",
            fuses_head=fuses_head(args),
            framework=f"transformers {transformers.__version__}",
            num_microbatches=int(args.gradient_accumulation_steps),
        ),
        brackets=((trainer, "evaluate", EVAL), (trainer, "_save_checkpoint", SAVE)),
    )


def fuses_head(args: Any) -> bool:
    """Return True if Liger's head takes the place of logits and loss, as it does by default."""
    kernels = getattr(args, "liger_kernel_config", None) or {}
    is_on = getattr(args, "use_liger_kernel", False)
    return bool(is_on and kernels.get("fused_linear_cross_entropy", True))
