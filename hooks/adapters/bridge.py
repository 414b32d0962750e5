"""Megatron-Bridge, through its callbacks; the model and its operators are megatron.core's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ...calib.workload.config import RunConfig
from ..process.host import Host, Reference, living, reference, references
from ..process.post_import import when_imported
from ..process.settings import CadenceHint
from ..session.attach import new_session
from ..session.session import EVAL, SAVE, Session
from .callbacks import Found, WatchedTraining
from .megatron_model import chunks_of, place, run_config, timer_holders

_TRAINING = "megatron.bridge.training"


def wait_for(session: Session) -> None:
    """Join the callbacks of every ``pretrain``."""
    when_imported(f"{_TRAINING}.callbacks", _join)


def _join(module: Any) -> None:
    original = module.normalize_callbacks

    @functools.wraps(original)
    def normalize_callbacks(callbacks: Any) -> Any:
        manager = original(callbacks)
        manager = module.CallbackManager() if manager is None else manager
        manager.add(bridge_callback())
        return manager

    module.normalize_callbacks = normalize_callbacks


def bridge_callback(**options: Any) -> BridgeCallback:
    """A callback for ``pretrain(..., callbacks=[...])``; the options are those of ``attach``.

    Where ``--calibrate`` started a session, it is that one, and the options are ignored.
    """
    return BridgeCallback(functools.partial(new_session, **options))


class BridgeCallback(WatchedTraining):
    """Events of Megatron-Bridge; it takes any object that has methods of these names."""

    def on_train_start(self, context: Any) -> None:
        """Take the session, and say what is trained."""
        self.begin(lambda: _found(context))

    def on_train_step_start(self, context: Any) -> None:
        """A step, by Bridge's own number."""
        self.begin_step(context.state.train_state.step)

    def on_train_step_end(self, context: Any) -> None:
        """Its end, before anything is logged."""
        self.end_step()

    def on_eval_start(self, context: Any) -> None:
        """An evaluation."""
        self.begin_bracket(EVAL)

    def on_eval_end(self, context: Any) -> None:
        """Its end."""
        self.end_bracket(EVAL)

    def on_train_end(self, context: Any) -> None:
        """Nothing of ours is left."""
        self.end()


def _found(context: Any) -> Found:
    training = importlib.import_module(f"{_TRAINING}.train")
    models = chunks_of(context.model)
    state, optimizers = context.state, (context.optimizer,)
    known = references(models), reference(state)
    return Found(
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
    call = {
        "micro_batch_size": config.train.micro_batch_size,
        "num_microbatches": get_num_microbatches(),
        "seq_length": config.model.seq_length,
    }
    hint = CadenceHint(
        train_iters=config.train.train_iters,
        eval_interval=getattr(config.validation, "eval_interval", None),
        eval_iters=getattr(config.validation, "eval_iters", None),
        save_interval=getattr(config.checkpoint, "save_interval", None),
        save=str(getattr(config.checkpoint, "save", None) or ""),
        exit_interval=getattr(config.train, "exit_interval", None),
        global_batch_size=config.train.global_batch_size,
        rampup_batch_size=tuple(getattr(config.train, "rampup_batch_size", None) or ()),
    )
    return run_config(living(models), call, hint)
