"""The step model on tables of operators and collectives, whichever stack the rows ran on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import pandas as pd

from ..samples.step_rows import StepPredictions, StepRow
from . import neox
from .base_times import BaseTimes
from .model import FittedScales, StepScales
from .row_times import row_times, times_key


class TableSteps:
    """Scales of one machine over base times from canonical tables, from priors without any.

    Rows of GPT-NeoX go to a model of that stack where there are operators and collectives of it.
    """

    def __init__(
        self,
        operators: Sequence[pd.DataFrame] = (),
        collectives: Sequence[pd.DataFrame] = (),
    ) -> None:
        self._operators, self._collectives = tuple(operators), tuple(collectives)
        self._times: dict[Hashable, BaseTimes] = {}
        self._neox: dict[Hashable, neox.NeoxSteps] = {}
        self._scales = StepScales(base=self._base)

    def fit(self, rows: Sequence[StepRow]) -> FittedTableSteps:
        """Calibrated on rows of one machine; without rows on tables and priors alone."""
        others = [row for row in rows if not self._is_neox(row)]
        return FittedTableSteps(model=self, rows=tuple(rows), scales=self._scales.fit(others))

    def neox_steps(self, rows: Sequence[StepRow]) -> neox.NeoxSteps | None:
        """The model of GPT-NeoX, where all rows ran on that and the tables suffice."""
        if not all(self._is_neox(row) for row in rows):
            return None
        machine = rows[0].machine
        if machine not in self._neox:
            self._neox[machine] = neox.neox_steps(self._operators, self._collectives, rows[0])
        return self._neox[machine]

    def _is_neox(self, row: StepRow) -> bool:
        has_tables = bool(self._operators and self._collectives)
        return has_tables and row.config.framework == neox.FRAMEWORK

    def _base(self, row: StepRow) -> BaseTimes:
        key = times_key(row)
        if key not in self._times:
            self._times[key] = row_times(row, self._operators, self._collectives)
        return self._times[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTableSteps:
    """A step model with the rows that calibrate it."""

    model: TableSteps
    rows: tuple[StepRow, ...]
    scales: FittedScales

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Medians and 90 % intervals of rows of the same machine."""
        found = self.model.neox_steps((*rows, *self.rows))
        return found.fit(self.rows).predict(rows) if found else self.scales.predict(rows)
