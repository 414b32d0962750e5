"""The step model of a machine that is known by tables, or by the data sheet of its device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import pandas as pd

from ..importers.own_format import table_kind
from ..records.cluster import StatedNodes
from ..records.step_rows import StepPredictions, StepRow, Trait
from ..workload.config import RunConfig
from ..workload.operators import OperatorKind
from .base_times import BaseTimes, FittedTimes, prior_times, table_times
from .known import KnownStep
from .layer_profiles import LayerTimes, layer_times
from .model import FittedSteps, fit_steps
from .scales import scales
from .transfer_tables import network_of


def table_steps(
    row: StepRow,
    known: Sequence[KnownStep] = (),
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
) -> FittedSteps:
    """That of the machine that a row ran on, over canonical tables and measured steps."""
    return fit_steps(row_times(row, operators, collectives, stated), known)


class TableSteps:
    """The same for many calibrations over the same tables, whose fit is kept."""

    name = "ours"

    def __init__(
        self,
        tables: Sequence[pd.DataFrame] = (),
        stated: StatedNodes | None = None,
        *,
        without: tuple[str, ...] = (),
    ) -> None:
        self._stated, self._without = stated, without
        self._operators = tuple(t for t in tables if table_kind(t) == "operators")
        self._collectives = tuple(t for t in tables if table_kind(t) != "operators")
        self._times: dict[Hashable, BaseTimes] = {}

    def fit(self, rows: Sequence[StepRow]) -> CalibratedRows:
        """Calibrated on rows of one machine; without rows on tables and priors alone."""
        return CalibratedRows(self, tuple(rows))

    def base(self, row: StepRow) -> BaseTimes:
        """Base times of the machine that a row ran on."""
        key = times_key(row)
        if key not in self._times:
            self._times[key] = row_times(
                row, self._operators, self._collectives, self._stated, without=self._without
            )
        return self._times[key]


class CalibratedRows:
    """Rows of one machine, and what they say of others."""

    def __init__(self, tables: TableSteps, rows: tuple[StepRow, ...]) -> None:
        self._tables, self._rows = tables, rows

    def predict(self, rows: Sequence[StepRow]) -> StepPredictions:
        """Medians and 90 % intervals of rows of the same machine."""
        return self.steps(rows[0]).predict([row.config for row in rows])

    def steps(self, row: StepRow) -> FittedSteps:
        """The step model of the machine of the known rows, which is that of ``row``."""
        return self._fitted if self._rows else fit_steps(self._tables.base(row))

    @cached_property
    def _fitted(self) -> FittedSteps:
        known = [KnownStep.of(row) for row in self._rows]
        return fit_steps(self._tables.base(self._rows[0]), known)


def times_key(row: StepRow) -> Hashable:
    """Rows with equal keys have equal base times."""
    config = row.config
    stated = (_is_socket(row), config.has_open_widths)
    return config.device, row.machine, config.is_attention_fused, *stated


OPEN_SIGMA_LOG = {"dp": 0.29, "optimizer": 0.22}
"""What the constants of transfers and optimizer leave open beside all else where nobody said in how
many bits gradients travel and states are kept.  Half of the recipes that NVIDIA publishes reduce in
bf16: 4 of the 6 bytes of a parameter are 2 then, ``log(6 / 4)`` from Megatron's default.  A fifth
keeps states of 6 bytes in place of 12."""


def row_times(
    row: StepRow,
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
    *,
    without: tuple[str, ...] = (),
) -> BaseTimes:
    """Base times of the machine that a row ran on: see ``machine_times``."""
    return machine_times(
        row.config,
        row.machine,
        operators,
        collectives,
        stated,
        is_flagged_used=_is_socket(row),
        without=without,
    )


def machine_times(
    config: RunConfig,
    machine: str = "",
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
    *,
    is_flagged_used: bool = False,
    without: tuple[str, ...] = (),
) -> BaseTimes:
    """Base times of the device, kernels and widths of a layout, from canonical tables where there
    are any.

    A profile of whole layers goes before operators.  Without tables all comes from the priors of
    the device, and of the network where the machine's name or the user says it.  Priors leave out
    the public tables that ``without`` names.
    """
    network = network_of(machine, config.device, stated)
    profiles = [t for t in operators if (t["kind"] == OperatorKind.LAYER.value).any()]
    base: FittedTimes | LayerTimes
    if operators and not profiles:
        base = table_times(
            operators,
            collectives,
            device=config.device,
            is_attention_fused=config.is_attention_fused,
            network=network,
            is_flagged_used=is_flagged_used,
            without=without,
        )
    else:
        base = prior_times(
            config.device,
            is_attention_fused=config.is_attention_fused,
            collectives=collectives,
            network=network,
            without=without,
        )
        if profiles:
            base = layer_times(profiles, device=config.device, rest=base)
    return _opened(base) if config.has_open_widths else base


def _opened(base: FittedTimes | LayerTimes) -> BaseTimes:
    """With constants that hold the widths that nobody said."""
    known = base.conditions
    usual = {scale.name: scale.log_sigma for scale in scales(known)}
    wider = {name: math.hypot(usual[name], sigma) for name, sigma in OPEN_SIGMA_LOG.items()}
    return replace(base, conditions=replace(known, log_sigmas={**known.log_sigmas, **wider}))


def _is_socket(row: StepRow) -> bool:
    """Samples of transfers that carry a flag for sockets are the right ones then."""
    return Trait.SOCKET_NETWORK in row.traits
