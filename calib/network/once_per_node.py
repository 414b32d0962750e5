"""The expert exchange that sends a token once to each node, where it is forwarded to ranks.

It is bound by the cards, which carry a token once for each other node with one of its experts, or
by the multiprocessors that copy it for each rank. With few of these, a faster network changes
nothing (DeepEP on H100: 4 to 24 of 132 are set aside for it).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..workload.routing import expected_distinct
from .curves import Curve
from .groups import Group
from .nccl_tuner import LinkClass

Vector = NDArray[np.float64]
_EXPERTS_PER_RANK = 8
"""Assumed experts per rank, within the 2 to 32 of public models; nodes per rank reached differ by
less than 2 %."""
_LATENCY_S = 70e-6
"""Least time between two nodes, 57 and 84 us as in the next figure."""
_LATENCY_GROWTH = 0.4
"""Relative growth of latency from two nodes to four, and with each doubling after: ranks exchange
the sizes of their messages before any token leaves. DeepEP on 2, 4, 8 nodes of H100: 57, 90, 125 us
and 84, 125, 142 us."""
_CROWDED_LOG = 0.15
"""Log loss of the cards' rate per doubling of nodes, mean of four: 0.05 and 0.65 to four and eight
nodes of one cluster (DeepEP of SGLang 0.5.0 on H100), 0 to four (EPv2) and 0 to eight (V1 on H800)
in DeepEP's own figures, far bytes alone."""


def copies_to_ranks(group: Group) -> float:
    """Return the mean number of ranks that a token goes to under even routing.

    >>> from ..workload.collectives import Collective
    >>> group = Group(
    ...     collective=Collective.ALL_TO_ALL, num_ranks=16, num_nodes=2, num_chosen=8)
    >>> round(copies_to_ranks(group), 2), round(copies_to_far_nodes(group), 2)
    (6.6, 1.0)
    """
    return expected_distinct(
        num_groups=group.num_ranks, num_chosen=group.num_chosen, group_size=_EXPERTS_PER_RANK
    )


def copies_to_nodes(group: Group) -> float:
    """Return the mean number of nodes that a token goes to under even routing, its own included."""
    experts_per_node = round(_EXPERTS_PER_RANK * group.ranks_per_node)
    return expected_distinct(
        num_groups=group.num_nodes, num_chosen=group.num_chosen, group_size=experts_per_node
    )


def copies_to_far_nodes(group: Group) -> float:
    """Return the mean number of nodes other than its own that a token goes to under even
    routing."""
    return copies_to_nodes(group) * (1.0 - 1.0 / group.num_nodes)


def as_all_to_all(group: Group) -> tuple[Group, float]:
    """Return an equivalent all-to-all of one rank per node and the ratio of its payload to the
    exchange's, for machines without a measured exchange.

    A token goes once to each node, to the rank there with the sender's local rank, and is forwarded
    inside while the next ones arrive: each local rank has a card, and all send at once. DeepEP's
    own table has kernels between nodes at the rate of the card (43 to 58 GB/s of 50) whatever
    NVLink carries.

    >>> from ..workload.collectives import Collective
    >>> plain, share = as_all_to_all(
    ...     Group(collective=Collective.ALL_TO_ALL, num_ranks=16, num_nodes=2, num_chosen=8))
    >>> plain.num_ranks, plain.num_chosen, round(share, 2)
    (2, 0, 0.3)
    """
    share = copies_to_nodes(group) / copies_to_ranks(group)
    return replace(group, num_ranks=group.num_nodes, num_chosen=0), share


def unmeasured_exchange_s(group: Group, plain_s: Vector) -> Vector:
    """Return the seconds of an exchange, ``(rows,)``, from those of its ``as_all_to_all``: at least
    the latency of an exchange, with the crowding that measured ones have beyond two nodes.

    >>> from ..workload.collectives import Collective
    >>> group = Group(collective=Collective.ALL_TO_ALL, num_ranks=64, num_nodes=8, num_chosen=8)
    >>> (1e6 * unmeasured_exchange_s(group, np.array([0.0, 1e-3]))).round().tolist()
    [126.0, 1350.0]
    """
    doublings = float(np.log2(group.num_nodes)) - 1.0
    latency_s = _LATENCY_S * (1.0 + _LATENCY_GROWTH * doublings)
    return np.maximum(latency_s, np.exp(_CROWDED_LOG * doublings) * plain_s)


def exchange_time_s(
    curve: Curve, seen: Group, wanted: Group, nbytes: Vector, links: LinkClass
) -> Vector:
    """Return the seconds of ``wanted``, ``(rows,)``, from the curve of ``seen`` for as many tokens.

    The cards account for the part of the measured time that their rate implies, at most all; the
    copies account for all of it. The longer of both in ``wanted``, plus latency, is its time.
    """
    copies = [copies_to_ranks(group) for group in (seen, wanted)]
    source = nbytes * copies[0] / copies[1]
    times = np.exp(curve.log_time_of(source))
    least = np.minimum(curve.least_time_s, times)
    far_nbytes = [nbytes / copies[1] * copies_to_far_nodes(group) for group in (seen, wanted)]
    doublings = float(np.log2(wanted.num_nodes / seen.num_nodes))
    on_cards = np.minimum(times - least, far_nbytes[0] / links.network_bytes_per_s)
    crowded = np.exp(_CROWDED_LOG * doublings)
    by_cards = on_cards * crowded * far_nbytes[1] / np.maximum(far_nbytes[0], 1e-300)
    by_copies = (times - least) * copies[1] / copies[0]
    growth = (1.0 + _LATENCY_GROWTH * abs(doublings)) ** np.sign(doublings)
    return least * growth + np.maximum(by_cards, by_copies)
