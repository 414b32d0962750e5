"""A calibrated directory of one node with planted times: real files of a run that never happened.

Every verb accepts it like a real one.  Operators and transfers take the time of the device's priors
times a factor of their kind; ranks run in lockstep, the operators of a one-stage layout one after
another, with nothing overlapping.  So the truth of every operator is known: ``Planted``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from forerun.calib.layers import collective_uses, stage_operators
from forerun.calib.memory import memory
from forerun.calib.records import (
    SCHEMA,
    CollectiveRecord,
    Header,
    OperatorRecord,
    PhaseRecord,
    Record,
    RunRecord,
    StepRecord,
    WindowRecord,
    to_dict,
)
from forerun.calib.steps import prior_times
from forerun.calib.timeline import Item, item_name
from forerun.calib.units import GIB
from forerun.calib.workload import (
    Operator,
    OperatorCount,
    OperatorKind,
    Placement,
    RunConfig,
    group,
    position,
)

RUN_ID = "synthetic"
NOISE_LOG = 0.01
"""Scatter of one operator around its median, as on GPUs in a steady window."""
KIND_LOG = 0.1
"""Standard deviation of a kind's log factor on the device's prior."""
DEVICE_NBYTES = 80 * GIB
_STEPS_OF_WINDOW = 6
"""Steps per window, every other one hooked."""
_NS = 1e9
_START_NS = 10**15
_PASSES = {
    "forward-compute": (Placement.FORWARD,),
    "backward-compute": (Placement.RECOMPUTE, Placement.BACKWARD),
}
_AFTER_PASSES = (Placement.GRAD_REDUCE, Placement.GRAD_FINISH)
_HOST_S: Mapping[OperatorKind, float] = {
    OperatorKind.HOST_MICROBATCH: 0.15e-3,
    OperatorKind.HOST_STEP: 3e-3,
}
"""Host time of a pass and of a step, in the form the step model expects
(``calib/steps/scales.py``)."""
Work = Sequence[tuple[Item, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """Ground truth of a machine: the priors of a device times a factor for each kind of work."""

    device: str
    is_attention_fused: bool = True
    seed: int = 0
    factors_log: dict[str, float] = field(default_factory=dict)
    """Factors by ``item_name``; random if not given."""

    def times_s(self, items: Sequence[Item]) -> Mapping[Item, float]:
        """Return seconds of each item."""
        base = prior_times(self.device, is_attention_fused=self.is_attention_fused)
        estimated_s = base.estimates(items).time_s.tolist()
        expected_s = np.array(
            [_host_s(item) or time_s for item, time_s in zip(items, estimated_s, strict=True)]
        )
        names = [item_name(item) for item in items]
        drawn = {name: self._factor_log(name) for name in dict.fromkeys(names)}
        logs = np.array([drawn[name] for name in names])
        return dict(zip(items, (expected_s * np.exp(logs)).tolist(), strict=True))

    def _factor_log(self, name: str) -> float:
        if name in self.factors_log:
            return self.factors_log[name]
        seed = [self.seed, *name.encode()]
        return KIND_LOG * float(np.random.default_rng(seed).standard_normal())


def _host_s(item: Item) -> float | None:
    return _HOST_S.get(item.kind) if isinstance(item, Operator) else None


def write_synthetic_run(
    directory: Path, config: RunConfig, *, num_windows: int = 3, seed: int = 0
) -> Path:
    """Write a directory with records of a run in this layout; equal seeds give equal files.

    The layout has one stage and overlaps nothing, so that ranks run in lockstep.
    """
    if config.parallelism.pp > 1:
        raise ValueError(f"pp {config.parallelism.pp} has ranks that wait; give one stage")
    home = directory / "records" / RUN_ID
    home.mkdir(parents=True, exist_ok=True)
    run = _Run(config, Planted(device=config.device, seed=seed))
    for rank in range(config.parallelism.num_ranks):
        records = (
            run.header(rank),
            RunRecord(config=config.to_json()),
            *run.records(rank, num_windows),
        )
        lines = (json.dumps(to_dict(record)) + "\n" for record in records)
        (home / f"rank-{rank:05d}.jsonl").write_text("".join(lines), encoding="utf-8")
    return directory


class _Run:
    """Records common to all ranks; their clocks agree and all take the same time."""

    def __init__(self, config: RunConfig, planted: Planted) -> None:
        self.config, self.seed = config, planted.seed
        self.work = work = stage_operators(config, 0)
        self.uses = collective_uses(config, stage=0)
        every: list[Item] = [
            one
            for part in (work.forward, work.backward, work.recompute, work.step)
            for one, _ in part
        ]
        every += [use.call for use in self.uses]
        self.times_s = planted.times_s(list(dict.fromkeys(every)))

    def header(self, rank: int) -> Header:
        """Return the first line of the rank's file."""
        place = position(self.config.parallelism, rank)
        return Header(
            schema=SCHEMA,
            run_id=RUN_ID,
            rank=rank,
            world_size=self.config.parallelism.num_ranks,
            created_by="benchmarks/runs/synthetic_run.py",
            device=self.config.device,
            started_unix_s=1.0,
            tp_rank=place.tp_rank,
            dp_rank=place.dp_rank,
        )

    @cached_property
    def _peak_nbytes(self) -> int:
        return round(memory(self.config).total_nbytes)

    def records(self, rank: int, num_windows: int) -> Iterator[Record]:
        """Yield the records of all of its windows."""
        clock_ns = _START_NS
        for window in range(num_windows):
            first = window * _STEPS_OF_WINDOW
            for step in range(first, first + _STEPS_OF_WINDOW):
                one = _Step(self, rank, window, step, clock_ns)
                yield from one.records()
                clock_ns = one.at_ns
            yield WindowRecord(
                window=window,
                first_step=first,
                last_step=first + _STEPS_OF_WINDOW - 1,
                num_faults=0,
                num_dropped=0,
                memory_peak_nbytes=self._peak_nbytes,
                device_memory_nbytes=DEVICE_NBYTES,
            )


