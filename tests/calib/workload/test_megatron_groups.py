"""Process groups against those of the real ``megatron.core``, over random layouts."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.calib.workload.ranks import group

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]
DEGREES = st.sampled_from([1, 2, 3, 4])


@cache
def megatron() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("megatron.core.parallel_state")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_group_is_that_of_megatrons_rank_generator(data: st.DataObject) -> None:
    par = data.draw(parallelisms())
    rank = data.draw(st.integers(0, par.num_ranks - 1))
    for role, (generator, token) in generators(par).items():
        assert group(par, role, rank) == group_of_rank(generator.get_ranks(token), rank), role


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_instances=st.sampled_from([2, 3, 4]))
def test_optimizer_instances_cut_the_groups_as_megatron_does(
    data: st.DataObject, num_instances: int
) -> None:
    plain = data.draw(parallelisms())
    par = replace(plain, dp=plain.dp * num_instances, num_optimizer_instances=num_instances)
    rank = data.draw(st.integers(0, par.num_ranks - 1))
    roles = generators(par)
    for role in (GroupRole.DP, GroupRole.EXPERT_DP):
        generator, token = roles[role]
        whole = group_of_rank(generator.get_ranks(token), rank)
        size = len(whole) // num_instances
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert group(par, role, rank) in parts and rank in group(par, role, rank)
    across = group(par, GroupRole.DP_INSTANCES, rank)
    assert across == whole[whole.index(rank) % size :: size]


def test_embedding_ranks_are_megatrons() -> None:
    par = Parallelism(tp=2, dp=2, pp=4)
    for rank in range(par.num_ranks):
        ends = tuple(megatron().default_embedding_ranks(list(group(par, GroupRole.PP, rank))))
        assert group(par, GroupRole.EMBEDDING, rank) == (ends if rank in ends else ())


@st.composite
def parallelisms(draw: st.DrawFn) -> Parallelism:
    """Layouts that Megatron accepts, experts with a split of their own."""
    tp, cp, dp, pp = (draw(DEGREES) for _ in range(4))
    etp, ep = draw(DEGREES), draw(DEGREES)
    assume(tp * cp * dp % (etp * ep) == 0)
    is_pipeline_first = draw(st.booleans())
    # Megatron refuses a pipeline before data where experts have other replicas than the rest.
    same = etp * ep == tp * cp
    return Parallelism(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        is_pipeline_before_data=is_pipeline_first and (pp == 1 or same),
    )


def generators(par: Parallelism) -> dict[GroupRole, tuple[Any, str]]:
    """Megatron's generator and token for each role."""
    order = "tp-cp-ep-pp-dp" if par.is_pipeline_before_data else "tp-cp-ep-dp-pp"
    RankGenerator = megatron().RankGenerator
    dense = RankGenerator(tp=par.tp, ep=1, dp=par.dp, pp=par.pp, cp=par.cp, order=order)
    expert = RankGenerator(
        tp=par.expert_tp, ep=par.ep, dp=par.expert_dp, pp=par.pp, cp=1, order=order
    )
    return {
        GroupRole.TP: (dense, "tp"),
        GroupRole.CP: (dense, "cp"),
        GroupRole.DP: (dense, "dp-cp"),
        GroupRole.PP: (dense, "pp"),
        GroupRole.MODEL: (dense, "tp-pp"),
        GroupRole.EXPERT_TP: (expert, "tp"),
        GroupRole.EP: (expert, "ep"),
        GroupRole.EXPERT_TP_EP: (expert, "tp-ep"),
        GroupRole.EXPERT_DP: (expert, "dp"),
    }


def group_of_rank(groups: list[list[int]], rank: int) -> tuple[int, ...]:
    (results,) = (ranks for ranks in groups if rank in ranks)
    return tuple(results)
