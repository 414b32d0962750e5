"""NCCL's collectives out of a trace of PyTorch's profiler.

A kernel of NCCL runs from when its own rank arrives, so that its time includes waiting for the
others: the shortest over the ranks' traces is nearest to the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from json import loads
from typing import Any

import pandas as pd

from ..workload.collectives import Collective
from .element_types import MICROSECOND_S, element_nbytes
from .kineto import Event, device_name, external_id, trace_events
from .own_format import COLLECTIVE_COLUMNS

_NAMES = {
    "allreduce": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "send": Collective.SEND,
    "recv": Collective.RECV,
}
_COUNTS_OUTPUT = frozenset({Collective.ALL_GATHER, Collective.RECV})


def kineto_collectives(
    trace: Mapping[str, Any], name: str, *, fabric: str, ranks_per_node: int
) -> pd.DataFrame:
    """A collective table in our own format, one row for each kernel of NCCL.

    ``ranks_per_node`` tells which ranks of a group share a node.  A kernel whose payload or group
    the trace does not say is left out.
    """
    events = trace_events(trace, name)
    calls = {
        external_id(event): event["args"]
        for event in events
        if event.get("name") == "record_param_comms" and event.get("args")
    }
    device = device_name(trace)
    rows = []
    for kernel in _nccl_kernels(events):
        args = kernel.get("args", {})
        if "Collective name" not in args:
            args = calls.get(external_id(kernel), {})
        row = _row(args, ranks_per_node)
        if row is not None:
            time_s = kernel["dur"] * MICROSECOND_S
            rows.append(row | {"device": device, "fabric": fabric, "time_s": time_s, "flag": ""})
    return pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS))


def _nccl_kernels(events: Iterable[Event]) -> Iterable[Event]:
    for event in events:
        if event.get("cat") == "kernel" and str(event["name"]).startswith("nccl"):
            yield event


def _row(args: Mapping[str, Any], ranks_per_node: int) -> dict[str, Any] | None:
    compact = str(args.get("Collective name", "")).replace("_", "").lower()
    collective = next((c for part, c in _NAMES.items() if part in compact), None)
    num_ranks = int(args.get("Group size", 0))
    if collective is None or num_ranks < 1:
        return None
    side = "Out msg nelems" if collective in _COUNTS_OUTPUT else "In msg nelems"
    nbytes = int(args.get(side, 0)) * element_nbytes(str(args.get("dtype", "")), default=4)
    if nbytes < 1:
        return None
    return {
        "collective": collective.value,
        "num_ranks": num_ranks,
        "num_nodes": _num_nodes(args, num_ranks, ranks_per_node),
        "nbytes": nbytes,
    }


def _num_nodes(args: Mapping[str, Any], num_ranks: int, ranks_per_node: int) -> int:
    """Nodes of the listed ranks; of a block of ranks where the list is missing or cut short."""
    try:
        ranks = loads(str(args.get("Process Group Ranks", "")))
    except ValueError:
        ranks = []
    if not isinstance(ranks, list) or len(ranks) != num_ranks:
        return -(-num_ranks // ranks_per_node)
    return len({int(rank) // ranks_per_node for rank in ranks})
