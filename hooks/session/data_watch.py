"""Detection of the ``DataLoader`` that feeds a loop, its length, and its batches per step.

One private method beneath torch's loaders is replaced until the first steps have shown this.  It
passes results through: no batch is drawn, no random state is touched, no loader is kept alive, and
no method of a user's object is called.  The number of batches in a pass over a loader is read from
attributes of torch's own samplers: ``__len__`` of a user's data set or sampler may draw random
numbers, synchronise with other ranks or be slow.  Samplers that are not exactly of a torch class
are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    dataloader,
)

from ...calib.records.record_kinds import DataLength, LoopRecord
from ..process.guard import Guard
from ..process.host import Host, Reference, live_objects, reference, references
from ..process.inspection import contents, local_variable
from ..process.stand_ins import StandIns
from .chain import is_split
from .first_step import FirstStep, FrameworkSettings, batch_shape
from .session import Session

NUM_STEPS = 2
"""Steps to observe: the first may draw more, as with prefetching or a step skipped by a loss
scaler."""
_RANGE = type(iter(range(0)))
_MAP = 0
"""Kind of a data set with an index, as numbered by torch's loaders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """State of the loader that feeds a loop; steps are counted from the loop's first."""

    length: DataLength = DataLength.UNSEEN
    end: int = 0
    """Steps done by the end of the running pass; 0 if unknown."""
    steps: int = 0
    """Steps of a whole pass."""
    samples: int = 0
    """Samples of a step's batches, all taken to be like the first batch."""
    tokens: int = 0


@dataclass(slots=True)
class _Loader:
    """A loader that batches were drawn from."""

    alive: Reference
    """Its sampler, which lives as long as the loader; else the iterator of one pass."""
    num_batches: int | None
    """Batches of a pass; None if torch does not know and no pass has ended."""
    num_drawn: int = 0
    """Batches drawn in the running pass."""
    draws: tuple[int, ...] = ()
    """Batches drawn in each step so far."""
    num_in_step: int = 0
    shape: tuple[int, ...] = ()
    """Shape of its first batch: samples, and tokens of each if there are tokens."""


