"""Plain loops of PyTorch (single process, DDP, FSDP1 and FSDP2), without an edit.

A step ends where the optimizer has stepped.  The first one only shows what there is: the optimizer
that steps, the modules that hold its parameters, the batch.  Frameworks that describe their run by
then have an adapter of their own, and this one stands down.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...calib.workload.config import Cadence
from ..process.host import living
from ..process.post_import import when_imported
from ..sensors.recorder import OPTIMIZER
from ..session.data_watch import DataWatch
from ..session.first_step import Known
from ..session.session import EVAL, SAVE, Session
from .callbacks import Found, WatchedTraining


def wait_for(session: Session) -> None:
    """Attach to the first optimizer that steps; Megatron-LM's own loop has another adapter."""
    loop = TorchLoop(session)
    loop.attach()
    when_imported("megatron.training.training", lambda module: loop.leave())


class TorchLoop(WatchedTraining):
    """Steps from one optimizer step to the next; evaluation is from ``eval`` to ``train``."""

    def __init__(self, session: Session) -> None:
        super().__init__(lambda: session)
        self._guard, self._hint = session.guard, session.settings.cadence
        self._is_standing_down = False
        self._handles: list[Any] = []
        self._data = self._batches = DataWatch(self._guard)

    def _own_session(self) -> Session:
        """The one that it was made for, whatever the flag started."""
        return self._make_session()

    def attach(self) -> None:
        """Hook all optimizers; the hooks cost an optimizer's step about a microsecond.

        Until the loop has shown how many batches a step takes, torch's loaders are watched too.
        """
        self._batches.install()
        before = self._guard.protect(self._before_step)
        after = self._guard.protect(self._after_step)
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)),
        ]

    def leave(self) -> None:
        """Take the hooks back where no optimizer has stepped; never from inside one of them."""
        self._is_standing_down = self._is_standing_down or self._session is None
        if self._is_standing_down:
            self._batches.remove()
        while self._handles and self._is_standing_down:
            self._handles.pop().remove()

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
            # Another trains, and what was watched is gone: its training is over.
            self._is_standing_down = True
            self.end()

    def _begin_with(self, optimizer: Any) -> None:
        savers = torch, sys.modules.get("torch.distributed.checkpoint")
        self.begin(
            lambda: Found(
                optimizer=optimizer,
                known=Known(cadence=Cadence(train_iters=self._hint.train_iters or 0)),
                brackets=tuple((module, "save", SAVE) for module in savers if module is not None),
            )
        )
        if self._session is None or self._patches is None:
            self._is_standing_down = True
            self._batches.remove()
            return
        train = self._wrap_train(self._session, torch.nn.Module.train)
        self._patches.put(torch.nn.Module, "train", train)
        self._session.begin_step(1)

    def end(self) -> None:
        """Nothing of ours is left."""
        self._batches.remove()
        super().end()

    def _wrap_train(self, session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = weakref.WeakSet(living(self._chain))

        @functools.wraps(original)
        def train(module: torch.nn.Module, mode: bool = True) -> Any:
            if module in watched:
                (session.end_bracket if mode else session.begin_bracket)(EVAL)
            return original(module, mode)

        return train
