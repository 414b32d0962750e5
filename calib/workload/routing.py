"""Where the tokens of a layer of experts go: by counting alone, and as a router spreads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from .argument_values import QuickEnum
from .config import RunConfig
from .config_json import Encoded
from .model_shape import USUAL_IMBALANCE, Experts


class RoutingSource(QuickEnum):
    """Whence it is known how evenly tokens spread over the ranks that hold the experts."""

    ONE_RANK = "one rank"
    """Each rank holds all experts: nothing is uneven between ranks."""
    FORCED = "forced"
    """The router's choice is replaced by an even one, or rows are padded to the capacity."""
    MEASURED = "measured"
    """Counted in a run of the model, at this number of ranks or carried to it."""
    STATED = "stated"
    """A table says it."""
    ASSUMED = "assumed"
    """A router chooses and nobody counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed(Encoded):
    """How tokens are taken to spread in a layout, and whence that is known."""

    source: RoutingSource
    imbalance: float
    """Tokens on the busiest rank over the mean of all."""

    @property
    def text(self) -> str:
        """For people.

        >>> Routed(source=RoutingSource.MEASURED, imbalance=1.314).text
        'routing measured: busiest rank 1.31 x the mean'
        >>> Routed(source=RoutingSource.ASSUMED, imbalance=1.6).text
        'routing assumed (nobody counted): busiest rank 1.60 x the mean'
        """
        if self.source is RoutingSource.ONE_RANK:
            return "each rank has all experts"
        if self.source is RoutingSource.FORCED:
            return "routing forced even"
        doubt = " (nobody counted)" if self.source is RoutingSource.ASSUMED else ""
        ratio = f"busiest rank {self.imbalance:.2f} x the mean"
        return f"routing {self.source.value}{doubt}: {ratio}"


def routed(config: RunConfig) -> Routed | None:
    """How tokens are taken to spread over the ranks of a layout; None without experts."""
    experts, ep = config.model.experts, config.parallelism.ep
    if experts is None:
        return None
    return Routed(source=routing_source(experts, ep), imbalance=imbalance(experts, ep))


def routing_source(experts: Experts, num_ranks: int) -> RoutingSource:
    """Whence ``imbalance`` of so many ranks comes: the one rule for all layouts."""
    if num_ranks == 1:
        return RoutingSource.ONE_RANK
    if experts.is_balance_forced or experts.is_padded_to_capacity:
        return RoutingSource.FORCED
    if experts.measured:
        return RoutingSource.MEASURED
    return RoutingSource.STATED if experts.imbalance else RoutingSource.ASSUMED


def imbalance(experts: Experts, num_ranks: int) -> float:
    """Tokens on the busiest of the ranks that the experts are spread over, over their mean.

    Counted at this number of ranks it is what was counted.  From another number it is carried: of
    ranks with e / n experts each, whose shares differ by themselves, the excess of the busiest
    grows with the expected largest of n and falls with the root of their experts.  Where nobody
    counted it is ``USUAL_IMBALANCE``.

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


def kept_imbalance(experts: Experts, num_ranks: int, num_layers: int) -> float:
    """The same of all tokens that a rank keeps in ``num_layers`` layers with experts.

    Where a run did not count it: a rank that is the busiest in one layer is not in the next, since
    each layer has a router of its own, so that the excess falls with the root of their number.

    >>> experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64, imbalance=1.6)
    >>> round(kept_imbalance(experts, 4, 1), 6), round(kept_imbalance(experts, 4, 36), 6)
    (1.6, 1.1)
    """
    if routing_source(experts, num_ranks) is RoutingSource.MEASURED:
        known = {load.num_ranks: load.in_layers for load in experts.measured}
        return _carried(experts, known, num_ranks)
    excess = imbalance(experts, num_ranks) - 1.0
    return 1.0 + excess / math.sqrt(max(1, num_layers))


def most_imbalance(experts: Experts, num_ranks: int) -> float:
    """The largest that there can be: all tokens have as many of their experts as fit on one rank,
    and experts take no more than their capacity.

    >>> from dataclasses import replace
    >>> experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64)
    >>> most_imbalance(experts, 8), most_imbalance(replace(experts, capacity_factor=1.25), 8)
    (4.0, 1.25)
    """
    held = max(1, experts.num_experts // num_ranks)
    most = num_ranks * min(held, experts.top_k) / experts.top_k
    return min(most, max(1.0, experts.capacity_factor)) if experts.capacity_factor else most


def _carried(experts: Experts, known: dict[int, float], num_ranks: int) -> float:
    """At a number of ranks: as counted, else from the nearest smaller number that was counted."""
    if num_ranks in known:
        return known[num_ranks]
    smaller = [number for number in known if 1 < number < num_ranks]
    at = max(smaller) if smaller else min((n for n in known if n > 1), default=num_ranks)
    excess = known.get(at, 1.0) - 1.0
    carried = 1.0 + excess * _unevenness(num_ranks) / _unevenness(at)
    return min(carried, most_imbalance(experts, num_ranks))


def _unevenness(num_ranks: int) -> float:
    """Excess of the busiest of ranks over that of one expert's deviation, up to a constant.

    The expected largest of n normal values by Blom's scores (Blom 1958): within 5 % from 2 on.
    """
    largest = NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
    return largest * math.sqrt(num_ranks)


def expected_distinct(*, num_groups: int, num_chosen: int, group_size: int = 1) -> float:
    """Mean number of different groups among ``num_chosen`` members, drawn without replacement from
    ``num_groups`` groups of ``group_size`` members, each set equally likely.

    ``num_groups (1 - C(G s - s, k) / C(G s, k))``: the mean of a hypergeometric indicator summed
    over the groups.  With experts as members it is how many nodes (or ranks) a token is sent to by
    a dispatcher that sends each token once to a node, where routing is even.

    Of four nodes with two experts each, two chosen experts lie on 1 or, 6 times in 7, on 2 nodes.

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
