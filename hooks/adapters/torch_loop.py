"""Adapter for plain PyTorch loops (single process, DDP, FSDP1 and FSDP2), without an edit.

A step ends with the optimizer's step.  The first one only reveals the objects: the optimizer,
the modules with its parameters, the batch.  Frameworks that describe their run by then have an
adapter of their own, and this one stands down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...calib.records.record_kinds import OPTIMIZER
from ...calib.workload.config import Cadence
from ..process.host import live_objects, reference
from ..process.post_import import when_imported
from ..process.stand_ins import stand_in
from ..sensors.optimizer_steps import OptimizerSteps
from ..session.data_watch import DataWatch
from ..session.first_step import FrameworkSettings
from ..session.session import EVAL, SAVE, Session
from ._callbacks import TrainingSetup, WatchedTraining

_Module: Any = torch.nn.Module
_CHECKPOINT = "torch.distributed.checkpoint"
_SAVERS = (
    ("torch.serialization", "_save"),
    ("torch.serialization", "_legacy_save"),
    (f"{_CHECKPOINT}.state_dict_saver", "_save_state_dict"),
    (f"{_CHECKPOINT}.staging:DefaultStager", "_stage"),
    ("torch_checkpointing.checkpoint_manager:CheckpointManager", "save"),
)


def wait_for(session: Session) -> None:
    """Attach to the first optimizer that steps; leave Megatron-LM's loop to its own adapter."""
    loop = TorchLoop(session)
    loop.attach()
    when_imported("megatron.training.training", lambda module: loop.leave())


class TorchLoop(WatchedTraining):
    """Steps end with each optimizer step; evaluation lasts from ``eval`` to ``train``."""

    def __init__(self, session: Session) -> None:
        super().__init__(lambda: session)
        self._guard, self._hint = session.guard, session.settings.cadence
        self._is_standing_down = False
        self._steps: OptimizerSteps | None = None
        self._train: tuple[Any, Any] | None = None
        self._watched: dict[int, Any] = {}
        self._data = self._batches = DataWatch(self._guard)

    def _get_session(self) -> Session:
        """Return the session that this adapter was made for, even if the flag started another."""
        return self._make_session()

    def attach(self) -> None:
        """Observe all optimizers, at a cost of about a microsecond per optimizer step.

        Until the micro-batches per step are known, torch's data loaders are observed too.
        """
        self._batches.install()
        protect = self._guard.protect
        self._steps = OptimizerSteps(protect(self._before_step), protect(self._after_step))
        # Patched before compilation, and permanently: removing the patch would trigger a
        # recompilation.
        self._train = _Module.train, stand_in(_Module.train, self._train_stand_in(_Module.train))
        _Module.train = self._train[1]

    def leave(self) -> None:
        """Detach if no optimizer has stepped yet, which is before anything was compiled."""
        if self._is_standing_down or self._session is None:
            self.detach()

    def detach(self) -> None:
        """Remove all patches; without compiled code no trace of them remains."""
        self._is_standing_down = True
        self._batches.remove()
        if self._steps is not None:
            self._steps.remove()
        train, self._train = self._train, None
        if train is not None and _Module.train is train[1]:
            _Module.train = train[0]

    def _before_step(self, optimizer: Any) -> None:
        if self._optimizer() is optimizer:
            self.begin_phase(OPTIMIZER)

    def _after_step(self, optimizer: Any) -> None:
        if self._is_standing_down:
            return
        if self._session is None:
            self._batches.end_step()
            self._begin_with(optimizer)
        elif self._optimizer() is optimizer:
            self._batches.end_step()
            self.end_phase(OPTIMIZER)
            self.end_bracket(EVAL)  # left open by a model that trains in eval mode
            self.end_step()
            self._session.begin_step()
        elif self._optimizer() is None:
            # Another optimizer steps and the observed one is gone: its training is over.
            self._is_standing_down = True
            self.end()

    def _begin_with(self, optimizer: Any) -> None:
        self.begin(
            lambda: TrainingSetup(
                optimizer=optimizer,
                known=FrameworkSettings(cadence=Cadence(train_iters=self._hint.train_iters or 0)),
                brackets=tuple(savers()),
            )
        )
        if self._session is None or self._patches is None:
            self._is_standing_down = True
            self._batches.remove()
            return
        self._watched = {id(module): reference(module) for module in live_objects(self._chain)}
        self._session.begin_step(1)

    def end(self) -> None:
        """End training and remove all patches except the pass-through ``Module.train``."""
        self._watched = {}
        self._batches.remove()
        super().end()

    def _train_stand_in(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Same defaults as the original: torch.compile guards on them.
        def train(self: Any, mode: bool = True) -> Any:
            note(self, mode)
            return original(self, mode)

        note = self._guard.protect(self._note_mode)

        return train

    def _note_mode(self, module: Any, mode: Any) -> None:
        """Begin an evaluation when the model goes to eval mode; end it on return to training."""
        find = self._watched.get(id(module))
        if find is not None and find() is module:
            (self.end_bracket if mode is True else self.begin_bracket)(EVAL)


def savers() -> Iterator[tuple[Any, str, str]]:
    """Yield the functions that save, beneath those that users call, pass around and pickle."""
    for place, name in _SAVERS:
        module, _, kind = place.partition(":")
        loaded_module = sys.modules.get(module)
        if loaded_module is not None:
            yield getattr(loaded_module, kind, loaded_module), name, SAVE
