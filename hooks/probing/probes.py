"""Probes between steps: operators and transfers of other layouts, in slices within a budget.

Operators run on every rank at the same steps and in the same order, so that no rank waits for
another.  Collectives run on existing groups, and only if every rank has agreed just before (see
``Votes.meet``).  A fault ends the probes, not the session; ranks that cannot take part refuse, and
probes skipped for lack of memory are remarks of the coverage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...calib.advice.probe_sizes import REPEATS, CollectiveProbe, OperatorProbe, fingerprint
from ...calib.advice.probes import is_probed, probe_plan
from ...calib.records.record_kinds import CoverageRecord, Record
from ...calib.workload.collectives import Collective, GroupRole
from ...calib.workload.config import RunConfig
from ...calib.workload.operators import OperatorKind
from ...calib.workload.ranks import group
from ..process.settings import Settings
from ..process.votes import Votes, refusal_reason
from ..sensors.process_groups import GroupRoles
from ..sensors.stopwatch import Stopwatch
from ._probe_memory import DeviceMemoryBudget, HostMemoryBudget, connection_nbytes
from ._probe_runs import ProbeLog, ProbeRuns, dtype_of
from ._probe_transfers import TransferBench, find_carrier

SLICE_FRAC = 0.05
"""Share of a step that the probes after it may take; at least one always runs."""
PATIENCE_S = 5.0
"""Timeout of ranks waiting for each other before collectives."""
MOST_REFUSALS = 2
"""Refusals that end the probes; each may have cost ``PATIENCE_S``, if a rank never comes."""
_ABSTAINS = "a rank cannot take part"
_IN_8_BITS = "not probed: products, which this run scales to 8 bits by a history of its own"
_NO_BLOCK = "not probed: operators for which no block of memory is free"
_NO_BUFFERS = "not probed: transfers for which no block of memory is free"
_DISTURBED = "probes ended: one made the allocator ask the device for memory"
_BATCH_S = 0.02
"""Expected time of the collectives that one agreement covers."""


class Probing:
    """Probes of one rank, from the end of the first window until budget or list is exhausted.

    ``run_slice`` is called once before every step outside of windows, on all ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        *,
        roles: Mapping[str, GroupRole] | None = None,
        device: torch.device,
        stopwatch: Stopwatch,
        put: Callable[[Record], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        begin_s = clock()
        self._config, self._device, self._put, self._clock = config, device, put, clock
        self._budget_s = settings.probe_s
        self._rank = settings.rank.rank
        plan = probe_plan(config, budget_s=settings.probe_s)
        self._operators = [probe for probe in plan if isinstance(probe, OperatorProbe)]
        self._transfers = [probe for probe in plan if isinstance(probe, CollectiveProbe)] * REPEATS
        self._name = fingerprint(plan)
        self._votes = _votes(settings)
        if self._votes is None:
            self._transfers = []
        self._runs = ProbeRuns(config, device, stopwatch)
        self._roles = GroupRoles(roles, config.parallelism)
        self._memory_budget = (
            HostMemoryBudget(local_world_size=settings.rank.local_world_size)
            if stopwatch.is_host
            else DeviceMemoryBudget(device)
        )
        self._remarks: dict[str, bool] = {}
        if not is_probed(OperatorKind.LINEAR, config):
            self._remarks[_IN_8_BITS] = False
        self._is_disturbed = False
        self._joined: set[tuple[str, Collective]] = set()
        self._logs: list[ProbeLog] = []
        self._num_met = self._num_refused = self._num_slices = 0
        self._is_given_back = False
        self._last_s = clock()
        self.spent_s = self._last_s - begin_s

    @property
    def is_done(self) -> bool:
        """True once nothing remains to run or to read."""
        return not (self._operators or self._transfers or self._logs)

    def run_slice(self, step: int, window: int) -> None:
        """Run some probes: collectives after every other step, operators after the others.

        All ranks must choose the same steps for collectives: otherwise a rank would wait before a
        step for ranks that wait inside it.
        """
        begin_s = self._clock()
        slice_s = SLICE_FRAC * (begin_s - self._last_s)
        self._num_slices += 1
        self._hand_over()
        if self._transfers and self._num_slices % 2:
            self._meet(step, window)
        elif self._operators:
            self._run_operators(step, window, slice_s)
        self._put_remarks(window)
        self._last_s = self._clock()
        self.spent_s += self._last_s - begin_s
        if self.spent_s >= self._budget_s:
            self._operators.clear()
        if not self._is_given_back and not (self._operators or self._transfers):
            self._is_given_back = True
            self._memory_budget.give_back()

    def abstain(self) -> None:
        """Stop all probes on this rank, and collectives on all ranks."""
        self._operators.clear()
        self._logs.clear()
        if self._transfers and self._votes is not None:
            for ahead in range(MOST_REFUSALS):
                self._votes.refuse(self._num_met + ahead, _ABSTAINS)
        self._transfers.clear()

    def _hand_over(self) -> None:
        while self._logs:
            records = self._logs[0].records()
            if records is None:
                return
            self._logs.pop(0)
            for record in records:
                self._put(record)

    def _put_remarks(self, window: int) -> None:
        for name in [name for name, is_emitted in self._remarks.items() if not is_emitted]:
            self._remarks[name] = True
            self._put(CoverageRecord.remark(window, name))

    def _run_operators(self, step: int, window: int, slice_s: float) -> None:
        log = self._runs.begin(step, window)
        begin_s = self._clock()
        while self._operators:
            probe = self._operators.pop(0)
            if self._memory_budget.has(probe.nbytes, probe.small_nbytes):
                with torch.autocast(self._device.type, enabled=False):
                    self._runs.operator(probe, log)
                self._look_at_memory()
            else:
                self._remarks.setdefault(_NO_BLOCK, False)
            spent_s = self._clock() - begin_s
            if spent_s >= slice_s or self.spent_s + spent_s >= self._budget_s:
                break
        self._runs.end(log)
        self._logs.append(log)

    def _look_at_memory(self) -> None:
        if self._memory_budget.is_disturbed():
            self._is_disturbed = True
            self._remarks.setdefault(_DISTURBED, False)
            self._operators.clear()

    def _meet(self, step: int, window: int) -> None:
        """Run the next few collectives, on all ranks or on none."""
        votes = self._votes
        if votes is None:
            return
        batch = self._next_batch()
        is_out = self._is_disturbed or self.spent_s >= self._budget_s
        benches_or_reason = _ABSTAINS if is_out else self._benches(batch)
        number, self._num_met = self._num_met, self._num_met + 1
        if isinstance(benches_or_reason, str):
            votes.refuse(number, benches_or_reason)
        elif votes.meet(number, self._name, patience_s=PATIENCE_S):
            log = self._runs.begin(step, window)
            self._runs.transfers_once(benches_or_reason, log)
            self._runs.end(log)
            self._logs.append(log)
            self._joined |= {
                (bench.carrier.name, bench.collective) for _, bench in benches_or_reason
            }
            self._look_at_memory()
            return
        self._leave_out(batch, refusal_reason(votes.outcome(number)))

    def _leave_out(self, batch: Sequence[CollectiveProbe], why: str) -> None:
        """Drop probes that a rank lacks memory for, on all ranks: they read the same ``why``."""
        pending = [*batch, *self._transfers]
        for name, remark in ((_sized, _NO_BUFFERS), (_over, f"not probed: {why}")):
            remaining = [probe for probe in pending if not why.startswith(name(probe))]
            if len(remaining) < len(pending):
                self._transfers = remaining
                self._remarks.setdefault(remark, False)
                return
        self._num_refused += 1
        if self._num_refused >= MOST_REFUSALS:
            self._transfers.clear()

    def _next_batch(self) -> list[CollectiveProbe]:
        """Return the next batch, the same on all ranks regardless of measurements; each transfer
        once."""
        batch = [self._transfers.pop(0)]
        remaining_s = _BATCH_S - batch[0].cost_s / REPEATS
        while self._transfers and self._transfers[0] not in batch:
            remaining_s -= self._transfers[0].cost_s / REPEATS
            if remaining_s < 0:
                break
            batch.append(self._transfers.pop(0))
        return batch

    def _benches(
        self, batch: Sequence[CollectiveProbe]
    ) -> list[tuple[CollectiveProbe, TransferBench]] | str:
        """Return benches with all buffers allocated, before agreeing; or why this rank cannot take
        part."""
        nbytes = small = 0
        for probe in batch:
            nbytes += probe.nbytes
            small += probe.small_nbytes
            if not self._memory_budget.has(nbytes, small):
                return f"{_sized(probe)}a rank lacks a free block of {nbytes} bytes"
        benches = [self._bench(probe) for probe in batch]
        needed = 0
        for probe, bench in zip(batch, benches, strict=True):
            if bench is None:
                return _ABSTAINS
            if not (bench.is_connected or (bench.carrier.name, bench.collective) in self._joined):
                needed += connection_nbytes(bench.collective, len(bench.carrier.ranks))
                if not self._memory_budget.has_beyond(needed):
                    return f"{_over(probe)}a rank lacks {needed >> 20} MiB that NCCL may take"
        return [(probe, bench) for probe, bench in zip(batch, benches, strict=True) if bench]

    def _bench(self, probe: CollectiveProbe) -> TransferBench | None:
        ranks = group(self._config.parallelism, probe.over, self._rank)
        carrier = find_carrier(probe.over, ranks, self._roles)
        if carrier is None:
            return None
        return TransferBench(
            probe.call.collective,
            probe.call.nbytes,
            carrier,
            dtype=dtype_of(self._config.precision.nbytes, self._config.precision),
            device=self._device,
        )


def _votes(settings: Settings) -> Votes | None:
    """Return votes at the store that the ranks were launched with; None if there is none."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    store = distributed_c10d._get_default_store()
    name = f"forerun/probe/{settings.rank.run_id}"
    return Votes(store, name, num_ranks=dist.get_world_size())


def _over(probe: CollectiveProbe) -> str:
    """Return kind and group role of a call, the prefix of reasons for skipping such probes."""
    return f"{probe.call.collective.value} over {probe.over.value}: "


def _sized(probe: CollectiveProbe) -> str:
    """Return the prefix of reasons that concern this payload alone."""
    return f"{probe.call.nbytes} bytes, {_over(probe)}"
