"""A transfer on a machine where none like it was measured, from another machine where one was."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .curves import Expected, Law
from .groups import Group, bus_factor, ring_steps
from .nccl_tuner import TunedTime
from .systems import NetworkPrior

Vector = NDArray[np.float64]
_FRAC = 0.5
"""Of what the other machine differs from its own device's prior so much is expected here: between
34 pairs of device and fabric in public tables none, half, three quarters and all of it leave 1.2,
1.0, 1.0 and 1.1 of log time in nine groups of ten inside a node, 2.3, 2.0, 1.8 and 1.9 between."""
_NEAR_WIDTH, _FAR_WIDTH = 1.0, 2.0
"""Those 90 % half-widths: inside a node, and between nodes, where networks differ more."""


def is_alike(here: NetworkPrior, there: NetworkPrior) -> bool:
    """Whether the same kind of library carries the transfers of both."""
    return (here.links is None) == (there.links is None)


def moved_log_time(
    log_time: Vector, group: Group, nbytes: Vector, *, here: NetworkPrior, there: NetworkPrior
) -> Vector:
    """Log seconds here, ``(rows,)``, from those of the same group on another machine.

    >>> from ..workload.collectives import Collective
    >>> slow, fast = (NetworkPrior(step_s=0.0, bus_bytes_per_s=b) for b in (1e9, 4e9))
    >>> pair, nbytes = Group(collective=Collective.SEND, num_ranks=2), np.array([1e9])
    >>> found = moved_log_time(np.log([4.0]), pair, nbytes, here=fast, there=slow)
    >>> np.exp(found).round(3).tolist()
    [0.5]
    """
    expected = np.log(_by_prior(group, here)(nbytes))
    return expected + _FRAC * (log_time - np.log(_by_prior(group, there)(nbytes)))


def moved_width(half_width_log: Vector, group: Group) -> Vector:
    """Half-widths here, ``(rows,)``, from those there."""
    return np.hypot(_FRAC * half_width_log, _FAR_WIDTH if group.num_nodes > 1 else _NEAR_WIDTH)


def _by_prior(group: Group, prior: NetworkPrior) -> Expected:
    if prior.links is not None:
        return TunedTime(group=group, links=prior.links)
    return Law(
        fixed_s=ring_steps(group.collective, group.num_ranks) * prior.step_s,
        byte_s=bus_factor(group.collective, group.num_ranks) / prior.bus_bytes_per_s,
    )
