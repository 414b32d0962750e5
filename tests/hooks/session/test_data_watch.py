"""Loaders that are watched: their length is what they run out at, and nothing else changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from forerun.calib.records.record_kinds import DataLength
from forerun.hooks.process.guard import Guard
from forerun.hooks.session.data_watch import DataSeen, DataWatch


class Rows(Dataset[torch.Tensor]):
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([number]) for number in range(self.num_rows))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.num_rows


class Failing(Stream):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__(9)
        self.error = error

    def __len__(self) -> int:
        raise self.error("no length today")


@pytest.fixture
def watch() -> Iterator[DataWatch]:
    watch = DataWatch(Guard())
    watch.install()
    yield watch
    watch.remove()


def train(watch: DataWatch, loader: Any, accumulated: int, before: Any = None) -> DataSeen:
    """What is seen after as many steps as it takes; ``before`` each of them, a batch is drawn."""
    batches = iter(loader)
    while not watch.is_over:
        if before is not None:
            next(iter(before))
        for _ in range(accumulated):
            next(batches)
        watch.end_step()
    return watch.seen()


@pytest.mark.parametrize(
    ("rows", "batch", "drop_last", "accumulated"),
    [*itertools.product((24, 25, 31), (1, 3), (False, True), (1, 2))],
)
def test_the_end_of_a_pass_is_where_the_loader_runs_out(
    watch: DataWatch, rows: int, batch: int, drop_last: bool, accumulated: int
) -> None:
    loader = DataLoader(Rows(rows), batch_size=batch, drop_last=drop_last, shuffle=True)
    count = sum(1 for _ in loader)
    whole = count // accumulated
    assert train(watch, loader, accumulated) == DataSeen(
        length=DataLength.KNOWN,
        end=whole,
        steps=whole,
        samples=batch * accumulated,
        tokens=batch * accumulated,  # rows of one number
    )


def test_a_loop_that_looks_one_batch_ahead_has_the_same_length(watch: DataWatch) -> None:
    loader = DataLoader(Rows(40), batch_size=2)
    batches = iter(loader)
    next(batches)
    for _ in range(2):
        next(batches)
        watch.end_step()
    assert watch.seen().steps == 20 and watch.seen().end in (19, 20)


def test_a_loader_that_evaluates_is_not_the_one_that_trains(watch: DataWatch) -> None:
    other = DataLoader(Rows(7))
    found = train(watch, DataLoader(Rows(30)), 3, before=other)
    assert found.steps == 10


@pytest.mark.parametrize(("kind", "length"), [(Stream, "none"), (SizedStream, "known")])
def test_a_stream_has_the_length_that_it_says(
    watch: DataWatch, kind: type[Stream], length: str
) -> None:
    loader = DataLoader(kind(30), batch_size=2)
    found = train(watch, loader, 1)
    assert found.length is DataLength(length)
    assert found.steps == (15 if kind is SizedStream else 0)
    # torch's loader remembers that it was asked, and then warns of later batches.
    assert loader._IterableDataset_len_called is None


@pytest.mark.parametrize("kind", [TypeError, NotImplementedError, ZeroDivisionError])
def test_data_that_fail_to_say_their_length_have_none(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard()
    watch = DataWatch(guard)
    watch.install()
    try:
        assert train(watch, DataLoader(Failing(kind)), 1).length is DataLength.NONE
    finally:
        watch.remove()
    is_fault = kind is ZeroDivisionError  # the others say that there is none
    assert guard.num_faults == is_fault == ("no length today" in caplog.text)


def test_without_a_loader_nothing_is_seen(watch: DataWatch) -> None:
    watch.end_step()
    assert watch.seen() == DataSeen(length=DataLength.UNSEEN)


def test_batches_and_random_state_are_those_of_the_bare_loader() -> None:
    def drawn(watch: DataWatch | None) -> tuple[list[list[int]], list[int]]:
        torch.manual_seed(5)
        data = Rows(50)
        loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data))
        found = []
        for batch in loader:
            found.append(batch.flatten().tolist())
            if watch is not None:
                watch.end_step()
        return found, torch.get_rng_state().tolist()

    bare = drawn(None)
    watch = DataWatch(Guard())
    watch.install()
    try:
        assert drawn(watch) == bare
    finally:
        watch.remove()


def test_loaders_and_data_die_while_they_are_watched(watch: DataWatch) -> None:
    loader = DataLoader(Rows(12))
    batches = iter(loader)
    next(batches)
    watch.end_step()
    known = [weakref.ref(thing) for thing in (loader, loader.dataset, batches)]
    del loader, batches
    gc.collect()
    assert [find() for find in known] == [None] * 3


def test_torchs_methods_come_back() -> None:
    bare = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    watch = DataWatch(Guard())
    watch.install()
    assert (DataLoader.__iter__, _BaseDataLoaderIter.__next__) != bare
    watch.remove()
    assert (DataLoader.__iter__, _BaseDataLoaderIter.__next__) == bare
