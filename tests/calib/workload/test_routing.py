"""Distinct groups against every choice counted out, and loads of ranks against drawn ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from forerun.calib.workload.model_shape import USUAL_IMBALANCE, Experts, RankLoad
from forerun.calib.workload.routing import (
    RoutingSource,
    expected_distinct,
    imbalance,
    imbalance_over_layers,
    most_imbalance,
    routing_source,
)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_the_mean_is_that_of_all_choices(num_groups: int, group_size: int) -> None:
    members = num_groups * group_size
    for num_chosen in range(1, members + 1):
        choices = list(combinations(range(members), num_chosen))
        groups = sum(len({member // group_size for member in choice}) for choice in choices)
        value = expected_distinct(
            num_groups=num_groups, num_chosen=num_chosen, group_size=group_size
        )
        assert value == pytest.approx(groups / len(choices))


def test_nothing_chosen_goes_nowhere() -> None:
    assert expected_distinct(num_groups=4, num_chosen=0) == 0.0


EXPERTS = Experts(num_experts=64, top_k=4, ffn_hidden_size=64)


def simulated_imbalance(num_ranks: int) -> float:
    """Busiest rank over the mean where each expert's share differs by itself, mean over passes."""
    shares = np.random.default_rng(5).normal(1.0, 0.3, (4000, EXPERTS.num_experts))
    loads = shares.reshape(4000, num_ranks, -1).sum(axis=2)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


def counted(*num_ranks: int, **more: Any) -> Experts:
    loads = (
        RankLoad(num_ranks=n, in_pass=simulated_imbalance(n), in_layers=simulated_imbalance(n))
        for n in num_ranks
    )
    return replace(EXPERTS, measured=tuple(loads), **more)


@pytest.mark.parametrize("at", [4, 8])
@pytest.mark.parametrize("to", [2, 4, 8, 16, 32, 64])
def test_what_was_counted_is_carried_to_other_numbers_of_ranks(at: int, to: int) -> None:
    value = imbalance(counted(at), to)
    assert value - 1.0 == pytest.approx(simulated_imbalance(to) - 1.0, rel=0.1)


def test_where_it_was_counted_it_is_that() -> None:
    experts = counted(4, 8)
    assert imbalance(experts, 8) == simulated_imbalance(8)
    # From the nearest smaller number, whose ranks are split.
    assert imbalance(experts, 16) == imbalance(counted(8), 16)


def test_never_above_all_tokens_on_one_rank() -> None:
    load = RankLoad(num_ranks=2, in_pass=1.9, in_layers=1.9)
    experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=64, measured=(load,))
    assert imbalance(experts, 8) == most_imbalance(experts, 8) == 4.0


@pytest.mark.parametrize(
    ("changed", "source", "busiest"),
    [
        ({}, RoutingSource.ASSUMED, USUAL_IMBALANCE),
        ({"imbalance": 1.2}, RoutingSource.STATED, 1.2),
        ({"imbalance": 1.2, "is_balance_forced": True}, RoutingSource.FORCED, 1.0),
        (
            {"capacity_factor": 1.0, "is_padded_to_capacity": True},
            RoutingSource.FORCED,
            1.0,
        ),
    ],
)
def test_one_rule_says_what_a_layout_is_taken_to_have(
    changed: dict[str, Any], source: RoutingSource, busiest: float
) -> None:
    experts = replace(EXPERTS, **changed)
    assert (routing_source(experts, 4), imbalance(experts, 4)) == (source, busiest)
    assert routing_source(experts, 1) is RoutingSource.ONE_RANK
    assert imbalance(experts, 1) == imbalance_over_layers(experts, 1, 4) == 1.0


def test_what_was_counted_goes_before_what_was_stated() -> None:
    experts = counted(4, imbalance=1.2)
    assert routing_source(experts, 4) is RoutingSource.MEASURED
    assert imbalance(experts, 4) == simulated_imbalance(4)


def test_layers_even_each_other_out_where_a_rank_keeps_them_all() -> None:
    """Planted: each layer has busy experts of its own; the sum over sixteen is kept."""
    shares = np.random.default_rng(7).normal(1.0, 0.3, (500, 16, 8))
    stated = replace(EXPERTS, imbalance=float(shares.max(axis=2).mean()))
    mean_imbalance = float(shares.sum(axis=1).max(axis=1).mean()) / 16
    excess = imbalance_over_layers(stated, 8, 16) - 1.0
    assert excess == pytest.approx(mean_imbalance - 1.0, rel=0.1)
