"""How long a step takes when ranks do their own work and wait for nothing but each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..timeline.compiled import pipeline_of
from ..timeline.costs import pipeline_costs
from ..timeline.programs import Pipeline
from ..timeline.steady import simulate_long
from ..workload.config import RunConfig
from ..workload.ranks import position

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
FORWARD_FRAC = 1 / 3
"""Of the passes: the backward pass has two products for each of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlaces:
    """Where the compared ranks sit: stage and replica, ``(ranks,)`` each."""

    stages: Places
    replicas: Places
    pipeline: Pipeline

    @staticmethod
    def of(config: RunConfig, ranks: Sequence[int]) -> RankPlaces:
        """Places of global ranks; ``ConfigError`` where one is not in the layout."""
        par = config.parallelism
        if max(ranks) >= par.num_ranks:
            raise ConfigError(
                f"rank {max(ranks)} is not in a layout of {par.num_ranks} ranks; record it again"
            )
        places = [position(par, rank) for rank in ranks]
        return RankPlaces(
            stages=np.array([place.stage for place in places]),
            replicas=np.array([place.dp_rank for place in places]),
            pipeline=pipeline_of(config),
        )


def step_floor_s(passes_s: Floats, serial_s: Floats, layout: RankPlaces) -> Floats:
    """Step time without transfers, shape (samples,), from own times of shape (samples, ranks).

    Ranks of one stage and replica (tensor and context parallel) advance in lockstep, as fast as the
    slowest; the stages of a replica as their schedule has it, all micro-batches alike.  The
    slowest replica and the slowest rank's serial part add up.

    >>> two = RankPlaces(stages=np.array([0, 1]), replicas=np.array([0, 0]),
    ...              pipeline=Pipeline(num_stages=2, num_microbatches=4))
    >>> step_floor_s(np.array([[4.0, 8.0]]), np.array([[1.0, 0.5]]), two)
    array([10.])
    """
    num_stages = layout.pipeline.num_stages
    shape = (len(passes_s), int(layout.replicas.max()) + 1, num_stages)
    slowest = np.zeros(shape)
    for place, (replica, stage) in enumerate(zip(layout.replicas, layout.stages, strict=True)):
        here = slowest[:, replica, stage]
        np.maximum(here, passes_s[:, place], out=here)
    # Chunk c runs on stage c % pp.
    num_passes = layout.pipeline.num_microbatches * layout.pipeline.num_virtual_stages
    each_s = np.tile(
        slowest.reshape(-1, num_stages).T / num_passes, (layout.pipeline.num_virtual_stages, 1)
    )
    # Of the two products of the backward pass one is the weight's gradient.
    backward_s = each_s * (1 - FORWARD_FRAC)
    costs = pipeline_costs(
        each_s * FORWARD_FRAC,
        backward_s,
        weight_gradient_s=backward_s / 2,
        num_virtual_stages=layout.pipeline.num_virtual_stages,
    )
    (found,) = simulate_long([(costs, layout.pipeline)])
    return found.makespan_s.reshape(shape[:2]).max(axis=1) + serial_s.max(axis=1)
