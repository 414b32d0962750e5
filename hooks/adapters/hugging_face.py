"""The Trainer of transformers, by the events of its callbacks, and around its methods.

No callback of ours is in its list: its handler is listened to where it calls those that are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...calib.workload import Cadence
from ..process import contents, function_at, is_stood_in, stand_in, when_imported
from ..sensors import OPTIMIZER
from ..session import EVAL, SAVE, FrameworkSettings, Session
from .callbacks import Listeners, TrainingSetup, WatchedTraining, callback_class
from .patches import Patches

_CALL = "call_event"
_STEPS = "steps"
_EVERY = ("eval", "save")


def wait_for(session: Session) -> None:
    """Listen to the handlers of all Trainers, once transformers has one."""
    listen = functools.partial(_listen, session)
    when_imported("transformers.trainer", listen)


def hugging_face_callback(**options: Any) -> Any:
    """A ``TrainerCallback`` for ``Trainer(callbacks=[...])``; the options are those of ``attach``.

    Where ``--calibrate`` started a session, it is that one, and the options are ignored.
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
    """A step is ``on_step_begin`` to ``on_step_end``: all micro-batches of one optimizer step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Take the session, and stand around what is not a step."""
        self.begin(lambda: _training_setup(args, state, given["optimizer"]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The first micro-batch of a step."""
        self.begin_step(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Gradients are clipped."""
        self.begin_phase(OPTIMIZER)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Parameters are updated."""
        self.end_phase(OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The step is counted; what the Trainer logs, evaluates and saves comes after it."""
        self.end_step()
        if self.should_stop:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Nothing of ours is left."""
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
            framework=f"transformers {transformers.__version__}",
            num_microbatches=int(args.gradient_accumulation_steps),
        ),
        brackets=((trainer, "evaluate", EVAL), (trainer, "_save_checkpoint", SAVE)),
    )
