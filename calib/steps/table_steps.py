"""The step model of a machine that is known by tables, or by the data sheet of its device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pandas as pd

from ..samples.step_rows import StepPredictions, StepRow
from .base_times import BaseTimes
from .known import KnownStep
from .model import FittedSteps, fit_steps
from .row_times import row_times, times_key


def table_steps(
    row: StepRow,
    known: Sequence[KnownStep] = (),
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
) -> FittedSteps:
    """That of the machine that a row ran on, over canonical tables and measured steps."""
    return fit_steps(row_times(row, operators, collectives), known)


class TableSteps:
    """The same for many calibrations over the same tables, whose fit is kept."""

    def __init__(
        self,
        operators: Sequence[pd.DataFrame] = (),
        collectives: Sequence[pd.DataFrame] = (),
    ) -> None:
        self._operators, self._collectives = tuple(operators), tuple(collectives)
        self._times: dict[Hashable, BaseTimes] = {}

    def fit(self, rows: Sequence[StepRow]) -> CalibratedRows:
        """Calibrated on rows of one machine; without rows on tables and priors alone."""
        return CalibratedRows(self, tuple(rows))

    def base(self, row: StepRow) -> BaseTimes:
        """Base times of the machine that a row ran on."""
        key = times_key(row)
        if key not in self._times:
            self._times[key] = row_times(row, self._operators, self._collectives)
        return self._times[key]


class CalibratedRows:
    """Rows of one machine, and what they say of others."""

    def __init__(self, tables: TableSteps, rows: tuple[StepRow, ...]) -> None:
        self._tables, self._rows = tables, rows

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Medians and 90 % intervals of rows of the same machine."""
        base = self._tables.base((*self._rows, *rows)[0])
        known = [KnownStep.of(row) for row in self._rows]
        return fit_steps(base, known).predict([row.config for row in rows])
