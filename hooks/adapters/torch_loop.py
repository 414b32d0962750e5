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
from ..process.host import Host, Reference, living, reference, references
from ..process.post_import import when_imported
from ..sensors.recorder import OPTIMIZER
from ..session.session import EVAL, SAVE, Session
from .chain import chain_of, unseen_in
from .first_step import FirstStep, Known
from .replaced import Replaced


def wait_for(session: Session) -> None:
    """Attach to the first optimizer that steps; Megatron-LM's own loop has another adapter."""
    loop = TorchLoop(session)
    loop.attach()
    when_imported("megatron.training.training", lambda module: loop.leave())


class TorchLoop:
    """Steps from one optimizer step to the next; evaluation is from ``eval`` to ``train``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replaced = Replaced(session)
        self._optimizer: Reference | None = None
        self._chain: tuple[Reference, ...] = ()
        self._first: FirstStep | None = None
        self._is_standing_down = False
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Hook all optimizers; the hooks cost an optimizer's step about a microsecond."""
        before = self._session.guard.protect(self._before_step)
        after = self._session.guard.protect(self._after_step)
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: before(optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: after(optimizer)),
        ]

    def leave(self) -> None:
        """Take the hooks back where no optimizer has stepped; never from inside one of them."""
        self._is_standing_down = self._is_standing_down or self._optimizer is None
        while self._handles and self._is_standing_down:
            self._handles.pop().remove()

    def _is_mine(self, optimizer: Any) -> bool:
        return self._optimizer is not None and self._optimizer() is optimizer

    def _before_step(self, optimizer: Any) -> None:
        if self._is_mine(optimizer):
            self._session.begin_phase(OPTIMIZER)

    def _after_step(self, optimizer: Any) -> None:
        if self._is_standing_down:
            return
        if self._optimizer is None:
            self._begin(optimizer)
        elif self._is_mine(optimizer):
            self._session.end_phase(OPTIMIZER)
            self._session.end_bracket(EVAL)  # left open by a model that trains in eval mode
            self._session.end_step()
            if self._first is not None:
                self._session.guard.protect(self._describe)(optimizer)
            self._session.begin_step()
        elif self._optimizer() is None:
            self._end()

    def _end(self) -> None:
        """Another trains, and what was watched is gone: its training is over."""
        self._is_standing_down = True
        self._replaced.remove()
        self._session.finish()

    def _begin(self, optimizer: Any) -> None:
        if not self._session.claim(self):
            self._is_standing_down = True
            return
        chain = chain_of(optimizer)
        self._optimizer, self._chain = reference(optimizer), references(chain)
        self._first = FirstStep(chain, self._session.guard)
        self._session.describe(self._host(optimizer))
        self._replaced.bracket(torch, "save", SAVE)
        checkpoint = sys.modules.get("torch.distributed.checkpoint")
        if checkpoint is not None:
            self._replaced.bracket(checkpoint, "save", SAVE)
        self._replaced.put(torch.nn.Module, "train", self._wrap_train(torch.nn.Module.train))
        self._session.begin_step(1)

    def _describe(self, optimizer: Any) -> None:
        first, self._first = self._first, None
        if first is not None:
            first.close()
            hint = self._session.settings.cadence
            known = Known(cadence=Cadence(train_iters=hint.train_iters or 0))
            rank = self._session.settings.rank
            config = first.run_config(living(self._chain), optimizer, rank, known)
            self._session.describe(self._host(optimizer, lambda: config))

    def _host(self, optimizer: Any, run_config: Callable[[], Any] | None = None) -> Host:
        rank, chain = self._session.settings.rank.rank, living(self._chain)
        return Host(
            models=chain[:1],
            optimizers=(optimizer,),
            passes=chain,
            unseen=unseen_in(chain),
            run_config=run_config,
            dp_rank=rank,
            is_home=rank == 0,
            is_wandb_stepped=False,
        )

    def _wrap_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watched = weakref.WeakSet(living(self._chain))

        @functools.wraps(original)
        def train(module: torch.nn.Module, mode: bool = True) -> Any:
            if module in watched:
                (self._session.end_bracket if mode else self._session.begin_bracket)(EVAL)
            return original(module, mode)

        return train
