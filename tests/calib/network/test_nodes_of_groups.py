"""Nodes of a group: counted from recorded ranks and from the layout they are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.calib.network.groups import num_nodes as nodes_of_span
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.calib.workload.ranks import group, num_nodes

PAR = Parallelism(tp=2, cp=2, dp=4, pp=2, ranks_per_node=8)


@pytest.mark.parametrize("role", [GroupRole.TP, GroupRole.CP, GroupRole.DP, GroupRole.PP])
@pytest.mark.parametrize(
    "par", [PAR, replace(PAR, ranks_per_node=4), replace(PAR, dp=8, ep=4, etp=1)]
)
def test_span_and_layout_count_the_same_nodes(par: Parallelism, role: GroupRole) -> None:
    ranks = group(par, role, 0)
    span = ranks[-1] - ranks[0] + 1
    assert min(len(ranks), nodes_of_span(span, par.ranks_per_node)) == num_nodes(par, role)
