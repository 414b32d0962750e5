"""How sharp the best layout of a plan is: how close the next ones are, and which choices matter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from ..memory.layout_table import needed_nbytes
from ..memory.peak import Verdict
from ..regressors.intervals import Z_90
from ..search.found import Room
from ..search.labels import layout_label
from ..search.space import sharded_otherwise
from ..steps.estimate import paired_sigma_log
from ..steps.known import MEASURED_SIGMA_LOG
from ..steps.model import FittedSteps
from ..units import format_frac
from ..workload.config import Batch, Parallelism, Recompute, RunConfig
from ..workload.config_json import Encoded
from .axes import axis_value, changed
from .plan import Candidate, Plan

NUM_NEXT = 10
"""Layouts behind the first that are told of: as many as a plan shows."""
_AXES = ("tp", "pp", "vp", "cp", "ep", "mbs", "recompute", "sharding")
_NUM_VARIED = 5
"""Layouts whose axes are set to other values, so that what goes best with a value may differ from
what goes best with another."""
_MATTERS_FRAC = MEASURED_SIGMA_LOG
"""A choice that costs less than steps of one layout scatter by does not matter."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChoice(Encoded):
    """The fastest layout that was found with one value of an axis."""

    value: str
    label: str
    step_time_s: float
    slower_frac: float
    """Than the fastest of all; the best with this value is at most as slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWorth(Encoded):
    """What an axis is worth: its values, the fastest first."""

    JSON: ClassVar[str] = "axis cost_frac matters alike choices"

    axis: str
    choices: tuple[HeldChoice, ...]
    """At least two."""

    @property
    def cost_frac(self) -> float:
        """What the next best value costs."""
        return self.choices[1].slower_frac

    @property
    def matters(self) -> bool:
        """Whether that is more than steps scatter by."""
        return self.cost_frac > _MATTERS_FRAC

    @property
    def alike(self) -> tuple[str, ...]:
        """Values that take as long as the fastest, within what steps scatter by."""
        return tuple(c.value for c in self.choices if c.slower_frac <= _MATTERS_FRAC)

    @property
    def is_idle(self) -> bool:
        """Whether no value costs more."""
        return len(self.alike) == len(self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breadth(Encoded):
    """How sharp a plan's best is."""

    JSON: ClassVar[str] = "first next_slower_frac num_not_told_apart axes"

    first: str
    next_slower_frac: tuple[float, ...]
    """How much slower the next layouts are than the first."""
    num_not_told_apart: int
    """Of these, whose 90 % interval against the first holds 0."""
    axes: tuple[AxisWorth, ...]
    """Those with a choice, the one that costs most first."""

    @property
    def text(self) -> str:
        """One line: how close the next are, and what matters."""
        words = []
        if self.next_slower_frac:
            number = len(self.next_slower_frac)
            low, high = (
                format_frac(min(self.next_slower_frac)),
                format_frac(max(self.next_slower_frac)),
            )
            words.append(f"the next {number} are {low} to {high} slower")
            words.append(f"{self.num_not_told_apart} of them cannot be told apart from the first")
        telling = [axis for axis in self.axes if axis.matters][:_MOST_NAMED]
        if telling:
            costs = (
                f"{a.axis} {a.choices[0].value} (else +{format_frac(a.cost_frac)})" for a in telling
            )
            words.append(f"what matters: {', '.join(costs)}")
        close = [axis for axis in self.axes if not axis.matters and not axis.is_idle]
        if close:
            values = (f"{axis.axis} {' or '.join(axis.alike)}" for axis in close)
            words.append(f"as good: {', '.join(values)}")
        idle = [axis.axis for axis in self.axes if axis.is_idle]
        if idle:
            words.append(f"what does not: {', '.join(idle)}")
        return "; ".join(words)


