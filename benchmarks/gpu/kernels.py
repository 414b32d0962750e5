"""Events against kernels: each operator's time by events and by the sum of its kernels."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.marks.run_records import RunRecords
from forerun.calib.records.record_kinds import OperatorRecord, TraceRecord
from forerun.calib.samples.table import build_table
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind

SHORT_S = 20e-6
"""Seconds; operators below this are mostly launch time: shown, not judged."""


def kineto_part(run: RunRecords) -> dict[str, Any]:
    """Return each operator by events and by the sum of its kernels, with the differences: the
    largest of operators from ``SHORT_S`` on, that of a step, and that without the optimizer."""
    table = build_table(run)
    records = [record for rank_records in run.records.values() for record in rank_records]
    events = _by_operator(r for r in records if isinstance(r, OperatorRecord))
    kernels = _by_operator(r for r in records if isinstance(r, TraceRecord))
    if not kernels:
        names = [r.name for r in records if getattr(r, "name", "").startswith("trace")]
        raise ValueError(f"nothing was traced: {', '.join(names) or 'no reason given'}")
    pairs = {key: (events[key], kernels[key]) for key in sorted(events.keys() & kernels.keys())}
    errors = [abs(event / kernel - 1) for event, kernel in pairs.values() if event >= SHORT_S]
    calls = calls_in_step(table.config())
    rest = {key: times for key, times in pairs.items() if OperatorKind.OPTIMIZER.value not in key}
    return {
        "largest_frac": max(errors, default=0.0),
        "step_frac": weighted_frac(pairs, calls),
        "step_without_optimizer_frac": weighted_frac(rest, calls),
        "operators_s": pairs,
    }


def calls_in_step(config: RunConfig, stage: int = 0) -> Counter[str]:
    """Return how often a rank calls each operator in a step, by its name in the tables."""
    work = stage_operators(config, stage)
    calls: Counter[str] = Counter()
    for operator, number in (*work.forward, *work.backward, *work.recompute):
        calls[_operator_name(operator)] += number * config.num_microbatches
    for operator, number in work.step:
        calls[_operator_name(operator)] += number
    return calls


def weighted_frac(pairs: Mapping[str, tuple[float, float]], calls: Mapping[str, int]) -> float:
    """Return the difference of a step's first times from its second ones, over the second."""
    first, second = (
        sum(times[place] * calls.get(name, 0) for name, times in pairs.items()) for place in (0, 1)
    )
    return first / second - 1


def _by_operator(records: Iterable[OperatorRecord | TraceRecord]) -> dict[str, float]:
    """Return median seconds by operator."""
    times: dict[str, list[int]] = defaultdict(list)
    for one in records:
        times[_operator_name(one)].append(one.duration_ns)
    return {
        name: statistics.median(operator_times_ns) / 1e9
        for name, operator_times_ns in times.items()
    }


def _operator_name(operator: Operator | OperatorRecord | TraceRecord) -> str:
    shape = "x".join(map(str, operator.shape))
    return f"{operator.kind.value} {operator.phase.value} {shape}"
