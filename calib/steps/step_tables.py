"""The step model of a machine with imported tables, or with only the data sheet of its device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from ..records.cluster import StatedNodes
from ..records.step_rows import StepRow, Trait
from ..workload.config import RunConfig
from ._operator_tables import network_of
from ._scales import scales
from .base_times import BaseTimes, FittedTimes, prior_times, table_times
from .known_steps import KnownStep
from .model import FittedSteps, fit_steps


def table_steps(
    row: StepRow,
    known: Sequence[KnownStep] = (),
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
) -> FittedSteps:
    """Fit the step model of the machine that a row ran on, over canonical tables and measured
    steps."""
    return fit_steps(row_times(row, operators, collectives, stated), known)


OPEN_SIGMA_LOG = {"dp": 0.29, "optimizer": 0.22}
"""Additional deviations of the transfer and optimizer constants if the precisions of gradients and
states are not stated. Half of the recipes that NVIDIA publishes reduce in bf16: 4 of the 6 bytes of
a parameter are 2 then, ``log(6 / 4)`` from Megatron's default. A fifth uses states of 6 bytes
instead of 12."""


def row_times(
    row: StepRow,
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
    *,
    without: tuple[str, ...] = (),
) -> BaseTimes:
    """Return the base times of the machine that a row ran on: see ``machine_times``."""
    return machine_times(
        row.config,
        row.machine,
        operators,
        collectives,
        stated,
        has_first_flash=Trait.FIRST_FLASH in row.traits,
        without=without,
    )


def machine_times(
    config: RunConfig,
    machine: str = "",
    operators: Sequence[pd.DataFrame] = (),
    collectives: Sequence[pd.DataFrame] = (),
    stated: StatedNodes | None = None,
    *,
    has_first_flash: bool = False,
    without: tuple[str, ...] = (),
) -> BaseTimes:
    """Return base times for the device, kernels and widths of a layout, from canonical tables if
    there are any.

    Without tables, all times come from the priors of the device, and of the network if the
    machine's name or the user states it. ``has_first_flash``: steps are older than
    FlashAttention-2. Priors leave out the public tables that ``without`` names.
    """
    network = network_of(machine, config.device, stated)
    if operators:
        base = table_times(
            operators,
            collectives,
            device=config.device,
            is_attention_fused=config.is_attention_fused,
            network=network,
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
    if has_first_flash:
        base = _before_flash_2(base)
    return _opened(base) if config.has_open_widths else base


def _opened(base: FittedTimes) -> BaseTimes:
    """Widen the constants that depend on unstated precisions."""
    known = base.conditions
    usual = {scale.name: scale.log_sigma for scale in scales(known)}
    wider = {name: math.hypot(usual[name], sigma) for name, sigma in OPEN_SIGMA_LOG.items()}
    return replace(base, conditions=replace(known, log_sigmas={**known.log_sigmas, **wider}))


def _before_flash_2(base: FittedTimes) -> FittedTimes:
    """Leave attention as tables time it on devices whose fastest kernel FlashAttention-2 is."""
    known = base.conditions
    if known.generic_attention is None or not known.generic_attention.is_only_one:
        return base
    return replace(base, conditions=replace(known, generic_attention=None))
