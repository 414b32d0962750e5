"""Messages of ranks over a store: collected, bounded, and never in the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from forerun.calib.records.packed import unpacked
from forerun.calib.workload.parallelism import Parallelism
from forerun.calib.workload.recording import MESSAGE_NBYTES, recording_plan
from forerun.hooks.process.settings import RankInfo
from forerun.hooks.process.votes import StoreLink, find_link
from forerun.hooks.recording import exchange as module
from forerun.hooks.recording.exchange import Exchange

WORLD = 32
PLAN = recording_plan(WORLD, Parallelism(tp=2, pp=2, dp=8))
LAST = WORLD - 1


@pytest.fixture(autouse=True)
def no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPREAD_S", 0.0)
    monkeypatch.setattr(module, "_TICK_S", 0.01)


def end(rank: int, folder: Path, store: object, *, run_id: str = "r-0") -> Exchange:
    info = RankInfo(rank=rank, world_size=WORLD, local_rank=0, local_world_size=8, run_id=run_id)
    made = Exchange(info, folder)
    made.begin(PLAN)
    made._link = None if store is None else StoreLink(store, run_id)
    return made


def text(rank: int, word: str = "line") -> str:
    return json.dumps({"rank": rank, "word": word}) + "\n"


def send(ranks: object, folder: Path, store: object, *, window: int = 0, **more: str) -> None:
    for rank in ranks:  # type: ignore[attr-defined]
        sender = end(rank, folder, store)
        sender.hand_over(window, text(rank, **more))
        sender.poll()


@pytest.fixture
def server() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def words(folder: Path) -> dict[int, list[str]]:
    """Return the words that the collector has written, by rank."""
    result: dict[int, list[str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in unpacked(path.read_text().splitlines(keepends=True)):
            row = json.loads(line)
            result.setdefault(row["rank"], []).append(row["word"])
    return result


@pytest.mark.slow  # a connection for each rank: seconds where names are slow to look up
def test_all_without_a_file_get_one_together(tmp_path: Path, server: TCPStore) -> None:
    done: list[bool] = []
    home = end(LAST, tmp_path, server)
    home.hand_over(0, text(LAST), on_complete=lambda: done.append(True))
    home.poll()
    assert not done
    send(range(LAST), tmp_path, server)
    home.finish()
    assert done == [True]
    watchers = [rank for rank in range(LAST) if rank not in PLAN.parts]
    assert words(tmp_path) == {rank: ["line"] for rank in watchers}
    assert {path.name for path in tmp_path.iterdir()} == {"summaries.jsonl"}
    assert not any(server.check([f"forerun/r-0/{rank}"]) for rank in range(WORLD))
    assert home.num_received_nbytes == sum(len(text(rank)) + 2 for rank in range(LAST))


def test_a_rank_that_has_died_is_named_and_the_others_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, done = HashStore(), []
    send((rank for rank in range(LAST) if rank not in (4, 9)), tmp_path, store)
    home = end(LAST, tmp_path, store)
    home.hand_over(0, text(LAST), on_complete=lambda: done.append(True))
    with caplog.at_level(logging.WARNING):
        home.finish(patience_s=0.5)
    assert done == [True]
    watchers = [rank for rank in range(LAST) if rank not in (4, 9, *PLAN.parts)]
    assert sorted(words(tmp_path)) == watchers
    assert "no message of window 0 from 2 ranks: 4, 9;" in caplog.text


def test_patience_ends_without_the_end_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    done: list[bool] = []
    home = end(LAST, tmp_path, HashStore())
    home.hand_over(0, text(LAST), on_complete=lambda: done.append(True))
    home.poll()
    assert done == [True]


@pytest.mark.parametrize("kind", ["none", "gone"])
def test_without_a_store_it_is_said_once_and_nothing_waits(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    monkeypatch.setattr(module.time, "sleep", naps.append)
    store: TCPStore | None = None
    if kind == "gone":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done: list[int] = []
    home, sender = end(LAST, tmp_path, store), end(3, tmp_path, store)
    del store
    with caplog.at_level(logging.WARNING):
        for window in range(3):
            sender.hand_over(window, text(3))
            sender.poll()
            home.hand_over(window, text(LAST), on_complete=lambda w=window: done.append(w))
            home.poll()
        home.finish()
        sender.finish()
    assert done == [0, 1, 2]
    assert not naps
    assert len(caplog.records) == 2  # one of either end
    assert "exchange between ranks" in caplog.text


def test_a_message_of_an_earlier_window_is_kept_and_the_later_one_waited_for(
    tmp_path: Path,
) -> None:
    store, done = HashStore(), []
    send(range(LAST), tmp_path, store, window=1, word="new")
    send([6], tmp_path, store, window=0, word="old")
    home = end(LAST, tmp_path, store)
    home.hand_over(1, text(LAST), on_complete=lambda: done.append(True))
    home.poll()
    assert not done
    send([6], tmp_path, store, window=1, word="new")
    home.finish()
    assert done == [True]
    assert words(tmp_path)[6] == ["old", "new"]
    assert words(tmp_path)[7] == ["new"]


def test_the_next_window_ends_the_patience_for_the_last_one(tmp_path: Path) -> None:
    store, done = HashStore(), []
    home = end(LAST, tmp_path, store)
    for window in range(3):
        home.hand_over(window, text(LAST), on_complete=lambda w=window: done.append(w))
    assert done == [0, 1]


def test_launches_do_not_read_each_others_messages(tmp_path: Path) -> None:
    store = HashStore()
    send(range(LAST), tmp_path, store)
    home = end(LAST, tmp_path, store, run_id="r-1")
    home.hand_over(0, text(LAST))
    home.finish(patience_s=0.05)
    assert words(tmp_path) == {}


@pytest.mark.slow
def test_a_run_of_many_windows_leaves_one_message_per_rank_in_the_store(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    before = store.num_keys()
    for window in range(5):
        send(range(4), tmp_path, store, window=window)
    assert store.num_keys() - before == 4


def test_summaries_of_old_windows_go_when_the_file_would_grow_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SUMMARIES_NBYTES", 700)
    store = HashStore()
    home = end(LAST, tmp_path, store)
    for window in range(6):
        send(range(LAST), tmp_path, store, window=window, word=f"w{window}")
        home.hand_over(window, text(LAST))
        home.poll()
        assert (tmp_path / "summaries.jsonl").stat().st_size <= 700
    retained = words(tmp_path)[0]
    assert retained == [f"w{n}" for n in range(6)][-len(retained) :] and 1 <= len(retained) < 6


def test_a_message_above_the_bound_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = HashStore()
    sender = end(3, tmp_path, store)
    with caplog.at_level(logging.WARNING):
        sender.hand_over(0, "x" * (MESSAGE_NBYTES + 1))
        sender.finish()
    assert not PrefixStore("forerun/r-0", store).check(["3"])
    assert f"larger than {MESSAGE_NBYTES}" in caplog.text


def test_nothing_is_waited_for_where_a_key_is_not_there() -> None:
    store = HashStore()
    store.set_timeout(timedelta(hours=1))  # to ask for a missing key outlasts this test's limit
    assert module.read_values(store, ["a", "b"]) is None
    store.set("a", "1")
    assert module.read_values(store, ["a", "b"]) is None
    assert module.read_values(store, ["a"]) == [b"1"]


def test_without_a_process_group_there_is_no_link() -> None:
    assert find_link("r") is None
