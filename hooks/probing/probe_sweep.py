"""Sweep of a new machine without training: products, memory, operators and collectives.

Groups are created here, since no training uses the machine: all ranks, the ranks of a node, one
rank of each node, and pairs of neighbours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from ...calib.advice.probe_sizes import REPEATS, WARMUPS, CollectiveProbe, OperatorProbe
from ...calib.advice.probes import collective_probe, is_probed, operator_probe, probe_plan
from ...calib.layers.stage_work import stage_operators
from ...calib.records.record_kinds import CollectiveRecord, Record
from ...calib.workload.collectives import Collective, CollectiveCall, GroupRole
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import OperatorKind
from ..sensors.stopwatch import Stopwatch
from ._probe_memory import FREE_FRAC, HostMemoryBudget
from ._probe_operators import ramp
from ._probe_runs import ProbeRuns, slowest_s
from ._probe_transfers import TransferBench, carrier_of

# From launch-bound to compute-bound on current GPUs.
_SQUARES = (512, 1024, 2048, 4096, 8192)
# Larger than a GPU's cache (50 MB on H100).  On a CPU larger than a core's private cache, and
# short; it may fit the shared cache.
_COPY_NBYTES = 1 << 30
_HOST_COPY_NBYTES = 1 << 24
# 4 KiB to 1 GiB, as usual for nccl-tests; every second power shows all algorithm changes.
_SIZES = tuple(1 << power for power in range(12, 31, 2))
_MOST_FRAC = 0.1
"""Limit on one operator's expected share of the time."""
_NUM_UNRECORDED_RUNS = 4 + WARMUPS
"""Runs of a transfer that are not recorded: two that estimate its duration, each after a first one,
and warm-ups."""
_ROLES = {
    Collective.ALL_REDUCE: (GroupRole.TP, GroupRole.DP),
    Collective.ALL_GATHER: (GroupRole.TP, GroupRole.DP),
    Collective.REDUCE_SCATTER: (GroupRole.TP, GroupRole.DP),
    Collective.ALL_TO_ALL: (GroupRole.EP,),
    Collective.SEND: (GroupRole.PP,),
}
"""Group roles that a measured transfer stands for."""
_APART = {OperatorKind.FUSED_NORM: OperatorKind.NORM}
"""Operators probed in place of those without a module of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptGroup:
    """A process group of the sweep, with the number of its nodes."""

    group: dist.ProcessGroup
    num_nodes: int


class Sweep:
    """Probes for a run of one layout: ``seconds`` of operators and as many of transfers."""

    def __init__(
        self, config: RunConfig, device: torch.device, stopwatch: Stopwatch, *, seconds: float
    ) -> None:
        self._config = config
        self._device = device
        self._seconds = seconds
        self._runs = ProbeRuns(config, device, stopwatch)

    def operators(self) -> Iterator[Record]:
        """Yield records of the layout's operators, then of the best other layouts', then square
        products."""
        memory_budget = HostMemoryBudget(local_world_size=self._config.parallelism.ranks_per_node)
        end_s = math.inf
        for probe in self._wanted():
            is_possible = probe.nbytes <= self._free_nbytes(memory_budget)
            remaining_s = end_s - time.perf_counter()
            if remaining_s <= 0 or probe.cost_s > _MOST_FRAC * self._seconds or not is_possible:
                continue
            measured = self._measured(partial(self._runs.operator, probe))
            if end_s == math.inf:
                # The clock starts here: the first call includes the libraries' initialization.
                end_s = time.perf_counter() + self._seconds
            yield from measured

    def transfers(self) -> Iterator[Record]:
        """Yield records of payloads in steps of four over every kind of group, within its share of
        time.

        Ranks of a group continue or stop together: they agree on the slowest first repeat.
        """
        swept = make_groups(self._config.parallelism.ranks_per_node)
        share_s = self._seconds / max(1, len(swept) * len(_ROLES))
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        for swept_group, collective in product(swept, _ROLES):
            spent_s = 0.0
            for nbytes in _SIZES:
                carrier = carrier_of(swept_group.group)
                bench = TransferBench(collective, nbytes, carrier, dtype=dtype, device=self._device)
                bench.run()
                spent_s += (REPEATS + _NUM_UNRECORDED_RUNS) * slowest_s(bench)
                if spent_s > share_s and nbytes != _SIZES[0]:
                    break
                benches = [(self._transfer(swept_group, collective, nbytes), bench)]
                run = partial(self._runs.transfers, benches, most_s=math.inf)
                yield from _for_all_roles(self._measured(run), collective)

    def _measured(self, run: Callable[..., None]) -> Iterable[Record]:
        log = self._runs.begin(0, 0)
        run(log=log)
        self._runs.end(log)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return log.records() or ()

    def _wanted(self) -> Iterator[OperatorProbe]:
        """Yield the layout's own operators, those of other layouts, and square products."""
        layout_keys = (
            # Products run alone here: a fused norm is timed separately.
            (_APART.get(operator.kind, operator.kind), operator.shape, operator.element_nbytes)
            for stage in sorted({0, self._config.parallelism.pp - 1})
            for done in [stage_operators(self._config, stage)]
            for operator, _ in (*done.forward, *done.step)
            if operator.shape
        )
        for key in dict.fromkeys(layout_keys):
            if is_probed(key[0], self._config):
                yield operator_probe(key, self._config)
        for probe in probe_plan(self._config, budget_s=self._seconds):
            if isinstance(probe, OperatorProbe) and not probe.is_control:
                yield probe
        if not is_probed(OperatorKind.LINEAR, self._config):
            return
        for size in _SQUARES:
            key = (OperatorKind.LINEAR, (size, size, size), self._config.precision.nbytes)
            yield operator_probe(key, self._config)

    def _transfer(self, swept: SweptGroup, collective: Collective, nbytes: int) -> CollectiveProbe:
        call = CollectiveCall(
            collective=collective,
            role=_ROLES[collective][0],
            num_ranks=dist.get_world_size(swept.group),
            nbytes=nbytes,
            num_nodes=swept.num_nodes,
        )
        return collective_probe(call, GroupRole.OTHER, self._config)

    def _free_nbytes(self, memory_budget: HostMemoryBudget) -> float:
        """Return the memory available to a probe without concurrent training."""
        if self._device.type == "cuda":
            return FREE_FRAC * torch.cuda.mem_get_info(self._device)[0]
        return math.inf if memory_budget.has(1 << 30) else 1 << 28


def copy_bytes_per_s(device: torch.device) -> float:
    """Return bytes read and written per second by a copy; on a GPU, of a tensor larger than its
    cache."""
    nbytes = _COPY_NBYTES if device.type == "cuda" else _HOST_COPY_NBYTES
    source = ramp((nbytes // 4,), torch.float32, device)
    target = torch.empty_like(source)
    best_s = math.inf
    for _ in range(REPEATS + WARMUPS):
        begin_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * nbytes / best_s


def make_groups(ranks_per_node: int) -> list[SweptGroup]:
    """Return the groups of all kinds to which this rank belongs; every rank has to call this."""
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
                swept.append(SweptGroup(group=made, num_nodes=nodes))
    return swept


def _for_all_roles(records: Iterable[Record], collective: Collective) -> Iterator[Record]:
    for record in records:
        if isinstance(record, CollectiveRecord):
            for role in _ROLES[collective]:
                yield replace(record, role=role, group=f"{record.group}/{role.value}")