class _Step:
    def __init__(self, run: _Run, rank: int, window: int, step: int, at_ns: int) -> None:
        self._run, self._rank = run, rank
        self._step, self._window = step, window
        self._is_hooked = step % 2 == 0
        # All ranks use the same seed, since they run in lockstep.
        self._random = np.random.default_rng([run.seed, step])
        self._sequences: dict[tuple[int, ...], int] = {}
        self._out: list[Record] = []
        self.at_ns = at_ns

    def records(self) -> list[Record]:
        """Return passes, gradients, optimizer and the step itself."""
        start_ns, config, work = self.at_ns, self._run.config, self._run.work
        waited_ns = 0
        for microbatch in range(config.num_microbatches):
            waited_ns += self._pass("forward-compute", work.forward, microbatch)
            backward = (*work.recompute, *work.backward)
            waited_ns += self._pass("backward-compute", backward, microbatch)
        waited_ns += self._transfers(_AFTER_PASSES)
        self._phase("forward-backward", start_ns, 0, waited_ns)
        begin_ns = self.at_ns
        self._operators([one for one in work.step if one[0].kind not in _HOST_S], 0)
        self._phase("optimizer", begin_ns, 0, self._transfers((Placement.PARAM_GATHER,)))
        self._host(work.step)
        self._out.append(
            StepRecord(
                step=self._step,
                window=self._window,
                start_ns=start_ns,
                duration_ns=self.at_ns - start_ns,
                gap_ns=0,
                is_hooked=self._is_hooked,
            )
        )
        return self._out

    def _pass(self, name: str, operators: Iterable[OperatorCount], microbatch: int) -> int:
        """Add a pass and its operators; return nanoseconds of waiting for transfers."""
        start_ns, work = self.at_ns, list(operators)
        self._operators([one for one in work if one[0].kind not in _HOST_S], microbatch)
        waited_ns = self._transfers(_PASSES[name])
        self._host(work)
        self._phase(name, start_ns, microbatch, waited_ns)
        return waited_ns

    def _operators(self, work: Iterable[OperatorCount], microbatch: int) -> None:
        for operator, count in work:
            for number in range(count):
                duration_ns = self._drawn_ns(operator)
                if self._is_hooked:
                    record = OperatorRecord(
                        step=self._step,
                        window=self._window,
                        microbatch=microbatch,
                        kind=operator.kind,
                        phase=operator.phase,
                        shape=operator.shape,
                        element_nbytes=operator.element_nbytes,
                        layer=number,
                        start_ns=self.at_ns,
                        duration_ns=duration_ns,
                    )
                    self._out.append(record)
                self.at_ns += duration_ns

    def _host(self, work: Iterable[OperatorCount]) -> None:
        for operator, count in work:
            if operator.kind in _HOST_S:
                self.at_ns += count * self._drawn_ns(operator)

    def _transfers(self, placements: Sequence[Placement]) -> int:
        """Add the transfers at these placements; return their nanoseconds."""
        begin_ns, layout = self.at_ns, self._run.config.parallelism
        uses = [use for use in self._run.uses if use.placement in placements]
        for call in (use.call for use in uses for _ in range(use.count)):
            ranks = group(layout, call.role, self._rank)
            duration_ns = self._drawn_ns(call)
            sequence = self._sequences.get(ranks, 0)
            self._sequences[ranks] = sequence + 1
            if self._is_hooked:
                record = CollectiveRecord(
                    step=self._step,
                    window=self._window,
                    collective=call.collective,
                    role=call.role,
                    group=f"{call.role.value}#1",
                    ranks=ranks,
                    nbytes=call.nbytes,
                    sequence=sequence,
                    peer=-1,
                    is_async=False,
                    is_bound=False,
                    issue_ns=self.at_ns,
                    duration_ns=duration_ns,
                    exposed_ns=duration_ns,
                )
                self._out.append(record)
            self.at_ns += duration_ns
        return self.at_ns - begin_ns

    def _phase(self, name: str, start_ns: int, microbatch: int, wait_ns: int) -> None:
        self._out.append(
            PhaseRecord(
                step=self._step,
                window=self._window,
                name=name,
                microbatch=microbatch,
                start_ns=start_ns,
                duration_ns=self.at_ns - start_ns,
                wait_ns=wait_ns,
            )
        )

    def _drawn_ns(self, item: Item) -> int:
        scatter = np.exp(NOISE_LOG * self._random.standard_normal())
        return round(self._run.times_s[item] * _NS * float(scatter))
