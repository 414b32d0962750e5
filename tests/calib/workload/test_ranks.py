from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.errors import ConfigError
from forerun.calib.workload.collectives import GroupRole
from forerun.calib.workload.config import Parallelism
from forerun.calib.workload.ranks import group, position, rank_at

DEGREES = st.sampled_from([1, 2, 3, 4])
ROLES = [GroupRole.TP, GroupRole.DP, GroupRole.PP, GroupRole.MODEL, GroupRole.WORLD]


@given(tp=DEGREES, dp=DEGREES, pp=DEGREES)
def test_positions_are_a_bijection(tp: int, dp: int, pp: int) -> None:
    parallelism = Parallelism(tp=tp, dp=dp, pp=pp)
    for rank in range(parallelism.num_ranks):
        assert rank_at(parallelism, position(parallelism, rank)) == rank


@given(tp=DEGREES, dp=DEGREES, pp=DEGREES, role=st.sampled_from(ROLES))
def test_groups_of_a_role_partition_the_ranks(tp: int, dp: int, pp: int, role: GroupRole) -> None:
    parallelism = Parallelism(tp=tp, dp=dp, pp=pp)
    seen = {group(parallelism, role, rank) for rank in range(parallelism.num_ranks)}
    members = sorted(rank for ranks in seen for rank in ranks)
    assert members == list(range(parallelism.num_ranks))


def test_the_embedding_group_joins_the_ends() -> None:
    parallelism = Parallelism(tp=2, dp=1, pp=3)
    assert group(parallelism, GroupRole.EMBEDDING, 4) == (0, 4)
    assert group(parallelism, GroupRole.EMBEDDING, 2) == ()
    assert group(Parallelism(tp=2), GroupRole.EMBEDDING, 1) == (1,)


def test_bad_questions_are_named() -> None:
    with pytest.raises(ConfigError, match="rank 8 is not in a layout of 8 ranks"):
        position(Parallelism(tp=8), 8)
    with pytest.raises(ConfigError, match="'other' has no fixed group"):
        group(Parallelism(tp=8), GroupRole.OTHER, 0)
