"""Orders: many ranks in threads over one real store; all of them act at the same step, or none."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_schema import check
from torch.distributed import HashStore

from forerun.calib.records.run_values import MARKER
from forerun.calib.workload.run_options import OnAdvice
from forerun.hooks.control.orders import OrderKind, Orders, Proposal
from forerun.hooks.process.guard import MAX_FAULTS, Guard
from forerun.hooks.process.host import Host
from forerun.hooks.process.launch_identity import launch_folder
from forerun.hooks.process.settings import RankInfo, Settings
from forerun.hooks.process.votes import LATE, YES, Votes
from forerun.launch.verbs.arguments import file_schema

NUM_RANKS = 3
STOP = {"order": "stop", "reason": "late by 1 h", "rule": "deadline", "command": ["t.py", "--x"]}
WINDOW = {"order": "window", "reason": "again"}


LAUNCH = "launch-1"


def marker_of(directory: Path) -> Path:
    return launch_folder(directory, LAUNCH) / MARKER


class Link:
    """Every rank's way to the same store."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def connect(self) -> HashStore:
        return self._store


class Rank:
    """One rank: a loop that steps, and what it was told at which step."""

    def __init__(self, directory: Path, rank: int, world: int, orders: list[Any]) -> None:
        self.guard = Guard()
        settings = Settings(
            rank=RankInfo(
                rank=rank, world_size=world, local_rank=rank, local_world_size=world, run_id="r"
            ),
            directory=directory,
            on_advice=OnAdvice.STOP,
        )
        self._given = orders if rank == world - 1 else []
        self.orders = Orders(settings, self.guard, self._receive, lambda: LAUNCH)
        self.stopped: list[int] = []
        self.opened: list[int] = []
        self.number = 0

    def _receive(self) -> list[dict[str, Any]]:
        given, self._given[:] = list(self._given), []
        return given

    def host(self) -> Host:
        return Host(stop=self._stop)

    def _stop(self) -> bool:
        self.stopped.append(self.number)
        return True

    def train(self, num_steps: int) -> None:
        for self.number in range(num_steps):
            if self.orders.begin_step(self.number):
                self.opened.append(self.number)
            time.sleep(0.002)
            self.orders.end_step(self.number)
            if self.stopped:
                break
        self.orders.close()


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Rank]]:
    link = Link(HashStore())
    monkeypatch.setattr("forerun.hooks.control.orders.find_link", lambda key: link)
    monkeypatch.setattr("forerun.hooks.control.orders.PAUSE_S", 0.02)

    def train(
        *given: dict[str, Any],
        world: int = NUM_RANKS,
        prepare: Callable[[list[Rank]], object] = lambda ranks: None,
        num_steps: int = 500,
    ) -> list[Rank]:
        ranks = [Rank(tmp_path, rank, world, list(given)) for rank in range(world)]
        for rank in ranks:
            rank.orders.describe(rank.host())
            rank.orders.listen()
        prepare(ranks)
        threads = [threading.Thread(target=rank.train, args=(num_steps,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ranks

    return train


@pytest.mark.parametrize("world", [1, NUM_RANKS])
def test_all_ranks_stop_after_the_same_step(
    trained: Callable[..., list[Rank]], tmp_path: Path, world: int
) -> None:
    ranks = trained(STOP, world=world)
    (step,) = {step for rank in ranks for step in rank.stopped}
    assert [len(rank.stopped) for rank in ranks] == [1] * world
    marker = json.loads(marker_of(tmp_path).read_text(encoding="utf-8"))
    check(marker, file_schema("stop"))
    assert abs(marker.pop("unix_s") - time.time()) < 600 and marker.pop("iso")
    assert marker == {
        "launch_id": LAUNCH,
        "schema": 1, "run_id": "r", "iteration": step + 1, "reason": "late by 1 h",
        "rule": "deadline", "command": ["t.py", "--x"],
    }  # fmt: skip


def test_a_window_opens_on_all_ranks_with_the_same_step_and_training_goes_on(
    trained: Callable[..., list[Rank]], tmp_path: Path
) -> None:
    ranks = trained(WINDOW)
    assert len({tuple(rank.opened) for rank in ranks}) == 1
    assert len(ranks[0].opened) == 1
    assert not any(rank.stopped for rank in ranks) and not marker_of(tmp_path).exists()


@pytest.mark.parametrize("world", [1, NUM_RANKS])
def test_a_stop_that_comes_while_a_window_is_agreed_on_is_not_lost(
    trained: Callable[..., list[Rank]], world: int
) -> None:
    def receive(orders: Orders, given: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*itertools.islice(given, 1)] if orders._course is not None else []

    def prepare(ranks: list[Rank]) -> None:
        last, later = ranks[-1].orders, iter([STOP])
        first = last._receive
        last._receive = lambda: first() or receive(last, later)

    ranks = trained(WINDOW, world=world, prepare=prepare)
    assert [len(rank.opened) for rank in ranks] == [1] * world
    assert len({tuple(rank.stopped) for rank in ranks}) == 1 and ranks[0].stopped


def test_one_rank_whose_hooks_are_off_keeps_all_from_stopping(
    trained: Callable[..., list[Rank]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trip(ranks: list[Rank]) -> None:
        for _ in range(MAX_FAULTS):
            ranks[1].guard.fault(RuntimeError("planted"))

    ranks = trained(STOP, prepare=trip)
    assert not any(rank.stopped for rank in ranks)
    assert "stop not followed: the hooks of rank 1 were removed" in capsys.readouterr().out
    assert not marker_of(tmp_path).exists()


def test_a_rank_that_does_not_listen_keeps_all_from_stopping_and_holds_nobody_up(
    trained: Callable[..., list[Rank]],
) -> None:
    ranks = trained(STOP, prepare=lambda ranks: ranks[0].orders.leave())
    assert not any(rank.stopped for rank in ranks)
    assert [rank.number for rank in ranks] == [499] * NUM_RANKS


def test_a_rank_that_is_off_after_it_has_agreed_still_stops(
    trained: Callable[..., list[Rank]],
) -> None:
    def trip_later(ranks: list[Rank]) -> None:
        orders, guard = ranks[0].orders, ranks[0].guard
        begin = orders.begin_step

        def begin_step(number: int) -> bool:
            if orders._course is not None and orders._course.outcome == YES:
                guard.fault(RuntimeError("planted"))
            return begin(number)

        orders.begin_step = begin_step

    ranks = trained(STOP, prepare=trip_later)
    assert ranks[0].guard.is_tripped
    assert len({tuple(rank.stopped) for rank in ranks}) == 1 and ranks[0].stopped


def test_a_loop_that_asks_is_told_after_the_same_step_on_all_ranks(
    trained: Callable[..., list[Rank]],
) -> None:
    def ask_instead(ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.orders.describe(Host())
            end = rank.orders.end_step

            def end_step(number: int, rank: Rank = rank, end: Any = end) -> None:
                end(number)
                if rank.orders.ask():
                    rank.stopped.append(number)

            rank.orders.end_step = end_step

    ranks = trained(STOP, prepare=ask_instead)
    assert len({tuple(rank.stopped) for rank in ranks}) == 1 and ranks[0].stopped


def test_a_loop_that_never_asks_is_not_said_to_have_stopped(
    trained: Callable[..., list[Rank]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_way(ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.orders.describe(Host())

    trained(STOP, prepare=no_way)
    assert "never asks should_stop()" in capsys.readouterr().out
    assert not marker_of(tmp_path).exists()


@given(
    moves=st.lists(
        st.tuples(st.integers(0, NUM_RANKS - 1), st.sampled_from(["accept", "refuse", "look"])),
        max_size=12,
    )
)
def test_whatever_ranks_do_and_in_which_order_none_reads_another_outcome(
    moves: list[tuple[int, str]],
) -> None:
    ballots = Votes(HashStore(), "order", num_ranks=NUM_RANKS)
    proposal = Proposal(kind=OrderKind.STOP, step=9, settle=7)
    ballots.propose(0, proposal.to_text())
    assert Proposal.from_text(ballots.proposal(0)) == proposal and not ballots.proposal(1)
    accepted, read = set[int](), set[str]()
    for rank, move in moves:
        if move == "refuse":
            read.add(ballots.refuse(0, LATE))
        elif move == "look" or rank in accepted:
            read.add(ballots.outcome(0))
        else:
            accepted.add(rank)
            read.add(ballots.accept(0))
    read.discard("")
    assert len(read) <= 1
    assert YES not in read or len(accepted) == NUM_RANKS


def test_runs_that_never_stop_or_reopen_have_no_thread(tmp_path: Path) -> None:
    rank = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, run_id="r")
    for choice in (OnAdvice.LOG, OnAdvice.ALERT):
        settings = Settings(rank=rank, directory=tmp_path, on_advice=choice, every=0)
        orders = Orders(settings, Guard(), list, str)
        before = threading.active_count()
        orders.listen()
        assert threading.active_count() == before and not orders.begin_step(0)
