"""API for loops without an adapter: ``with attach(model, optimizer) as run: ... run.step()``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ...calib.records.record_kinds import OPTIMIZER
from ...calib.workload.config import Cadence, RunConfig
from ...calib.workload.run_options import OnAdvice, RunOptions
from ..process.host import Host, updated_by
from ..process.interpreter import companion_command
from ..process.ranks import current_rank
from ..process.settings import CadenceHint, RankInfo, Settings
from ..sensors.optimizer_steps import OptimizerSteps
from .chain import num_replicas, roles_in, unseen_in
from .data_watch import DataWatch, LoopObserver
from .first_step import FrameworkSettings, is_self_described
from .session import EVAL, SAVE, Session

DEFAULTS = RunOptions()
OFF = "FORERUN_OFF"
"""Variable that a user sets to 1 to disable everything here.  Duplicated from
``_forerun_autoload``, on which the package must not depend."""


def attach(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    config: RunConfig | None = None,
    *,
    train_iters: int | None = None,
    directory: str | Path = DEFAULTS.directory,
    steps: int = DEFAULTS.steps,
    every: int = DEFAULTS.every,
    rank: RankInfo | None = None,
    is_analysed: bool = True,
    on_advice: str = DEFAULTS.on_advice.value,
) -> AttachedRun:
    """Return a context manager around a training loop; call its ``step()`` at the end of every
    step.

    ``config`` describes the run; without it the model's own configuration does, if it is one of
    transformers, else steps, phases and collectives are recorded and no layout is modelled.
    ``train_iters`` is the number of steps of the whole run: without it only the end of the pass
    over the data is forecast, if a ``DataLoader`` feeds the loop.  ``rank`` is read from
    ``torch.distributed`` if that is initialised. ``is_analysed`` starts the companion, which
    answers while the run goes on.  ``on_advice`` is one of ``log``, ``alert`` and ``stop``; with
    ``stop`` call ``run.should_stop()`` after every step. With ``FORERUN_OFF=1`` in the environment
    all of it does nothing.
    """
    session = new_session(
        directory=directory,
        steps=steps,
        every=every,
        rank=rank,
        train_iters=train_iters,
        is_analysed=is_analysed,
        on_advice=on_advice,
    )
    models = (model,) if isinstance(model, torch.nn.Module) else tuple(model)
    return AttachedRun(session, models, optimizer, config)


def new_session(
    *,
    directory: str | Path = DEFAULTS.directory,
    steps: int = DEFAULTS.steps,
    every: int = DEFAULTS.every,
    rank: RankInfo | None = None,
    train_iters: int | None = None,
    is_analysed: bool = True,
    on_advice: str = DEFAULTS.on_advice.value,
) -> Session:
    """Return a session that no flag started; the arguments are those of ``attach``."""
    if rank is None:
        rank = current_rank()
        name = rank.run_id if rank.world_size > 1 else str(time.time_ns())
        rank = replace(rank, run_id=f"attached-{name}")
    settings = Settings(
        rank=rank,
        steps=steps,
        every=every,
        directory=Path(directory).absolute(),
        cadence=CadenceHint(train_iters=train_iters),
        on_advice=OnAdvice(on_advice),
        host_argv=tuple(sys.argv),
        companion_command=companion_command(os.environ) if is_analysed else (),
        is_answered=is_analysed,
    )
    session = Session(settings)
    if os.environ.get(OFF, "0") not in ("", "0"):
        session.switch_off()
    return session


class AttachedRun:
    """An attached loop.  A step lasts from the end of the previous one to ``step()``."""

    def __init__(
        self,
        session: Session,
        models: tuple[torch.nn.Module, ...],
        optimizer: torch.optim.Optimizer | None,
        config: RunConfig | None,
    ) -> None:
        self._session = session
        self._optimizer = optimizer
        self._steps: OptimizerSteps | None = None
        self._config = config
        self._data = DataWatch(session.guard)
        self._loop_observer: LoopObserver | None = None
        session.describe(self._host(optimizer, models))
        if config is None:
            known = FrameworkSettings(
                cadence=Cadence(train_iters=session.settings.cadence.train_iters or 0)
            )
            self._loop_observer = LoopObserver(
                session,
                optimizer,
                models,
                known,
                self._host,
                self._data,
                sees_calls=_sees_calls(models),
            )

    def _host(
        self,
        optimizer: torch.optim.Optimizer | None,
        models: tuple[torch.nn.Module, ...],
        run_config: Callable[[], RunConfig | None] | None = None,
    ) -> Host:
        rank, config = self._session.settings.rank.rank, self._config
        return Host(
            models=models,
            optimizers=() if optimizer is None else (optimizer,),
            passes=models if config is None and _sees_calls(models) else (),
            unseen=unseen_in(models),
            roles=roles_in(models),
            run_config=run_config if config is None else lambda: config,
            dp_rank=rank,
            is_home=rank == 0,
            is_wandb_stepped=False,
        )

    def __enter__(self) -> AttachedRun:
        """Begin the first step."""
        optimizer, self._optimizer = self._optimizer, None
        if optimizer is not None:
            # A wrapper's inner torch optimizer is unknown here: match by the weights it updates.
            updated = frozenset(map(id, updated_by(optimizer)))
            marks = self._session.begin_phase, self._session.end_phase
            protect = self._session.guard.protect
            notes = [protect(partial(_mark_optimizer, updated, mark)) for mark in marks]
            self._steps = OptimizerSteps(*notes)
        if self._loop_observer is not None:
            self._data.install()
        self._session.begin_step()
        return self

    def step(self) -> None:
        """End this step, after the optimizer's, and begin the next."""
        self._session.end_step()
        if self._loop_observer is not None:
            self._session.guard.protect(self._look)(self._loop_observer)
        self._session.begin_step()

    def _look(self, observer: LoopObserver) -> None:
        """Process what the first steps reveal."""
        self._data.end_step()
        observer.end_step()
        if observer.is_over:
            self._loop_observer = None

    def should_stop(self) -> bool:
        """Return True once all ranks are to end, the same on all after the same step.

        Save and leave the loop then; always False without ``on_advice="stop"``.
        """
        return bool(self._session.should_stop())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a named part of the step; ``eval`` and ``save-checkpoint`` are excluded from its
        time."""
        session = self._session
        if name in (EVAL, SAVE):
            begin, end = session.begin_bracket, session.end_bracket
        else:
            begin, end = session.begin_phase, session.end_phase
        begin(name)
        try:
            yield
        finally:
            end(name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove all hooks and write the remaining records; the step that has just begun is
        dropped."""
        if self._steps is not None:
            self._steps.remove()
        if self._loop_observer is not None:
            self._session.guard.protect(self._loop_observer.close)()
            self._loop_observer = None
        self._session.finish()


def _mark_optimizer(updated: Set[int], mark: Callable[[str], object], optimizer: Any) -> None:
    """Mark steps of optimizers that update the same weights as the run's own."""
    if any(id(weight) in updated for weight in updated_by(optimizer)):
        mark(OPTIMIZER)


def _sees_calls(models: Iterable[torch.nn.Module]) -> bool:
    """Return True if calls of the whole model need a hook: they end transfers, or define a layout.

    A function that calls a bare model may be compiled, and such a hook would cause a recompilation.
    """
    known = tuple(models)
    return bool(num_replicas(known)) or is_self_described(known)
