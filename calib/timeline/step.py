"""The step of a layout: its time with an interval, where the time goes, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..fit.estimates import Estimates, Estimator, Source
from ..workload.collectives import CollectiveCall
from ..workload.config import RunConfig
from ..workload.operators import Operator, Phase
from .simulate import (
    PipelineCosts,
    Simulation,
    Span,
    joined,
    pipeline_costs,
    simulate,
    spans,
)
from .stages import (
    Item,
    Part,
    StageTimes,
    StageWork,
    family,
    gathers_ahead,
    item_name,
    items_of,
    stage_times,
    stage_work,
)

Z_90 = 1.6448536269514722
"""Half-width of a 90 % interval in standard deviations."""
CONTENTION = 1.3
"""Slow-down of both where transfer and computation run side by side (Galvatron's default)."""
SCHEDULE_SIGMA_LOG = 0.02
"""Error of schedule and overlap themselves, beside that of their inputs."""

Floats = NDArray[np.float64]


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
    the step, and in quadrature across kinds.  Raises ``ConfigError`` for interleaved stages.
    """
    works = stage_work(_checked(config))
    table = _tabulate(items_of(works), estimator)
    layout = _layout(config, works, table, contention)
    out = _estimate(
        layout, simulate(layout.costs, config.num_microbatches), table, schedule_sigma_log
    )
    return replace(out, spans=spans(layout.costs, config.num_microbatches))


def estimate_many(
    configs: Sequence[RunConfig],
    estimator: Estimator,
    *,
    contention: float = CONTENTION,
    schedule_sigma_log: float = SCHEDULE_SIGMA_LOG,
) -> list[StepEstimate]:
    """The modelled steps of many layouts; the estimator is asked twice, whatever their number."""
    works = [stage_work(_checked(config)) for config in configs]
    table = _tabulate(items_of(work for stages in works for work in stages), estimator)
    groups: dict[tuple[int, int], list[int]] = {}
    for index, config in enumerate(configs):
        groups.setdefault((config.parallelism.pp, config.num_microbatches), []).append(index)
    out: list[StepEstimate | None] = [None] * len(configs)
    for (_, num_microbatches), members in groups.items():
        layouts = [_layout(configs[i], works[i], table, contention) for i in members]
        joint = simulate(joined([layout.costs for layout in layouts]), num_microbatches)
        begin = 0
        for index, layout in zip(members, layouts, strict=True):
            end = begin + layout.costs.forward_s.shape[1]
            out[index] = _estimate(layout, joint.columns(begin, end), table, schedule_sigma_log)
            begin = end
    return [estimate for estimate in out if estimate is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    time_s: float
    sigma_log: float
    source: Source


_Table = dict[Item, _Row]


def _checked(config: RunConfig) -> RunConfig:
    if config.parallelism.vp > 1:
        raise ConfigError(
            f"vp {config.parallelism.vp}: interleaved schedules are not modelled yet; set vp 1"
        )
    return config


def _tabulate(items: set[Item], estimator: Estimator) -> _Table:
    operators = [item for item in items if isinstance(item, Operator)]
    calls = [item for item in items if isinstance(item, CollectiveCall)]
    table: _Table = {}
    if operators:
        _enter(table, operators, estimator.operators(operators))
    if calls:
        _enter(table, calls, estimator.collectives(calls))
    return table


def _enter(table: _Table, items: Sequence[Item], found: Estimates) -> None:
    for index, item in enumerate(items):
        table[item] = _Row(
            time_s=float(found.time_s[index]),
            sigma_log=float(found.sigma_log[index]),
            source=found.sources[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """One layout: column 0 has median times, in column k family k is one deviation slower."""

    config: RunConfig
    works: tuple[StageWork, ...]
    families: tuple[str, ...]
    stages: tuple[StageTimes, ...]
    costs: PipelineCosts


def _layout(
    config: RunConfig, works: tuple[StageWork, ...], table: _Table, contention: float
) -> _Layout:
    items = items_of(works)
    families = tuple(sorted({family(item) for item in items}))
    places = {name: index + 1 for index, name in enumerate(families)}
    times = {item: _columns(table[item], places[family(item)], len(families) + 1) for item in items}
    costs, stages = _costs(config, works, times, contention)
    return _Layout(config=config, works=works, families=families, stages=stages, costs=costs)


def _estimate(
    layout: _Layout, pipeline: Simulation, table: _Table, schedule_sigma_log: float
) -> StepEstimate:
    total, parts, critical = _step_time(layout, pipeline)
    time_s = float(total[0])
    logs = np.log(total[1:] / total[0])
    sigma = math.sqrt(float(np.sum(logs**2)) + schedule_sigma_log**2)
    num_microbatches = layout.config.num_microbatches
    contributions = _contributions(layout.works[critical], table, num_microbatches)
    return StepEstimate(
        config=layout.config,
        time_s=time_s,
        sigma_log=sigma,
        low_s=time_s * math.exp(-Z_90 * sigma),
        high_s=time_s * math.exp(Z_90 * sigma),
        family_log=dict(zip(layout.families, logs.tolist(), strict=True)),
        schedule_sigma_log=schedule_sigma_log,
        critical_stage=critical,
        parts_s=parts,
        contributions=contributions,
        source_frac=_shares(contributions),
    )


def _columns(row: _Row, place: int, num_columns: int) -> Floats:
    out = np.full(num_columns, row.time_s)
    out[place] *= math.exp(row.sigma_log)
    return out


def _costs(
    config: RunConfig, works: tuple[StageWork, ...], times: Mapping[Item, Floats], contention: float
) -> tuple[PipelineCosts, tuple[StageTimes, ...]]:
    is_host_only = config.device == "cpu"
    distinct = {
        key: stage_times(work, times, contention=contention, is_host_only=is_host_only)
        for key, work in {id(work): work for work in works}.items()
    }
    found = tuple(distinct[id(work)] for work in works)
    hops = np.array([stage.hop_s for stage in found[:-1]])
    hops = hops.reshape(len(found) - 1, found[0].hop_s.shape[0])
    starts = [stage.gather_s if gathers_ahead(config) else 0 * stage.gather_s for stage in found]
    costs = pipeline_costs(
        np.array([stage.forward_pass_s for stage in found]),
        np.array([stage.backward_pass_s for stage in found]),
        activation_s=hops,
        gradient_s=hops,
        # Where the cores copy, two directions at once take the time of both.
        both_s=hops * (2 if is_host_only else 1),
        start_s=np.array(starts),
    )
    return costs, found


def _step_time(layout: _Layout, pipeline: Simulation) -> tuple[Floats, dict[Part, float], int]:
    """Step time per column, the parts of column 0, and the stage that is ready last."""
    config, stages = layout.config, layout.stages
    ready = pipeline.end_s + np.array([s.reduce_s + s.tp_finish_s for s in stages])
    ends = [0, len(stages) - 1]
    embedding = stages[0].embedding_s
    if np.any(embedding):
        ready[ends] = ready[ends].max(axis=0) + embedding
    is_ahead = gathers_ahead(config)
    tails = np.array(
        [
            s.optimizer_s + s.host_step_s + (0 * s.gather_s if is_ahead else s.gather_s)
            for s in stages
        ]
    )
    # The gradient norm is summed over all stages: no optimizer starts before the last is ready.
    total = ready.max(axis=0) + tails.max(axis=0)
    critical = int(np.argmax(ready[:, 0]))
    transfer = float(pipeline.transfer_s[critical, 0])
    parts = _parts(stages[critical], config.num_microbatches, transfer)
    parts[Part.BUBBLE] = max(0.0, float(total[0]) - sum(parts.values()))
    return total, parts, critical


def _parts(stage: StageTimes, num_microbatches: int, transfer_s: float) -> dict[Part, float]:
    def first(values: Floats) -> float:
        return float(values[0])

    m = num_microbatches
    return {
        Part.FORWARD: m * first(stage.forward_s),
        Part.BACKWARD: m * first(stage.backward_s),
        Part.RECOMPUTE: m * first(stage.recompute_s),
        Part.TP: m * first(stage.tp_forward_s + stage.tp_backward_s) + first(stage.tp_finish_s),
        Part.PP: transfer_s,
        Part.DP: first(stage.reduce_s + stage.gather_s + stage.embedding_s),
        Part.OPTIMIZER: first(stage.optimizer_s),
        Part.HOST: m * first(stage.host_forward_s + stage.host_backward_s)
        + first(stage.host_step_s),
    }


def _contributions(
    work: StageWork, table: _Table, num_microbatches: int
) -> tuple[Contribution, ...]:
    out: list[Contribution] = []
    for operator, count in work.operators:
        repeats = count * (1 if operator.phase is Phase.STEP else num_microbatches)
        out.append(_contribution(operator, operator.phase.value, repeats, table[operator]))
    for use in work.uses:
        repeats = use.count * (num_microbatches if use.placement.is_per_microbatch else 1)
        out.append(_contribution(use.call, "", repeats, table[use.call]))
    return tuple(out)


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
