"""Loaders that are watched: their length is what they run out at, and nothing else changes."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from unaskable import Unaskable, refuse

from forerun.calib.records.record_kinds import DataLength
from forerun.hooks.process.guard import Guard
from forerun.hooks.session.data_watch import DataWatch, LoaderProgress


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


def train(watch: DataWatch, loader: Any, accumulated: int, before: Any = None) -> LoaderProgress:
    """Train until the watch ends and return its result; each step first draws from ``before``."""
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
    assert train(watch, loader, accumulated) == LoaderProgress(
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
    seen_data = train(watch, DataLoader(Rows(30)), 3, before=other)
    assert seen_data.steps == 10


@pytest.mark.parametrize("kind", [Stream, SizedStream])
def test_a_stream_has_no_length_until_a_pass_over_it_has_ended(
    watch: DataWatch, kind: type[Stream]
) -> None:
    loader = DataLoader(kind(30), batch_size=2)
    seen_data = train(watch, loader, 1)
    assert (seen_data.length, seen_data.steps) == (DataLength.NONE, 0)
    # torch's loader remembers that it was asked, and then warns of later batches.
    assert loader._IterableDataset_len_called is None
    assert sum(1 for _ in loader) == 15
    next(iter(loader))
    watch.end_step()
    assert (watch.seen().length, watch.seen().steps) == (DataLength.KNOWN, 15)


@pytest.mark.parametrize("kind", [TypeError, NotImplementedError, ZeroDivisionError])
def test_data_that_fail_to_say_their_length_are_not_asked(kind: type[Exception]) -> None:
    guard = Guard()
    watch = DataWatch(guard)
    watch.install()
    try:
        assert train(watch, DataLoader(Failing(kind)), 1).length is DataLength.NONE
    finally:
        watch.remove()
    assert guard.num_faults == 0


def shard(data: Any) -> DistributedSampler:
    return DistributedSampler(data, num_replicas=2, rank=1)


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "sequential": SequentialSampler,
    "random": RandomSampler,
    "some": lambda data: RandomSampler(data, num_samples=17),
    "again": lambda data: RandomSampler(data, replacement=True, num_samples=70),
    "replaced": lambda data: RandomSampler(data, replacement=True),
    "subset": lambda data: SubsetRandomSampler(range(3, 26)),
    "tensor": lambda data: SubsetRandomSampler(torch.arange(19)),  # type: ignore[arg-type]
    "weighted": lambda data: WeightedRandomSampler([1.0] * len(data), 22),
    "shard": shard,
    "shard in order": lambda data: DistributedSampler(data, 3, 0, shuffle=False, drop_last=True),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("batch", [None, 1, 4, 5, 100])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samplers_of_torchs_tell_the_length_before_the_first_pass_is_over(
    watch: DataWatch, name: str, batch: int | None, drop_last: bool
) -> None:
    data = Rows(31)
    is_dropping = drop_last and batch is not None
    loader = DataLoader(data, batch_size=batch, sampler=SAMPLERS[name](data), drop_last=is_dropping)
    if not len(loader):
        return
    next(iter(loader))
    watch.end_step()
    assert (watch.seen().length, watch.seen().steps) == (DataLength.KNOWN, len(loader))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 60])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_workers_that_draw_ahead_change_no_length(
    watch: DataWatch, rows: int, shuffle: bool, keeps: bool
) -> None:
    loader = DataLoader(
        Rows(rows), batch_size=2, shuffle=shuffle, num_workers=2, persistent_workers=keeps
    )
    for _ in range(2 if keeps else 1):
        results = []
        for _ in loader:
            watch.end_step()
            results.append(watch.seen())
        assert {(one.length, one.steps) for one in results} == {(DataLength.KNOWN, len(loader))}
        assert len({one.end for one in results}) == 1  # the same at each step of a pass


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5], torch.arange(5), TensorDataset(torch.ones(5))])
def test_data_of_any_kind_are_counted(watch: DataWatch, data: Any) -> None:
    assert train(watch, DataLoader(data, batch_size=2), 1).steps == 3


class Bucket:
    """Batches of like length: how many is asked of a pass, which draws."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(24).tolist()
        return iter([order[i : i + 4] for i in range(0, 24, 4)])

    __len__ = refuse


class Bare(RandomSampler):
    """A sampler of torch's, until its class is looked at."""

    __len__ = refuse
    num_samples = property(refuse)  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(24).tolist())


def test_samplers_of_the_users_are_not_asked() -> None:
    def drawn(watch: DataWatch | None) -> tuple[list[Any], list[int]]:
        torch.manual_seed(7)
        data, results = Rows(24), []
        user_sampler = Bare.__new__(Bare)
        loaders = (
            DataLoader(data, batch_sampler=Bucket()),
            DataLoader(data, 4, sampler=user_sampler),
        )
        for loader, _ in itertools.product(loaders, range(2)):
            for batch in loader:
                results.append(batch.flatten().tolist())
                if watch is not None:
                    watch.end_step()
                    lengths.append(watch.seen().steps)
        return results, torch.get_rng_state().tolist()

    lengths: list[int] = []
    bare, guard = drawn(None), Guard()
    watch = DataWatch(guard)
    watch.install()
    try:
        assert drawn(watch) == bare
    finally:
        watch.remove()
    assert lengths == [*[0] * 6, *[6] * 6] * 2  # the second pass is as long as the first was
    assert guard.num_faults == 0


def test_nothing_that_an_iterator_holds_is_asked() -> None:
    guard = Guard()
    watch = DataWatch(guard)
    watch.install()
    try:
        iterator = Iterating()
        for _ in range(3):
            assert type(next(iterator)) is Unaskable
            watch.end_step()
        assert watch.seen() == LoaderProgress(length=DataLength.NONE)
    finally:
        watch.remove()
    assert guard.num_faults == 0


class Iterating(_BaseDataLoaderIter):
    """An iterator of torch's, over what answers to nothing."""

    def __init__(self) -> None:
        names = ("_index_sampler", "_dataset", "_sampler_iter", "_collate_fn")
        vars(self).update({name: Unaskable() for name in names})
        vars(self).update(_dataset_kind=0, _num_yielded=0, _profile_name="drawn")

    def _next_data(self) -> Any:
        return Unaskable()


def test_without_a_loader_nothing_is_seen(watch: DataWatch) -> None:
    watch.end_step()
    assert watch.seen() == LoaderProgress(length=DataLength.UNSEEN)


def test_batches_and_random_state_are_those_of_the_bare_loader() -> None:
    def drawn(watch: DataWatch | None) -> tuple[list[list[int]], list[int]]:
        torch.manual_seed(5)
        data = Rows(50)
        loader = DataLoader(data, batch_size=4, sampler=RandomSampler(data))
        results = []
        for batch in loader:
            results.append(batch.flatten().tolist())
            if watch is not None:
                watch.end_step()
        return results, torch.get_rng_state().tolist()

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


def test_one_private_method_is_replaced_and_comes_back() -> None:
    owners = DataLoader, _BaseDataLoaderIter
    bare = [dict(vars(owner)) for owner in owners]
    watch = DataWatch(Guard())
    watch.install()
    assert vars(DataLoader) == bare[0]
    changed = {name for name, value in vars(owners[1]).items() if bare[1].get(name) is not value}
    assert changed == {"__next__"}
    watch.remove()
    assert [dict(vars(owner)) for owner in owners] == bare
