"""Layouts whose step was measured: what a step model learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..samples.step_rows import StepRow
from ..workload.config import Cadence, RunConfig

MEASURED_SIGMA_LOG = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """A layout and its step."""

    config: RunConfig
    time_s: float
    sigma_log: float = MEASURED_SIGMA_LOG
    """How well the level of the steps was measured."""
    site: str = ""
    """Where else it was measured: another cluster, release or day, whose level as a whole may be
    another one.  Empty: where it is asked."""

    @staticmethod
    def of(row: StepRow, site: str = "") -> KnownStep:
        """What a row of a table says."""
        return KnownStep(config=row.config, time_s=row.measured_s, site=site)


def same_layout(config: RunConfig) -> RunConfig:
    """Equal for runs whose steps are the same work, whatever they do beside their steps."""
    par = config.parallelism
    if par.ranks_per_node >= par.num_ranks:
        par = replace(par, ranks_per_node=0)  # one node, said or not
    return replace(config, parallelism=par, cadence=Cadence(), unmodelled=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What the constants leave of one layout's measured steps."""

    residual_log: float
    """Measured over modelled step, log, mean of the layout's steps."""
    sigma_log: float
    """How well that is known."""


def remainders(
    known: Sequence[KnownStep], residuals: Sequence[float]
) -> dict[RunConfig, Remainder]:
    """By layout; steps of one layout in inverse proportion to their variances.

    Steps of other sites tell of the constants alone.
    """
    places: dict[RunConfig, list[int]] = {}
    for place, step in enumerate(known):
        if step.site:
            continue
        places.setdefault(same_layout(step.config), []).append(place)
    found = {}
    for layout, held in places.items():
        own = np.array([known[place].sigma_log for place in held]) ** -2.0
        logs = np.array([residuals[place] for place in held])
        found[layout] = Remainder(
            residual_log=float(own @ logs / own.sum()), sigma_log=float(own.sum() ** -0.5)
        )
    return found
