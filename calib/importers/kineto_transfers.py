"""Collectives out of a trace of PyTorch's profiler: one row for each kernel that transfers.

A kernel of NCCL runs from when its own rank arrives, so that its time includes waiting for the
others: the shortest over the ranks' traces is nearest to the transfer.  Releases before 2.3 tell
neither size nor group; then the size is that of the tensors around the launch, and the row is
flagged where the group had to be taken for the whole world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from json import loads
from typing import Any

import pandas as pd

from ..records.kineto_origins import KernelOrigin
from ..records.kineto_trace import SHAPES
from ..workload.collectives import Collective
from .own_format import COLLECTIVE_COLUMNS, element_nbytes

WORLD_TAKEN = "group not in the trace; the world's size is taken"
_COUNTS_OUTPUT = frozenset({Collective.ALL_GATHER, Collective.RECV})
_NS_PER_S = 1_000_000_000


def transfer_frame(
    origins: Sequence[KernelOrigin],
    *,
    trace: Mapping[str, Any],
    device: str,
    fabric: str,
    ranks_per_node: int,
) -> pd.DataFrame:
    """A collective table in our own format, in the order of the trace.

    ``ranks_per_node`` tells which ranks of a group share a node.  A kernel whose collective,
    payload or number of ranks the trace does not say is left out.
    """
    place = {"device": device, "fabric": fabric}
    world = _world(trace)
    rows = []
    for origin in origins:
        if row := transfer_row(origin, world, ranks_per_node):
            rows.append(row | place | {"time_s": origin.kernel.duration_ns / _NS_PER_S})
    return pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS))


def transfer_row(origin: KernelOrigin, world: int, ranks_per_node: int) -> dict[str, Any] | None:
    """What is told of one transfer but its time; None where it is none, or not enough is told."""
    details = origin.details or {}
    if origin.collective in (None, Collective.OTHER):
        return None
    told = _whole(details.get("Group size"))
    num_ranks = told or world
    nbytes = _nbytes(details, origin.collective, num_ranks)
    if num_ranks < 1 or nbytes < 1:
        return None
    return {
        "collective": origin.collective.value,
        "num_ranks": num_ranks,
        "num_nodes": _num_nodes(details, num_ranks, ranks_per_node),
        "nbytes": nbytes,
        "flag": "" if told else WORLD_TAKEN,
    }


def _world(trace: Mapping[str, Any]) -> int:
    told = trace.get("distributedInfo")
    return _whole(told.get("world_size")) if isinstance(told, Mapping) else 0


def _nbytes(details: Mapping[str, Any], collective: Collective, num_ranks: int) -> int:
    """Bytes as nccl-tests counts them; 0 where they are not told."""
    side = "Out msg nelems" if collective in _COUNTS_OUTPUT else "In msg nelems"
    if side in details:
        size = element_nbytes(str(details.get("dtype", "")), default=4)
        return _whole(details[side]) * size
    dims, types = details.get(SHAPES), details.get("Input type")
    if not dims or not types:
        return 0
    nbytes = _num_elements(dims[0]) * element_nbytes(str(types[0]).removeprefix("c10::"), default=0)
    return nbytes * num_ranks if collective is Collective.ALL_GATHER else nbytes


def _num_elements(dims: Any) -> int:
    """Of a tensor, or of all in a list of tensors; 0 where no sizes are told.

    >>> _num_elements([2, 3]), _num_elements([[2, 3], [4]]), _num_elements([])
    (6, 10, 0)
    """
    if not isinstance(dims, list) or not dims:
        return 0
    if all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(map(_num_elements, dims))


def _num_nodes(details: Mapping[str, Any], num_ranks: int, ranks_per_node: int) -> int:
    """Nodes of the listed ranks; of a block of ranks where the list is missing or cut short."""
    try:
        ranks = loads(str(details.get("Process Group Ranks", "")))
    except ValueError:
        ranks = []
    if not isinstance(ranks, list) or len(ranks) != num_ranks:
        return -(-num_ranks // ranks_per_node)
    return len({int(rank) // ranks_per_node for rank in ranks})


def _whole(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0
