"""Which ``DataLoader`` feeds a loop, how long it is, and how many of its batches make a step.

Two methods of torch's loaders are replaced until the first steps have shown it.  They return what
they did: no batch is drawn, no random state is touched, no loader is kept alive.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...calib.records.record_kinds import DataLength
from ..process.guard import Guard
from ..process.host import Reference, reference
from .first_step import batch_shape

NUM_STEPS = 2
"""The first step may draw more: a loop that looks ahead, a step that a scaler of losses skips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSeen:
    """What the loader that feeds a loop says; steps are counted from the loop's first."""

    length: DataLength = DataLength.UNSEEN
    end: int = 0
    """Steps that will be done at the end of the pass that runs; 0: unknown."""
    steps: int = 0
    """Steps of a whole pass."""
    samples: int = 0
    """Of the batches of a step, by the first of them."""
    tokens: int = 0


@dataclass(slots=True)
class _Loader:
    """A loader that was asked for its batches."""

    alive: Reference
    num_batches: int | None
    """Of a pass; None where it has no length."""
    num_drawn: int = 0
    """In the pass that runs."""
    draws: tuple[int, ...] = ()
    """Of each step so far."""
    num_in_step: int = 0
    shape: tuple[int, ...] = ()
    """Of its first batch: samples, and tokens of each where it holds some."""


class DataWatch:
    """Counts the batches of each loader, from ``install`` to ``remove``."""

    def __init__(self, guard: Guard) -> None:
        self._protect = guard.protect
        self._num_batches = guard.protect(num_batches)
        self._saved: list[tuple[Any, str, Any, Any]] = []
        self._loaders: dict[int, _Loader] = {}
        self._iterators: dict[int, tuple[Reference, _Loader]] = {}
        self._num_steps = 0

    def install(self) -> None:
        """Replace the two methods; does nothing where they are replaced already."""
        if self._saved:
            return
        self._put(DataLoader, "__iter__", self._protect(self._begin_pass))
        self._put(_BaseDataLoaderIter, "__next__", self._protect(self._draw))

    def remove(self) -> None:
        """Put them back; what another has replaced meanwhile stays his."""
        while self._saved:
            owner, name, original, wrapper = self._saved.pop()
            if vars(owner).get(name) is wrapper:
                setattr(owner, name, original)
        self._loaders, self._iterators = {}, {}

    @property
    def is_over(self) -> bool:
        """Enough steps have been counted."""
        return self._num_steps >= NUM_STEPS

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._num_steps += 1
        for loader in self._loaders.values():
            loader.draws = (*loader.draws, loader.num_in_step)
            loader.num_in_step = 0

    def seen(self) -> DataSeen:
        """Of the loader that most batches of the last step came from."""
        drawn = [one for one in self._loaders.values() if one.draws and one.draws[-1]]
        loader = max(drawn, key=lambda one: one.draws[-1], default=None)
        if loader is None:
            return DataSeen()
        each = min(draws for draws in loader.draws if draws)
        samples, tokens = (*loader.shape, 0, 0)[:2]
        work = {"samples": each * samples, "tokens": each * samples * tokens}
        if not loader.num_batches:
            return DataSeen(length=DataLength.NONE, **work)
        left = max(0, loader.num_batches - loader.num_drawn) // each
        return DataSeen(
            length=DataLength.KNOWN,
            end=self._num_steps + left,
            steps=max(1, loader.num_batches // each),
            **work,
        )

    def _put(self, owner: Any, name: str, note: Callable[..., object]) -> None:
        original = vars(owner).get(name)
        if original is None:
            return

        @functools.wraps(original)
        def wrapper(thing: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(thing, *args, **kwargs)
            note(thing, found)
            return found

        self._saved.append((owner, name, original, wrapper))
        setattr(owner, name, wrapper)

    def _begin_pass(self, loader: Any, iterator: Any) -> None:
        known = self._loaders.get(id(loader))
        if known is None or known.alive() is not loader:
            known = _Loader(reference(loader), self._num_batches(loader))
            self._loaders[id(loader)] = known
        known.num_drawn = 0
        held = self._iterators.items()
        self._iterators = {key: one for key, one in held if one[0]() is not None}
        self._iterators[id(iterator)] = reference(iterator), known

    def _draw(self, iterator: Any, batch: Any) -> None:
        alive, loader = self._iterators.get(id(iterator), (None, None))
        if alive is not None and loader is not None and alive() is iterator:
            loader.num_drawn += 1
            loader.num_in_step += 1
            loader.shape = loader.shape or batch_shape(batch)


def num_batches(loader: Any) -> int | None:
    """Batches of one pass, as the loader counts them; None where its data have no length.

    Of a data set that is only iterated, ``len(loader)`` would be remembered by the loader, which
    then warns of later batches: the same is worked out from the data set.  Raises what else the
    data's own ``__len__`` raises.
    """
    try:
        if not isinstance(loader.dataset, IterableDataset):
            return len(loader)
        data: Any = loader.dataset
        if not hasattr(data, "__len__"):
            return None
        rows, size = len(data), loader.batch_size
        if size is None:
            return rows
        return rows // size if loader.drop_last else math.ceil(rows / size)
    except (TypeError, NotImplementedError):  # Python's words for no length
        return None
