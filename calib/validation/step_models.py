"""The package's own step model on tables of operators and collectives, or without any."""

from __future__ import annotations

from collections.abc import Sequence

from ..published.readers import PublishedTable
from ..steps.table_steps import TableSteps


class CalibratedSteps(TableSteps):
    """Scales of one machine, calibrated by step times, over times of its operators.

    These come from the operator and collective tables where there are any of its device, else from
    what public tables and data sheets say.
    """

    name = "ours"

    def __init__(self, tables: Sequence[PublishedTable] = ()) -> None:
        super().__init__(
            [table.operators for table in tables if table.operators is not None],
            [table.collectives for table in tables if table.collectives is not None],
        )
