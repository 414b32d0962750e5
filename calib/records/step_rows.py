"""Measured step times of whole layouts: what a step model is calibrated on and scored against."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..workload import RunConfig


class StepKind(Enum):
    """Where a step time comes from."""

    MEASURED = "measured"
    DERIVED = "derived"
    """Computed from a published rate (tokens or FLOP per second)."""
    SYNTHETIC = "synthetic"
    """Output of a simulator: a test of composition, never of accuracy."""
    IMPLIED = "implied"
    """Computed from a published prediction and its published error."""


class Trait(Enum):
    """What is known of a run beyond its ``RunConfig``."""

    PARALLEL_RESIDUAL = "parallel_residual"
    """Attention and MLP share one all-reduce forwards (GPT-NeoX)."""
    SOCKET_NETWORK = "socket_network"
    """Nodes are joined by sockets, not by RDMA."""
    LATE_GATHERS = "late_gathers"
    """FSDP gathers a layer's weights after the backward pass of the one before (BACKWARD_POST)."""
    COMPILED = "compiled"
    """Layers run under ``torch.compile``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRow:
    """One layout that was run."""

    table: str
    row_id: str
    config: RunConfig
    measured_s: float
    """NaN in rows that are to be predicted."""
    measured_memory_nbytes: float | None = None
    """Peak of the fullest rank."""
    machine: str
    """What has to be equal for rows to share a calibration: device, cluster, stack, precision."""
    group: str
    """Model, ranks and global batch: what layouts are ranked within."""
    kind: StepKind = StepKind.MEASURED
    traits: frozenset[Trait] = frozenset()
    pair: str = ""
    """Name of the rows that differ from this one in a switch alone; "" where there are none."""
    flag: str = ""
    """Why the row is neither fitted nor scored; "" where nothing speaks against it."""

    @property
    def num_ranks(self) -> int:
        """Devices that the step ran on."""
        return self.config.parallelism.num_ranks

    @property
    def width(self) -> str:
        """The model apart from its depth: rows of one width share their operators' shapes."""
        model = self.config.model
        experts = f" x{model.experts.num_experts}" if model.experts else ""
        return f"h{model.hidden_size} s{model.seq_length}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row of a table that could not be made a layout."""

    row_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """One table of step times."""

    name: str
    rows: tuple[StepRow, ...]
    """All that describe a layout, flagged ones included."""
    skipped: tuple[SkippedRow, ...] = ()
    unused: tuple[str, ...] = ()
    """Columns that its reader knows nothing of."""

    @property
    def usable(self) -> tuple[StepRow, ...]:
        """Rows without a flag."""
        return tuple(row for row in self.rows if not row.flag)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPredictions:
    """What a model says of some rows, ``(rows,)`` each; NaN where it abstains."""

    time_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    """Low end of the 90 % interval."""
    high_s: NDArray[np.float64]
    reasons: tuple[str, ...] = field(default=())
    """Why it abstains, "" where it does not; empty where it never does."""
