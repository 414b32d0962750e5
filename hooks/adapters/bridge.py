"""Adapter for Megatron-Bridge, through its callbacks; the model itself is megatron.core's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ...calib.workload.config import RunConfig
from ..process.host import Host, Reference, live_objects, reference, references
from ..process.inspection import contents, is_a
from ..process.post_import import when_imported
from ..process.settings import CadenceHint
from ..process.stand_ins import function_at, is_stood_in, stand_in
from ..session.session import EVAL, SAVE, Session
from ._callbacks import Listeners, TrainingSetup, UserCallback, WatchedTraining
from ._megatron_model import chunks_of, place, run_config, timer_holders
from ._patches import Patches

_TRAINING = "megatron.bridge.training"
_CALLBACKS = f"{_TRAINING}.callbacks"


def wait_for(session: Session) -> None:
    """Listen to the callbacks of every ``pretrain``."""
    when_imported(_CALLBACKS, functools.partial(_listen, session))


def _listen(session: Session, module: Any) -> None:
    """Wrap the functions that create a callback manager, test for an event and fire one.

    No callback of ours is added to the manager, which may belong to the user.
    """
    patches, manager = Patches(session), getattr(module, "CallbackManager", None)
    listeners = _Listeners(BridgeCallback, "on_train_start")
    lost = "pretrain is not seen; give it callbacks=[forerun.bridge_callback()]"
    for owner, name, wrap in (
        (module, "normalize_callbacks", listeners.normalizing),
        (module, "should_fire", listeners.asking),
        (manager, "fire", listeners.firing),
    ):
        original = function_at(owner, name)
        is_there = patches.note(owner, name, original is not None, lost)
        if is_there and not is_stood_in(original):
            patches.put(owner, name, wrap(original))


class _Listeners(Listeners):
    """Observers of Megatron-Bridge's callback managers."""

    def normalizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Create a manager for runs without callbacks too."""

        def normalize_callbacks(callbacks: Any) -> Any:
            manager = original(callbacks)
            return (
                importlib.import_module(_CALLBACKS).CallbackManager()
                if manager is None
                else manager
            )

        return stand_in(original, normalize_callbacks)

    def asking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Report our events as wanted even if no callback of the run handles them."""

        def should_fire(callback_manager: Any, event_name: str) -> bool:
            is_ours = callback_manager is not None and event_name in self.names
            return is_ours or original(callback_manager, event_name)

        return stand_in(original, should_fire)

    def firing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Notify our observer after all callbacks of the run."""

        def fire(manager: Any, event_name: str, context: Any) -> None:
            original(manager, event_name, context)
            self.notify(manager, event_name, context)

        return stand_in(original, fire)

    def _has_user_callback(self, owner: Any) -> bool:
        callbacks_by_event = contents(owner).get("_callbacks")
        methods = (
            callbacks_by_event.get(self._starts, ()) if type(callbacks_by_event) is dict else ()
        )
        return any(is_a(getattr(one, "__self__", None), self._events) for one in methods)


def bridge_callback(**options: Any) -> BridgeCallback:
    """Return a callback for ``pretrain(..., callbacks=[...])``; options are those of ``attach``.

    If ``--calibrate`` started a session, that session is used and the options are ignored.
    """
    return _UserBridgeCallback(bridge_callback, options)


class BridgeCallback(WatchedTraining):
    """Events of Megatron-Bridge, which accepts any object with methods of these names."""

    def on_train_start(self, context: Any) -> None:
        """Claim the session and describe the run."""
        self.begin(lambda: _training_setup(context))

    def on_train_step_start(self, context: Any) -> None:
        """Begin a step, numbered as in Bridge."""
        self.begin_step(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        """End the step, before anything is logged."""
        self.end_step()

    def on_eval_start(self, context: Any) -> None:
        """Begin an evaluation."""
        self.begin_bracket(EVAL)

    def on_eval_end(self, context: Any) -> None:
        """End the evaluation."""
        self.end_bracket(EVAL)

    def on_train_end(self, context: Any) -> None:
        """Remove all patches and finish the session."""
        self.end()


class _UserBridgeCallback(UserCallback, BridgeCallback):
    """Variant that a user adds to the list of callbacks."""


def _training_setup(context: Any) -> TrainingSetup:
    training = importlib.import_module(f"{_TRAINING}.train")
    models = chunks_of(context.model)
    state, optimizers = context.state, (context.optimizer,)
    known = references(models), reference(state)
    return TrainingSetup(
        optimizer=context.optimizer,
        host=Host(
            models=models,
            optimizers=optimizers,
            timer_holders=(*timer_holders(models, optimizers), (state, "_timers")),
            run_config=lambda: _run_config(*known),
            **place(),
        ),
        brackets=((training, "save_checkpoint_and_time", SAVE),),
    )


def _run_config(models: tuple[Reference, ...], state: Reference) -> RunConfig:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    config = state().cfg
    saved = config.checkpoint
    reshards = "dist_ckpt_optim_fully_reshardable"
    call = {
        "micro_batch_size": config.train.micro_batch_size,
        "num_microbatches": get_num_microbatches(),
        "seq_length": config.model.seq_length,
    }
    hint = CadenceHint(
        train_iters=config.train.train_iters,
        eval_interval=getattr(config.validation, "eval_interval", None),
        eval_iters=getattr(config.validation, "eval_iters", None),
        save_interval=getattr(saved, "save_interval", None),
        save=str(getattr(saved, "save", None) or ""),
        ckpt_format=str(getattr(saved, "ckpt_format", None) or ""),
        dist_ckpt_optim_fully_reshardable=bool(getattr(saved, reshards, False)),
        exit_interval=getattr(config.train, "exit_interval", None),
        global_batch_size=config.train.global_batch_size,
        rampup_batch_size=tuple(getattr(config.train, "rampup_batch_size", None) or ()),
    )
    return run_config(live_objects(models), call, hint)