class DataWatch:
    """Counter of the batches of each loader, from ``install`` to ``remove``."""

    def __init__(self, guard: Guard) -> None:
        self._note, self._note_end = guard.protect(self._draw), guard.protect(self._end_pass)
        self._stand_ins = StandIns()
        self._loaders: dict[tuple[int, int], _Loader] = {}
        self._num_steps = 0

    def install(self) -> None:
        """Wrap the method, unless it is wrapped already."""
        self._stand_ins.put(_iterators(), _NEXT, self._following)

    def _following(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        note, note_end = self._note, self._note_end

        def following(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                note_end(iterator)
                raise
            note(iterator, batch)
            return batch

        return following

    def remove(self) -> None:
        """Restore the method, unless someone else has replaced it meanwhile."""
        self._stand_ins.remove()
        self._loaders = {}

    @property
    def is_over(self) -> bool:
        """True once enough steps have been counted."""
        return self._num_steps >= NUM_STEPS

    def end_step(self) -> None:
        """Count a step, after the optimizer's."""
        self._num_steps += 1
        for loader in self._loaders.values():
            loader.draws = (*loader.draws, loader.num_in_step)
            loader.num_in_step = 0

    def seen(self) -> LoaderProgress:
        """Return the progress of the loader with most batches in the last step."""
        drawn = [one for one in self._loaders.values() if one.draws and one.draws[-1]]
        loader = max(drawn, key=lambda one: one.draws[-1], default=None)
        if loader is None:
            return LoaderProgress()
        each = min(draws for draws in loader.draws if draws)
        samples, tokens = (*loader.shape, 0, 0)[:2]
        work = {"samples": each * samples, "tokens": each * samples * tokens}
        if not loader.num_batches:
            return LoaderProgress(length=DataLength.NONE, **work)
        remaining_steps = max(0, loader.num_batches - loader.num_drawn) // each
        return LoaderProgress(
            length=DataLength.KNOWN,
            end=self._num_steps + remaining_steps,
            steps=max(1, loader.num_batches // each),
            **work,
        )

    def _draw(self, iterator: Any, batch: Any) -> None:
        loader = self._loader_of(iterator)
        loader.num_drawn = contents(iterator)[_DRAWN]
        loader.num_in_step += 1
        loader.shape = loader.shape or batch_shape(batch)

    def _end_pass(self, iterator: Any) -> None:
        """Set the length of a loader from a complete pass."""
        drawn = contents(iterator)[_DRAWN]
        if drawn:
            loader = self._loader_of(iterator)
            loader.num_batches = loader.num_batches or drawn

    def _loader_of(self, iterator: Any) -> _Loader:
        """Return the loader of an iterator, identified by sampler and data set.

        If the sampler does not support weak references, each pass counts as a loader.
        """
        instance_dict = contents(iterator)
        owner = instance_dict.get("_index_sampler")
        if reference(owner)() is None:
            owner = iterator
        key = id(owner), id(instance_dict.get("_dataset"))
        known = self._loaders.get(key)
        if known is None or known.alive() is not owner:
            known = self._loaders[key] = _Loader(reference(owner), pass_length(iterator))
        return known


_NEXT, _DRAWN = "__next__", "_num_yielded"


def _iterators() -> Any:
    """Return the base class of all iterators of torch's loaders."""
    return getattr(dataloader, "_BaseDataLoaderIter", object)


def pass_length(iterator: Any) -> int | None:
    """Return the batches of the running pass, after some have been drawn; None if torch does not
    know."""
    instance_dict = contents(iterator)
    sampler, drawing = instance_dict.get("_index_sampler"), instance_dict.get("_sampler_iter")
    if instance_dict.get("_dataset_kind") != _MAP:
        return None
    inner = _local(drawing, "sampler_iter") if type(sampler) is BatchSampler else None
    if _has_ended(drawing) or _has_ended(inner):  # workers prefetch
        return _whole(instance_dict.get("_send_idx", instance_dict.get("_num_yielded")))
    if type(sampler) is not BatchSampler:
        return _num_rows(sampler, drawing)
    sampler_dict = contents(sampler)
    rows, size = (
        _num_rows(sampler_dict.get("sampler"), inner),
        _whole(sampler_dict.get("batch_size")),
    )
    if rows is None or not size:
        return None
    return rows // size if sampler_dict.get("drop_last") is True else -(-rows // size)


def _num_rows(sampler: Any, drawing: Any) -> int | None:
    """Return the rows in a pass of a sampler, whose iterator is ``drawing``."""
    kind, instance_dict = type(sampler), contents(sampler)
    if kind is WeightedRandomSampler or kind is DistributedSampler:
        return _whole(instance_dict.get("num_samples"))
    if kind is SubsetRandomSampler:
        return _num_indices(instance_dict.get("indices"))
    if kind is SequentialSampler and type(drawing) is _RANGE:
        state: Any = drawing.__reduce__()
        return state[1][0].stop
    if kind is RandomSampler:
        return _whole(instance_dict.get("_num_samples")) or _whole(_local(drawing, "n"))
    return None


def _num_indices(indices: Any) -> int | None:
    kind = type(indices)
    if kind is list or kind is tuple or kind is range:
        return len(indices)
    return indices.numel() if kind is torch.Tensor else None


def _has_ended(drawing: Any) -> bool:
    return type(drawing) is GeneratorType and drawing.gi_frame is None


def _local(drawing: Any, name: str) -> Any:
    """Return a local variable of a suspended torch generator."""
    if type(drawing) is not GeneratorType or drawing.gi_frame is None:
        return None
    return local_variable(drawing.gi_frame, name)


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


MakeHost = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Host]
"""Function that makes a host of an optimizer, the modules around its parameters, and a function
that returns the run's configuration."""


class LoopObserver:
    """Describes the run after its first step, and its loop once ``data`` is complete.

    No object of the user's is kept alive.  Whoever installed ``data`` reports the steps to it.
    Without ``sees_calls`` no hook is on the model: the batch is that of the loader.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        chain: tuple[Any, ...],
        known: FrameworkSettings,
        make_host: MakeHost,
        data: DataWatch | None = None,
        *,
        sees_calls: bool = True,
    ) -> None:
        self._session, self._known, self._make_host = session, known, make_host
        self._optimizer, self._chain = reference(optimizer), references(chain)
        self._data = data
        self._loop: LoopRecord | None = None
        self._is_split = False
        self._first: FirstStep | None = FirstStep(chain if sees_calls else (), session.guard)

    @property
    def is_over(self) -> bool:
        """True if nothing remains to be observed."""
        return self._first is None and self._loop is None

    def end_step(self) -> None:
        """Process a step, after the optimizer's."""
        if self._first is not None:
            self._describe(self._first)
        if self._loop is not None and (self._data is None or self._data.is_over):
            self._report(self._loop)

    def close(self) -> None:
        """Remove the remaining hooks, and report what is known so far."""
        first, self._first = self._first, None
        if first is not None:
            first.close()
        if self._loop is not None:
            self._report(self._loop)
        if self._data is not None:
            self._data.remove()

    def _describe(self, first: FirstStep) -> None:
        self._first = None
        first.close()
        chain, optimizer = live_objects(self._chain), self._optimizer()
        rank = self._session.settings.rank
        self._loop, self._is_split = first.loop(chain, self._known), is_split(chain)
        config = None
        if optimizer is not None:
            config = first.run_config(chain, optimizer, rank, self._known)
        if config is not None:
            self._session.describe(self._make_host(optimizer, chain, lambda: config))

    def _report(self, loop: LoopRecord) -> None:
        self._loop = None
        if self._data is not None:
            seen = self._data.seen()
            self._data.remove()
            loop = replace(loop, data=seen.length, pass_end=seen.end, pass_steps=seen.steps)
            if not (loop.samples or self._is_split):
                loop = replace(loop, samples=seen.samples, tokens=seen.tokens)
        self._session.report_loop(loop)
