"""All ranks or none, at a real store: whoever is late, refuses, or asks for something else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from forerun.hooks.process.votes import Votes

RANKS = 5


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def vote_in_threads(
    store: dist.Store, votes: list[str], *, patience_s: float, number: int = 0
) -> list[bool]:
    """Every voter meets the others in a thread of its own."""

    def one(vote: str) -> bool:
        return Votes(store, "test", num_ranks=RANKS).meet(number, vote, patience_s=patience_s)

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, votes))


def test_all_agree_where_all_come(store: dist.Store) -> None:
    assert vote_in_threads(store, ["a"] * RANKS, patience_s=30.0) == [True] * RANKS


def test_nobody_goes_where_one_is_missing_and_the_late_one_hears_it(store: dist.Store) -> None:
    assert vote_in_threads(store, ["a"] * (RANKS - 1), patience_s=0.05) == [False] * (RANKS - 1)
    assert vote_in_threads(store, ["a"], patience_s=30.0) == [False]


def test_nobody_goes_where_plans_differ(store: dist.Store) -> None:
    assert vote_in_threads(store, [*"aaab", "a"], patience_s=30.0) == [False] * RANKS


def test_a_refusal_is_heard_without_waiting(store: dist.Store) -> None:
    Votes(store, "test", num_ranks=RANKS).refuse(0, "planted")
    assert vote_in_threads(store, ["a"] * (RANKS - 1), patience_s=1e9) == [False] * (RANKS - 1)


@pytest.mark.parametrize("patience_s", [0.0, 0.0003, 0.001])
def test_however_short_the_patience_all_hear_the_same(store: dist.Store, patience_s: float) -> None:
    for turn in range(20):
        heard = vote_in_threads(store, ["a"] * RANKS, patience_s=patience_s, number=turn)
        assert len(set(heard)) == 1
