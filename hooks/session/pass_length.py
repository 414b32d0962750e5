"""How many batches a pass over a ``DataLoader`` has, read from what torch's own samplers hold.

Nothing of the user's is asked: ``__len__`` of a data set or sampler of his own may draw random
numbers, meet other ranks or take its time.  Whoever is no sampler of torch's, to the exact class,
says nothing here.
"""

from __future__ import annotations

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
)

from ..process.looking import contents

_RANGE = type(iter(range(0)))
_MAP = 0
"""A data set with an index, as torch's loaders number the kinds."""


def pass_length(iterator: Any) -> int | None:
    """Batches of the pass that runs, after some have been drawn; None where torch does not say."""
    own = contents(iterator)
    sampler, drawing = own.get("_index_sampler"), own.get("_sampler_iter")
    if own.get("_dataset_kind") != _MAP:
        return None
    inner = _local(drawing, "sampler_iter") if type(sampler) is BatchSampler else None
    if _has_ended(drawing) or _has_ended(inner):  # workers are given some before they are drawn
        return _whole(own.get("_send_idx", own.get("_num_yielded")))
    if type(sampler) is not BatchSampler:
        return _num_rows(sampler, drawing)
    held = contents(sampler)
    rows, size = _num_rows(held.get("sampler"), inner), _whole(held.get("batch_size"))
    if rows is None or not size:
        return None
    return rows // size if held.get("drop_last") is True else -(-rows // size)


def _num_rows(sampler: Any, drawing: Any) -> int | None:
    """Numbers of rows in a pass of a sampler, whose iterator is ``drawing``."""
    kind, own = type(sampler), contents(sampler)
    if kind is WeightedRandomSampler or kind is DistributedSampler:
        return _whole(own.get("num_samples"))
    if kind is SubsetRandomSampler:
        return _num_indices(own.get("indices"))
    if kind is SequentialSampler and type(drawing) is _RANGE:
        state: Any = drawing.__reduce__()
        return state[1][0].stop
    if kind is RandomSampler:
        return _whole(own.get("_num_samples")) or _whole(_local(drawing, "n"))
    return None


def _num_indices(indices: Any) -> int | None:
    kind = type(indices)
    if kind is list or kind is tuple or kind is range:
        return len(indices)
    return indices.numel() if kind is torch.Tensor else None


def _has_ended(drawing: Any) -> bool:
    return type(drawing) is GeneratorType and drawing.gi_frame is None


def _local(drawing: Any, name: str) -> Any:
    """What a generator of torch's, which waits to be asked for more, has under that name."""
    if type(drawing) is not GeneratorType or drawing.gi_frame is None:
        return None
    return drawing.gi_frame.f_locals.get(name)


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None
