"""A new machine measured without training: products, memory, operators, collectives in a sweep.

Here groups may be made, since nobody else uses them: all ranks, the ranks of a node, one rank of
each node, and neighbours in pairs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist

from ...calib.advice.probe_list import CollectiveProbe, OperatorProbe
from ...calib.advice.probes import collective_probe, operator_cost, probe_plan
from ...calib.layers.stage_work import stage_operators
from ...calib.records.record_kinds import CollectiveRecord, Record
from ...calib.workload.collectives import Collective, CollectiveCall, GroupRole
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import OperatorKind
from ..sensors.stopwatch import Stopwatch
from .probe_operators import ramp
from .probe_runs import FREE_FRAC, ProbeRuns, Room, slowest_s
from .probe_transfers import TransferBench, carrier_of

_SQUARES = (512, 1024, 2048, 4096, 8192)
_COPY_NBYTES = 1 << 30
_LEAST_COPY_NBYTES = 1 << 24
_SIZES = tuple(1 << power for power in range(12, 31, 2))
_MOST_FRAC = 0.1
"""Share of the time that one operator may be expected to take."""
_REPEATS = 5
_WARMUPS_AND_FIRST = 4
_ROLES = {
    Collective.ALL_REDUCE: (GroupRole.TP, GroupRole.DP),
    Collective.ALL_GATHER: (GroupRole.TP, GroupRole.DP),
    Collective.REDUCE_SCATTER: (GroupRole.TP, GroupRole.DP),
    Collective.ALL_TO_ALL: (GroupRole.EP,),
    Collective.SEND: (GroupRole.PP,),
}
"""What a measured transfer stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A group that is swept."""

    group: dist.ProcessGroup
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTask:
    """What a run of a layout needs, for as long as there is time."""

    config: RunConfig
    device: torch.device
    seconds: float


def sweep_operators(work: SweepTask, stopwatch: Stopwatch) -> Iterator[Record]:
    """Every operator of the layout and of the best others in turn, then square products."""
    runs = ProbeRuns(work.config, work.device, stopwatch)
    room = Room(work.device, local_world_size=work.config.parallelism.ranks_per_node)
    end_s = math.inf
    for probe in chain(_operators(work.config, work.seconds), _products(work.config)):
        is_possible = probe.nbytes <= free_nbytes(work.device, room)
        left_s = end_s - time.perf_counter()
        if left_s <= 0 or probe.cost_s > _MOST_FRAC * work.seconds or not is_possible:
            continue
        log = runs.begin(0, 0)
        runs.operator(probe, log)
        if end_s == math.inf:
            # From here on: what libraries do on their first call is no measurement.
            end_s = time.perf_counter() + work.seconds
        runs.end(log)
        if work.device.type == "cuda":
            torch.cuda.synchronize(work.device)
        yield from log.records() or ()


def sweep_transfers(work: SweepTask, stopwatch: Stopwatch) -> Iterator[Record]:
    """Payloads in steps of four over every kind of group, until its share of the time is over.

    Ranks of a group go on or stop together: they agree on the slowest first repeat.
    """
    runs = ProbeRuns(work.config, work.device, stopwatch)
    swept = make_groups(work.config.parallelism.ranks_per_node)
    share_s = work.seconds / max(1, len(swept) * len(_ROLES))
    for found in swept:
        for collective in _ROLES:
            spent_s = 0.0
            for nbytes in _SIZES:
                bench = _bench(found, collective, nbytes, work.device)
                bench.run()
                expected_s = (_REPEATS + _WARMUPS_AND_FIRST) * slowest_s(bench)
                spent_s += expected_s
                if spent_s > share_s and nbytes != _SIZES[0]:
                    break
                probe = _probe(found, collective, nbytes, work.config)
                log = runs.begin(0, 0)
                runs.transfers([(probe, bench)], log, most_s=math.inf)
                runs.end(log)
                if work.device.type == "cuda":
                    torch.cuda.synchronize(work.device)
                yield from _for_all_roles(log.records() or (), collective)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    nbytes = _COPY_NBYTES if device.type == "cuda" else _LEAST_COPY_NBYTES
    source = ramp((nbytes // 4,), torch.float32, device)
    target = torch.empty_like(source)
    best_s = math.inf
    for _ in range(_REPEATS + 2):
        begin_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * nbytes / best_s


def free_nbytes(device: torch.device, room: Room) -> float:
    """What a probe may take where no training runs beside it."""
    if device.type == "cuda":
        return FREE_FRAC * torch.cuda.mem_get_info(device)[0]
    return math.inf if room.has(1 << 30) else 1 << 28


def make_groups(ranks_per_node: int) -> list[Swept]:
    """Groups of all kinds to which this rank belongs; every rank has to call this."""
    size = dist.get_world_size()
    per_node = ranks_per_node or size
    kinds = [[tuple(range(size))]]
    if per_node < size:
        kinds.append([tuple(range(i, min(size, i + per_node))) for i in range(0, size, per_node)])
        kinds.append([tuple(range(i, size, per_node)) for i in range(per_node)])
    if size > 2:
        kinds.append([tuple(range(i, min(size, i + 2))) for i in range(0, size, 2)])
    swept = []
    for groups in kinds:
        for ranks in groups:
            made = dist.new_group(list(ranks))
            if isinstance(made, dist.ProcessGroup) and len(ranks) > 1:
                nodes = len({rank // per_node for rank in ranks})
                swept.append(Swept(group=made, num_nodes=nodes))
    return swept


def _products(config: RunConfig) -> Iterator[OperatorProbe]:
    for size in _SQUARES:
        yield _operator_probe(
            OperatorKind.LINEAR, (size, size, size), config.precision.nbytes, config
        )


def _operators(config: RunConfig, seconds: float) -> Iterator[OperatorProbe]:
    """The layout's own first, then those of others."""
    seen = set()
    for stage in sorted({0, config.parallelism.pp - 1}):
        done = stage_operators(config, stage)
        for operator, _ in (*done.forward, *done.step):
            key = (operator.kind, operator.shape, operator.element_nbytes)
            if key not in seen and operator.shape:
                seen.add(key)
                yield _operator_probe(*key, config)
    for probe in probe_plan(config, budget_s=seconds):
        if isinstance(probe, OperatorProbe) and not probe.is_control:
            yield probe


def _operator_probe(
    kind: OperatorKind, shape: tuple[int, ...], element_nbytes: int, config: RunConfig
) -> OperatorProbe:
    cost_s, nbytes = operator_cost((kind, shape, element_nbytes), config)
    return OperatorProbe(
        kind=kind,
        shape=shape,
        element_nbytes=element_nbytes,
        is_control=False,
        value=0.0,
        cost_s=cost_s,
        nbytes=nbytes,
    )


def _bench(
    swept: Swept, collective: Collective, nbytes: int, device: torch.device
) -> TransferBench:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return TransferBench(collective, nbytes, carrier_of(swept.group), dtype=dtype, device=device)


def _probe(swept: Swept, collective: Collective, nbytes: int, config: RunConfig) -> CollectiveProbe:
    call = CollectiveCall(
        collective=collective,
        role=_ROLES[collective][0],
        num_ranks=dist.get_world_size(swept.group),
        nbytes=nbytes,
        num_nodes=swept.num_nodes,
    )
    return collective_probe(call, GroupRole.OTHER, config)


def _for_all_roles(
    records: Iterator[Record] | Sequence[Record], collective: Collective
) -> Iterator[Record]:
    for record in records:
        if isinstance(record, CollectiveRecord):
            for role in _ROLES[collective]:
                yield replace(record, role=role, group=f"{record.group}/{role.value}")
