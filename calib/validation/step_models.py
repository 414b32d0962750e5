"""The package's own step model on tables of operators and collectives, or without any."""

from __future__ import annotations

from collections.abc import Sequence

from ..published.readers import PublishedTable
from ..samples.step_rows import StepRow
from ..steps.base_times import BaseTimes, prior_times, table_times
from ..steps.model import FittedScales, StepScales


class CalibratedSteps:
    """Scales of one machine, calibrated by step times, over times of its operators.

    These come from the operator and collective tables where there are any of its device, else from
    what public tables and data sheets say.
    """

    name = "ours"

    def __init__(self, tables: Sequence[PublishedTable] = ()) -> None:
        self._operators = [t.operators for t in tables if t.operators is not None]
        self._collectives = [t.collectives for t in tables if t.collectives is not None]
        self._known: dict[tuple[str, bool], BaseTimes] = {}
        self._scales = StepScales(base=self._base)

    def fit(self, rows: Sequence[StepRow]) -> FittedScales:
        """Constants at the greatest posterior; without rows the priors."""
        return self._scales.fit(rows)

    def _base(self, row: StepRow) -> BaseTimes:
        device, is_fused = row.config.device, row.config.is_attention_fused
        key = (device, is_fused)
        if key not in self._known:
            self._known[key] = self._times(device, is_fused)
        return self._known[key]

    def _times(self, device: str, is_fused: bool) -> BaseTimes:
        if not self._operators and not self._collectives:
            return prior_times(device, is_attention_fused=is_fused)
        return table_times(
            self._operators, self._collectives, device=device, is_attention_fused=is_fused
        )
