"""Routing of tokens in an expert layer: imbalance over ranks, and combinatorial expectations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from .argument_values import QuickEnum
from .config import RunConfig
from .config_json import Encoded
from .model_shape import USUAL_IMBALANCE, Experts


class RoutingSource(QuickEnum):
    """Source of the imbalance of tokens over the ranks of the experts."""

    ONE_RANK = "one rank"
    """Each rank has all experts, so that ranks are balanced."""
    FORCED = "forced"
    """The router's choice is replaced by an even one, or rows are padded to the capacity."""
    MEASURED = "measured"
    """Counted in a run of the model, at this number of ranks or extrapolated to it."""
    STATED = "stated"
    """Given in a description or table (``Experts.imbalance``)."""
    ASSUMED = "assumed"
    """A router chooses and no count exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingBalance(Encoded):
    """Imbalance of tokens assumed for a layout, and its source."""

    source: RoutingSource
    imbalance: float
    """Tokens on the busiest rank over the mean of all."""

    @property
    def text(self) -> str:
        """Text for display.

        >>> RoutingBalance(source=RoutingSource.MEASURED, imbalance=1.314).text
        'routing measured: busiest rank 1.31 x the mean'
        >>> RoutingBalance(source=RoutingSource.ASSUMED, imbalance=1.6).text
        'routing assumed (nobody counted): busiest rank 1.60 x the mean'
        """
        if self.source is RoutingSource.ONE_RANK:
            return "each rank has all experts"
        if self.source is RoutingSource.FORCED:
            return "routing forced even"
        doubt = " (nobody counted)" if self.source is RoutingSource.ASSUMED else ""
        ratio = f"busiest rank {self.imbalance:.2f} x the mean"
        return f"routing {self.source.value}{doubt}: {ratio}"


def routed(config: RunConfig) -> RoutingBalance | None:
    """Return the imbalance over the ranks of a layout, with its source; None without experts."""
    experts, ep = config.model.experts, config.parallelism.ep
    if experts is None:
        return None
    return RoutingBalance(source=routing_source(experts, ep), imbalance=imbalance(experts, ep))


def routing_source(experts: Experts, num_ranks: int) -> RoutingSource:
    """Return the source of ``imbalance`` at that number of ranks: the one rule for all layouts."""
    if num_ranks == 1:
        return RoutingSource.ONE_RANK
    if experts.is_balance_forced or experts.is_padded_to_capacity:
        return RoutingSource.FORCED
    if experts.measured:
        return RoutingSource.MEASURED
    return RoutingSource.STATED if experts.imbalance else RoutingSource.ASSUMED


def imbalance(experts: Experts, num_ranks: int) -> float:
    """Return the tokens on the busiest of the experts' ranks over the mean of these ranks.

    A count at this number of ranks is returned as it is.  A count at another number is
    extrapolated: each of n ranks has e / n experts with independently varying shares, so that the
    excess of the busiest grows with the expected maximum of n values and falls with the root of
    experts per rank.  Without a count it is ``USUAL_IMBALANCE``.

    >>> experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64)
    >>> imbalance(experts, 1), imbalance(experts, 4)
    (1.0, 1.6)
    """
    source = routing_source(experts, num_ranks)
    if source in (RoutingSource.ONE_RANK, RoutingSource.FORCED):
        return 1.0
    if source is RoutingSource.STATED:
        return experts.imbalance
    if source is RoutingSource.ASSUMED:
        return min(USUAL_IMBALANCE, most_imbalance(experts, num_ranks))
    known = {load.num_ranks: load.in_pass for load in experts.measured}
    return _carried(experts, known, num_ranks)


def imbalance_over_layers(experts: Experts, num_ranks: int, num_layers: int) -> float:
    """Return the imbalance of all tokens that a rank retains in ``num_layers`` expert layers.

    Without a count, the excess falls with the root of the number of layers: the busiest rank of one
    layer is not that of the next, since each layer has a separate router.

    >>> experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64, imbalance=1.6)
    >>> [round(imbalance_over_layers(experts, 4, num_layers), 6) for num_layers in (1, 36)]
    [1.6, 1.1]
    """
    if routing_source(experts, num_ranks) is RoutingSource.MEASURED:
        known = {load.num_ranks: load.in_layers for load in experts.measured}
        return _carried(experts, known, num_ranks)
    excess = imbalance(experts, num_ranks) - 1.0
    return 1.0 + excess / math.sqrt(max(1, num_layers))


def most_imbalance(experts: Experts, num_ranks: int) -> float:
    """Return the largest possible imbalance: all tokens choose as many experts as fit on one rank,
    and no expert exceeds its capacity.

    >>> from dataclasses import replace
    >>> experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64)
    >>> most_imbalance(experts, 8), most_imbalance(replace(experts, capacity_factor=1.25), 8)
    (4.0, 1.25)
    """
    experts_per_rank = max(1, experts.num_experts // num_ranks)
    most = num_ranks * min(experts_per_rank, experts.top_k) / experts.top_k
    return min(most, max(1.0, experts.capacity_factor)) if experts.capacity_factor else most


def _carried(experts: Experts, known: dict[int, float], num_ranks: int) -> float:
    """Return the imbalance at a number of ranks: its count, else extrapolated from the nearest
    smaller number with a count, else from the smallest."""
    if num_ranks in known:
        return known[num_ranks]
    smaller = [number for number in known if 1 < number < num_ranks]
    at = max(smaller) if smaller else min((n for n in known if n > 1), default=num_ranks)
    excess = known.get(at, 1.0) - 1.0
    carried = 1.0 + excess * _unevenness(num_ranks) / _unevenness(at)
    return min(carried, most_imbalance(experts, num_ranks))


def _unevenness(num_ranks: int) -> float:
    """Return the excess of the busiest rank in units of one expert's deviation, up to a constant.

    The expected maximum of n normal values is Blom's score (Blom 1958), within 5 % from n = 2 on.
    """
    largest = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return largest * math.sqrt(num_ranks)


def expected_distinct(*, num_groups: int, num_chosen: int, group_size: int = 1) -> float:
    """Return the mean number of distinct groups among ``num_chosen`` members, drawn without
    replacement from ``num_groups`` groups of ``group_size`` members, each set equally likely.

    ``num_groups (1 - C(G s - s, k) / C(G s, k))``: the mean of a hypergeometric indicator summed
    over the groups.  With experts as members it is the number of nodes (or ranks) that receive a
    token under even routing, if the dispatcher sends each token once to a node.

    On four nodes with two experts each, two chosen experts lie on 1 or, 6 times in 7, on 2 nodes.

    >>> round(expected_distinct(num_groups=4, num_chosen=2, group_size=2), 6)
    1.857143
    >>> expected_distinct(num_groups=4, num_chosen=8, group_size=2)
    4.0
    >>> expected_distinct(num_groups=1, num_chosen=2, group_size=8)
    1.0
    """
    if num_groups < 1 or group_size < 1 or num_chosen < 1:
        return 0.0
    members = num_groups * group_size
    missed = 1.0
    for drawn in range(min(num_chosen, members)):
        missed *= max(members - group_size - drawn, 0) / (members - drawn)
    return num_groups * (1.0 - missed)
