"""What the largest payloads that were measured tell of the nodes of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..workload.collectives import Collective
from .curves import Curve
from .groups import PAIRS, Group, bus_factor, ring_steps
from .systems import NetworkPrior
from .topology import Rate, fit_topology

_LEAST_SHARE = 0.5
"""Share of the full bandwidth from which a payload tells of links."""


def fitted_nodes(curves: Mapping[Group, Curve], prior: NetworkPrior) -> NetworkPrior:
    """The prior with topology and rates that the largest payloads tell."""
    if prior.links is None:
        return prior
    found = (_rate(group, curve) for group, curve in curves.items())
    fitted = fit_topology(
        [rate for rate in found if rate is not None],
        prior.links.topology,
        node_bytes_per_s=prior.links.node_bytes_per_s,
        card_bytes_per_s=prior.links.network_bytes_per_s,
        joints=prior.links.other_joints,
    )
    links = replace(
        prior.links,
        topology=fitted.topology,
        node_bytes_per_s=fitted.node_bytes_per_s,
        network_bytes_per_s=fitted.card_bytes_per_s,
        sheet_bytes_per_s=prior.links.network_bytes_per_s,
    )
    return replace(prior, links=links)


def _rate(group: Group, curve: Curve) -> Rate | None:
    """What the largest payload moves over the links of a rank or out of a node; None of a send,
    which one channel may bound, and of what is passed on inside nodes as well."""
    nbytes = float(np.exp(curve.log_nbytes[-1]))
    if group.num_chosen or group.collective in PAIRS or curve.top_share() < _LEAST_SHARE:
        return None
    factor = bus_factor(group.collective, group.num_ranks)
    is_far = group.num_nodes > 1
    if is_far and group.collective is Collective.ALL_TO_ALL:
        factor = (1.0 - 1.0 / group.num_nodes) * group.ranks_per_node
    time_s = float(np.exp(curve.log_time(curve.log_nbytes[-1:]))[0])
    return Rate(
        ranks_per_node=group.ranks_per_node,
        bytes_per_s=factor * nbytes / time_s,
        is_far=is_far,
        num_steps=ring_steps(group.collective, group.num_ranks),
    )
