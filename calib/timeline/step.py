"""The step of a layout: its time with an interval, where the time goes, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..fit.estimates import Estimates, Estimator, Source
from ..fit.intervals import Z_90
from ..workload.collectives import Collective, CollectiveCall
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from ..workload.stage_work import collective_uses, stage_operators
from .compiled import Compiled, compile_layouts
from .evaluate import GroupTimes, evaluate, step_times
from .items import Floats, Item, Part, family, item_name
from .simulate import Simulation, Span, spans
from .steady import Run, simulate_each, simulate_long

__all__ = [
    "CONTENTION",
    "SCHEDULE_SIGMA_LOG",
    "Z_90",
    "Contribution",
    "Part",
    "StepEstimate",
    "estimate_many",
    "estimate_step",
    "median_times",
]

CONTENTION = 1.3
"""Slow-down of both where transfer and computation run side by side (Galvatron's default)."""
SCHEDULE_SIGMA_LOG = 0.02
"""Error of schedule and overlap themselves, beside that of their inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Seconds of a step that the critical stage spends on one kind of work, before overlap."""

    name: str
    phase: str
    """Phase of an operator; empty for a collective."""
    count: int
    time_s: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Median step time, its 90 % interval, and the parts of the critical stage."""

    config: RunConfig
    time_s: float
    low_s: float
    high_s: float
    sigma_log: float
    family_log: Mapping[str, float]
    """Change of log step time when one family of models is off by one standard deviation."""
    schedule_sigma_log: float
    critical_stage: int
    parts_s: Mapping[Part, float]
    """Seconds of the critical stage; they add up to ``time_s``."""
    contributions: tuple[Contribution, ...]
    source_frac: Mapping[Source, float]
    """Share of the work of the critical stage by where its time comes from."""
    spans: tuple[Span, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object, spans left out."""
        return {
            "time_s": self.time_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "sigma_log": self.sigma_log,
            "critical_stage": self.critical_stage,
            "parts_s": {part.value: time_s for part, time_s in self.parts_s.items()},
            "source_frac": {src.value: frac for src, frac in self.source_frac.items()},
            "family_log": dict(self.family_log),
            "contributions": [
                {
                    "name": c.name,
                    "phase": c.phase,
                    "count": c.count,
                    "time_s": c.time_s,
                    "source": c.source.value,
                }
                for c in self.contributions
            ],
        }


def estimate_step(
    config: RunConfig,
    estimator: Estimator,
    *,
    contention: float = CONTENTION,
    schedule_sigma_log: float = SCHEDULE_SIGMA_LOG,
) -> StepEstimate:
    """The modelled step of one layout, with spans for a trace.

    The errors of one operator kind or kind of transfer are taken as one: they add up linearly over
    the step, and in quadrature across kinds.
    """
    study = _Study([config], estimator, contention, simulate_each)
    found = study.groups[0]
    drawn = spans(found.costs, found.group.pipeline, column=0)
    return study.estimate(found, 0, schedule_sigma_log, (*drawn, *found.edge_spans(0)))


def estimate_many(
    configs: Sequence[RunConfig],
    estimator: Estimator,
    *,
    contention: float = CONTENTION,
    schedule_sigma_log: float = SCHEDULE_SIGMA_LOG,
) -> list[StepEstimate]:
    """The modelled steps of many layouts; the estimator is asked twice, whatever their number.

    Long pipelines are continued at their pace, see ``steady``.
    """
    if not configs:
        return []
    study = _Study(configs, estimator, contention, simulate_long)
    out: dict[int, StepEstimate] = {}
    for found in study.groups:
        for row, place in enumerate(found.group.members.tolist()):
            out[place] = study.estimate(found, row, schedule_sigma_log)
    return [out[place] for place in range(len(configs))]


def median_times(
    configs: Sequence[RunConfig], estimator: Estimator, *, contention: float = CONTENTION
) -> Floats:
    """Median step time of each layout, shape (layouts,): what a ranking of thousands needs.

    Long pipelines are continued at their pace, see ``steady``.
    """
    if not configs:
        return np.empty(0)
    compiled = compile_layouts(configs, _weight_fracs(estimator))
    times_s = np.array([row.time_s for row in _rows(compiled, estimator)])
    found = evaluate(compiled, times_s[:, None], contention=contention, run=simulate_long)
    return step_times(compiled, found)[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    time_s: float
    sigma_log: float
    source: Source


class _Study:
    """Layouts evaluated at the medians, and once more for each family one deviation slower."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        estimator: Estimator,
        contention: float,
        run: Callable[[Sequence[Run]], list[Simulation]],
    ) -> None:
        compiled = compile_layouts(configs, _weight_fracs(estimator))
        rows = _rows(compiled, estimator)
        self._compiled = compiled
        self._rows = dict(zip(compiled.items, rows, strict=True))
        self._families = tuple(sorted({family(item) for item in compiled.items}))
        columns = {name: place + 1 for place, name in enumerate(self._families)}
        times_s = np.repeat([[row.time_s] for row in rows], len(columns) + 1, axis=1)
        for place, (item, row) in enumerate(zip(compiled.items, rows, strict=True)):
            times_s[place, columns[family(item)]] *= math.exp(row.sigma_log)
        self.groups = evaluate(compiled, times_s, contention=contention, run=run)

    def estimate(
        self,
        found: GroupTimes,
        row: int,
        schedule_sigma_log: float,
        drawn: tuple[Span, ...] = (),
    ) -> StepEstimate:
        """The estimate of one layout of a group."""
        config = self._compiled.configs[int(found.group.members[row])]
        total = found.total_s[row]
        time_s = float(total[0])
        logs = np.log(total[1:] / total[0])
        sigma = math.sqrt(float(np.sum(logs**2)) + schedule_sigma_log**2)
        critical = found.critical_stage(row)
        contributions = _contributions(config, critical, self._rows)
        return StepEstimate(
            config=config,
            time_s=time_s,
            sigma_log=sigma,
            low_s=time_s * math.exp(-Z_90 * sigma),
            high_s=time_s * math.exp(Z_90 * sigma),
            family_log={
                name: log for name, log in zip(self._families, logs.tolist(), strict=True) if log
            },
            schedule_sigma_log=schedule_sigma_log,
            critical_stage=critical,
            parts_s=found.parts_s(row),
            contributions=contributions,
            source_frac=_shares(contributions),
            spans=drawn,
        )


def _weight_fracs(estimator: Estimator) -> Mapping[OperatorKind, float]:
    """What a traced step told of linears' backward phases, where the estimator has seen one."""
    return getattr(estimator, "weight_fracs", {})


def _rows(compiled: Compiled, estimator: Estimator) -> list[_Row]:
    """What the estimator says of each item."""
    operators = [item for item in compiled.items if isinstance(item, Operator)]
    calls = [item for item in compiled.items if isinstance(item, CollectiveCall)]
    rows: dict[Item, _Row] = {}
    if operators:
        _enter(rows, operators, estimator.operators(operators))
    if calls:
        _enter(rows, calls, estimator.collectives(calls))
    return [rows[item] for item in compiled.items]


def _enter(rows: dict[Item, _Row], items: Sequence[Item], found: Estimates) -> None:
    for index, item in enumerate(items):
        rows[item] = _Row(
            time_s=float(found.time_s[index]),
            sigma_log=float(found.sigma_log[index]),
            source=found.sources[index],
        )


def _contributions(
    config: RunConfig, stage: int, rows: Mapping[Item, _Row]
) -> tuple[Contribution, ...]:
    work = stage_operators(config, stage)
    num_microbatches = config.num_microbatches
    out: list[Contribution] = []
    for operator, count in (*work.forward, *work.backward, *work.recompute, *work.step):
        repeats = count * (1 if operator.phase is Phase.STEP else num_microbatches)
        out.append(_contribution(operator, operator.phase.value, repeats, rows[operator]))
    for use in collective_uses(config, stage=stage):
        repeats = use.count * (num_microbatches if use.placement.is_per_microbatch else 1)
        row = rows.get(use.call) or rows[_as_send(use.call)]
        out.append(_contribution(use.call, "", repeats, row))
    return tuple(out)


def _as_send(call: CollectiveCall) -> CollectiveCall:
    """The other end of a message, which is the one that is timed."""
    return replace(call, collective=Collective.SEND)


def _contribution(item: Item, phase: str, count: int, row: _Row) -> Contribution:
    return Contribution(
        name=item_name(item), phase=phase, count=count, time_s=count * row.time_s, source=row.source
    )


def _shares(contributions: Sequence[Contribution]) -> dict[Source, float]:
    total = sum(c.time_s for c in contributions)
    sums = dict.fromkeys(Source, 0.0)
    for c in contributions:
        sums[c.source] += c.time_s
    return {source: time_s / total if total else 0.0 for source, time_s in sums.items()}
