"""What an adapter knows about the training that it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..calib.workload.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Model, optimizer and place of this rank, as far as the framework tells."""

    models: tuple[Any, ...] = ()
    optimizers: tuple[Any, ...] = ()
    timer_holders: tuple[tuple[Any, str], ...] = ()
    """Objects and the attribute under which each keeps the framework's timers."""
    passes: tuple[Any, ...] = ()
    """A model and its wrappers: the outermost call of any is a forward phase; empty: timers say."""
    unseen: tuple[str, ...] = ()
    """What hooks cannot see here, one name each; part of the coverage."""
    run_config: Callable[[], RunConfig] | None = None
    stage: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
    num_steps: int = 0
    """Steps of the whole run where the host says so without a run config; 0: unknown."""
    is_home: bool | None = None
    """True on the rank where the host prints and logs; None: that is the last one."""
    stop: Callable[[], bool] | None = None
    """Asks the framework to save and end after the step that runs; to be called on all ranks."""
    stop_is_lossy: str = ""
    """Why it must not be asked: what a stop would lose, and the remedy."""
    is_wandb_stepped: bool = True
    """The host gives W&B its own step; else ours joins the host's next row, whatever its step."""
