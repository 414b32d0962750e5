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
    run_config: Callable[[], RunConfig] | None = None
    stage: int = 0
    tp_rank: int = 0
    dp_rank: int = 0
