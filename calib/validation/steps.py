"""Step models held against measured steps: fit on some rows of a machine, score on the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..errors import ForerunError
from ..memory.peak import memory
from ..records.step_rows import StepPredictions, StepRow
from .step_protocols import Fold


class ScoredSteps(Protocol):
    """A step model calibrated on some rows."""

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Step times with 90 % intervals; the rows' measured figures are not there to be read."""
        ...


class StepModel(Protocol):
    """A way to predict step times of layouts from those of others."""

    def fit(self, rows: Sequence[StepRow]) -> ScoredSteps:
        """Calibrated on rows of one machine; without rows on priors alone."""
        ...


def score_folds(
    rows: Sequence[StepRow], folds: Iterable[Fold], model: StepModel
) -> list[pd.DataFrame]:
    """The scored rows of each fold.  The model never sees a measured figure of a scored row.

    Beside the columns of all scored rows (``group`` is the row's): the ``row`` itself, ``draw`` and
    ``machine`` of the fold, ``error_frac`` (predicted over measured, minus one; NaN where the model
    abstains, and why in ``reason``), and ``memory_nbytes``, the peak of the fullest rank (NaN where
    none was measured or can be told).
    """
    scored = []
    for fold in folds:
        train, test = [rows[i] for i in fold.train], [rows[i] for i in fold.test]
        blind = [replace(row, measured_s=math.nan, measured_memory_nbytes=None) for row in test]
        found = model.fit(train).predict(blind)
        measured_s = np.array([row.measured_s for row in test], dtype=np.float64)
        columns = {
            "protocol": fold.protocol,
            "draw": fold.draw,
            "machine": fold.machine,
            "group": [row.group for row in test],
            "row": test,
            "measured_s": measured_s,
            "predicted_s": found.time_s,
            "low_s": found.low_s,
            "high_s": found.high_s,
            "error_frac": found.time_s / measured_s - 1,
            "reason": list(found.reasons or ("",) * len(test)),
            "memory_nbytes": _memory(train, test),
        }
        scored.append(pd.DataFrame(columns))
    return scored


def _memory(train: Sequence[StepRow], test: Sequence[StepRow]) -> NDArray[np.float64]:
    """Estimates of rows whose peak was measured, plus the median offset of the calibration rows."""
    known = [row for row in train if row.measured_memory_nbytes]
    offsets = [float(row.measured_memory_nbytes or 0) - _estimate(row) for row in known]
    offset = float(np.nanmedian(offsets)) if offsets else 0.0
    values = [_estimate(row) + offset if row.measured_memory_nbytes else math.nan for row in test]
    return np.array(values, dtype=np.float64)


def _estimate(row: StepRow) -> float:
    try:
        return float(memory(row.config).allocated_nbytes)
    except ForerunError:
        return math.nan
