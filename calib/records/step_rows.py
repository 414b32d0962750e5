"""Measured step times of whole layouts, on which a step model is calibrated and scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..workload.config import RunConfig


class StepKind(Enum):
    """Source of a step time."""

    MEASURED = "measured"
    DERIVED = "derived"
    """Computed from a published rate (tokens or FLOP per second)."""
    SYNTHETIC = "synthetic"
    """Output of a simulator: a test of composition, never of accuracy."""


class Trait(Enum):
    """Property of a run that its ``RunConfig`` does not have."""

    PARALLEL_RESIDUAL = "parallel_residual"
    """Attention and MLP share one all-reduce in the forward phase (GPT-NeoX)."""
    LATE_GATHERS = "late_gathers"
    """FSDP gathers a layer's weights after the previous layer's backward pass (BACKWARD_POST)."""
    COMPILED = "compiled"
    """Layers run under ``torch.compile``."""
    FIRST_FLASH = "first_flash"
    """Fused attention runs in flash-attn 1 or its version in Triton, as before FlashAttention-2
    (July 2023)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRow:
    """One layout that was run."""

    table: str
    row_id: str
    config: RunConfig
    measured_s: float
    """Step time; NaN in rows to be predicted."""
    measured_memory_nbytes: float | None = None
    """Peak memory of the fullest rank."""
    machine: str
    """Key of the rows that may share a calibration: device, cluster, stack, precision."""
    group: str
    """Model, ranks and global batch, within which layouts are ranked."""
    kind: StepKind = StepKind.MEASURED
    traits: frozenset[Trait] = frozenset()
    pair: str = ""
    """Name shared by the rows that differ only in one switch; "" if there are no others."""
    flag: str = ""
    """Reason why the row is neither fitted nor scored; "" if it is usable."""

    @property
    def num_ranks(self) -> int:
        """Number of devices that the step ran on."""
        return self.config.parallelism.num_ranks

    @property
    def width(self) -> str:
        """The model apart from its depth: rows of one width share their operators' shapes."""
        model = self.config.model
        experts = f" x{model.experts.num_experts}" if model.experts else ""
        return f"h{model.hidden_size} s{model.seq_length}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRow:
    """A row of a table that does not describe a layout."""

    row_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTable:
    """One table of step times."""

    name: str
    rows: tuple[StepRow, ...]
    """All rows that describe a layout, flagged ones included."""
    skipped: tuple[SkippedRow, ...] = ()
    unused: tuple[str, ...] = ()
    """Columns that its reader does not know."""

    @property
    def usable(self) -> tuple[StepRow, ...]:
        """Rows without a flag."""
        return tuple(row for row in self.rows if not row.flag)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPredictions:
    """A model's predictions for some rows, ``(rows,)`` each; NaN if it abstains."""

    time_s: NDArray[np.float64]
    low_s: NDArray[np.float64]
    """Low end of the 90 % interval."""
    high_s: NDArray[np.float64]
    reasons: tuple[str, ...] = field(default=())
    """Reasons for abstaining, "" in rows without; empty if it never abstains."""
