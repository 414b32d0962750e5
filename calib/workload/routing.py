"""Where the tokens of a layer of experts go, as far as counting alone tells it."""

from __future__ import annotations


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