def breadth(plan: Plan, steps: FittedSteps) -> Breadth | None:
    """How much slower others are than the fastest layout of a plan that fits; None where none does.

    The running layout counts.  What an axis costs is found among the layouts of the plan and those
    that differ from its fastest on this axis alone and fit by the rule of its search.
    """
    ranked = sorted(
        (c for c in (plan.own, *plan.candidates) if c.verdict is not Verdict.DOES_NOT_FIT),
        key=lambda c: c.step_time_s,
    )
    if not ranked:
        return None
    num_ranks = ranked[0].config.parallelism.num_ranks
    ranked = [c for c in ranked if c.config.parallelism.num_ranks == num_ranks]
    offset_nbytes = plan.own.memory.offset_nbytes
    room = Room(capacity_nbytes=plan.memory_capacity_nbytes, offset_nbytes=offset_nbytes)
    first, *others = ranked[: NUM_NEXT + 1]
    return Breadth(
        first=first.label,
        next_slower_frac=tuple(c.step_time_s / first.step_time_s - 1.0 for c in others),
        num_not_told_apart=_not_told_apart(first, others, steps),
        axes=_axes(ranked, steps, room),
    )


def _not_told_apart(first: Candidate, others: Sequence[Candidate], steps: FittedSteps) -> int:
    best, *found = steps.estimates([c.config for c in (first, *others)])
    return sum(
        math.log(one.time_s / best.time_s) <= Z_90 * paired_sigma_log(one, best) for one in found
    )


def _axes(ranked: Sequence[Candidate], steps: FittedSteps, room: Room) -> tuple[AxisWorth, ...]:
    times_s = {c.config: c.step_time_s for c in ranked}
    varied = dict.fromkeys(
        other
        for candidate in ranked[:_NUM_VARIED]
        for axis in _AXES
        for other in _with_other_values(candidate.config, axis)
    )
    fresh = [config for config in varied if config not in times_s]
    if fresh:
        holds = room.holds(*needed_nbytes(fresh)).tolist()
        fresh = [config for config, is_held in zip(fresh, holds, strict=True) if is_held]
    times_s |= dict(zip(fresh, np.asarray(steps.median_times(fresh)).tolist(), strict=True))
    ordered = sorted(times_s, key=lambda config: times_s[config])
    found = (_worth(axis, ordered, times_s) for axis in _AXES)
    return tuple(sorted(filter(None, found), key=lambda one: -one.cost_frac))


def _worth(
    axis: str, ordered: Sequence[RunConfig], times_s: dict[RunConfig, float]
) -> AxisWorth | None:
    best: dict[str, RunConfig] = {}
    for config in ordered:
        best.setdefault(axis_value(config, axis), config)
    if len(best) < 2:
        return None
    least_s = times_s[ordered[0]]
    choices = tuple(
        HeldChoice(
            value=value,
            label=layout_label(config),
            step_time_s=times_s[config],
            slower_frac=times_s[config] / least_s - 1.0,
        )
        for value, config in best.items()
    )
    return AxisWorth(axis=axis, choices=choices)


def _with_other_values(config: RunConfig, axis: str) -> Iterator[RunConfig]:
    """The layout with the values beside its own on an axis, where these can run."""
    if axis == "sharding":
        yield from sharded_otherwise(config)
        return
    for values in _values(config, axis):
        try:
            yield changed(config, values)
        except ConfigError:
            continue


def _values(config: RunConfig, axis: str) -> list[dict[str, Any]]:
    if axis == "cp" and config.device == "cpu":
        return []
    if axis == "recompute":
        plain = {"recompute_num_layers": 0, "recompute_modules": ()}
        return [{"recompute": one, **plain} for one in Recompute]
    name = "micro_batch_size" if axis == "mbs" else axis
    of: Batch | Parallelism = config.batch if axis == "mbs" else config.parallelism
    number = getattr(of, name)
    near = [2 * number] + [number // 2] * (number % 2 == 0)
    if axis == "tp":
        # Megatron trains experts over tp only with the sequence split too.
        splits = (True,) if config.model.experts is not None else (False, True)
        return [{"tp": value, "is_sequence_parallel": one} for value in near for one in splits]
    return [
        {name: value} | ({"microbatch_group_size": 0} if axis in ("pp", "vp") else {})
        for value in near
    ]
