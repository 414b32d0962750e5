"""Sharpness of a plan's optimum: distance of the next layouts, and the choices that matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arguments import (
    AxisValue,
    LayoutConstraint,
    apply_options,
    layout_name,
    unsupported_options_reason,
)
from ..errors import ConfigError
from ..memory import Verdict, needed_nbytes
from ..regressors import Z_90
from ..search import MemoryBudget, layout_label, other_shardings
from ..steps import MEASURED_SIGMA_LOG, FittedSteps, paired_sigma_log
from ..units import format_bytes, format_frac, format_time
from ..workload import Batch, Encoded, Parallelism, Recompute, RunConfig
from .axes import axis_value, changed
from .planning import Candidate, Plan

NUM_NEXT = 10
"""Number of layouts behind the first that are reported; as many as a plan shows."""
_AXES = ("tp", "pp", "vp", "cp", "ep", "mbs", "recompute", "sharding")
_NUM_VARIED = 5
"""Number of layouts whose axes are varied, so that values combine with different choices."""
_MATTERS_FRAC = MEASURED_SIGMA_LOG
"""Smallest cost of a choice that matters: the scatter of steps of one layout."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice(Encoded):
    """The fastest known layout with one value of an axis."""

    value: str
    label: str
    step_time_s: float
    slower_frac: float
    """Excess over the fastest layout's step; an upper bound for the best one with this value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisWorth(Encoded):
    """Effect of an axis: its values, fastest first."""

    JSON: ClassVar[str] = "axis cost_frac matters alike choices"

    axis: str
    choices: tuple[AxisChoice, ...]
    """At least two."""

    @property
    def cost_frac(self) -> float:
        """Cost of the second-best value."""
        return self.choices[1].slower_frac

    @property
    def matters(self) -> bool:
        """True if ``cost_frac`` exceeds the scatter of steps."""
        return self.cost_frac > _MATTERS_FRAC

    @property
    def alike(self) -> tuple[str, ...]:
        """Values as fast as the fastest, within the scatter of steps."""
        return tuple(c.value for c in self.choices if c.slower_frac <= _MATTERS_FRAC)

    @property
    def is_idle(self) -> bool:
        """True if all values are as fast as the fastest."""
        return len(self.alike) == len(self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breadth(Encoded):
    """Sharpness of a plan's optimum."""

    JSON: ClassVar[str] = "first next_slower_frac num_not_told_apart=num_indistinguishable axes"

    first: str
    next_slower_frac: tuple[float, ...]
    """Slowdown of each of the next layouts against the first."""
    num_indistinguishable: int
    """Number of these whose 90 % interval against the first contains 0."""
    axes: tuple[AxisWorth, ...]
    """Axes with a choice, the costliest first."""

    @property
    def text(self) -> str:
        """Distance of the next layouts and the choices that matter, in one line."""
        words = []
        if self.next_slower_frac:
            number = len(self.next_slower_frac)
            low, high = (
                format_frac(min(self.next_slower_frac)),
                format_frac(max(self.next_slower_frac)),
            )
            words.append(f"the next {number} are {low} to {high} slower")
            words.append(
                f"{self.num_indistinguishable} of them are indistinguishable from the first"
            )
        telling = [axis for axis in self.axes if axis.matters][:_MOST_NAMED]
        if telling:
            costs = (
                f"{a.axis} {a.choices[0].value} (else +{format_frac(a.cost_frac)})" for a in telling
            )
            words.append(f"matters: {', '.join(costs)}")
        close = [axis for axis in self.axes if not axis.matters and not axis.is_idle]
        if close:
            values = (f"{axis.axis} {' or '.join(axis.alike)}" for axis in close)
            words.append(f"as good: {', '.join(values)}")
        idle = [axis.axis for axis in self.axes if axis.is_idle]
        if idle:
            words.append(f"does not matter: {', '.join(idle)}")
        return "; ".join(words)


def breadth(plan: Plan, steps: FittedSteps) -> Breadth | None:
    """Return how sharp the optimum of a plan is; None if no layout fits.

    The running layout counts too.  The cost of an axis is taken over the layouts of the plan and
    those that differ from its fastest on this axis only and fit by the rule of the search.
    """
    ranked = sorted(
        (c for c in plan.rows.values() if c.verdict is not Verdict.DOES_NOT_FIT),
        key=lambda c: c.step_time_s,
    )
    if not ranked:
        return None
    num_ranks = ranked[0].config.parallelism.num_ranks
    ranked = [c for c in ranked if c.config.parallelism.num_ranks == num_ranks]
    offset_nbytes = plan.running.memory.offset_nbytes
    budget = MemoryBudget(capacity_nbytes=plan.memory_capacity_nbytes, offset_nbytes=offset_nbytes)
    first, *others = ranked[: NUM_NEXT + 1]
    return Breadth(
        first=first.label,
        next_slower_frac=tuple(c.step_time_s / first.step_time_s - 1.0 for c in others),
        num_indistinguishable=_num_indistinguishable(first, others, steps),
        axes=_axes(ranked, steps, budget),
    )


def _num_indistinguishable(
    first: Candidate, others: Sequence[Candidate], steps: FittedSteps
) -> int:
    best, *runners_up = steps.estimates([c.config for c in (first, *others)])
    return sum(
        math.log(one.time_s / best.time_s) <= Z_90 * paired_sigma_log(one, best)
        for one in runners_up
    )


def _axes(
    ranked: Sequence[Candidate], steps: FittedSteps, budget: MemoryBudget
) -> tuple[AxisWorth, ...]:
    times_s = {c.config: c.step_time_s for c in ranked}
    varied = dict.fromkeys(
        other
        for candidate in ranked[:_NUM_VARIED]
        for axis in _AXES
        for other in _with_other_values(candidate.config, axis)
    )
    fresh = [config for config in varied if config not in times_s]
    if fresh:
        holds = budget.holds(*needed_nbytes(fresh)).tolist()
        fresh = [config for config, fits in zip(fresh, holds, strict=True) if fits]
    times_s |= dict(zip(fresh, np.asarray(steps.median_times(fresh)).tolist(), strict=True))
    ordered = sorted(times_s, key=lambda config: times_s[config])
    worths = (_worth(axis, ordered, times_s) for axis in _AXES)
    return tuple(sorted(filter(None, worths), key=lambda one: -one.cost_frac))


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
        AxisChoice(
            value=value,
            label=layout_label(config),
            step_time_s=times_s[config],
            slower_frac=times_s[config] / least_s - 1.0,
        )
        for value, config in best.items()
    )
    return AxisWorth(axis=axis, choices=choices)


def _with_other_values(config: RunConfig, axis: str) -> Iterator[RunConfig]:
    """Yield the layout with neighbouring values on an axis, if these can run."""
    if axis == "sharding":
        yield from other_shardings(config)
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


_OF_THE_PLAN = {"gpus": "--gpus", "gbs": "--global-batch-size", "seq": "--seq-length"}
"""Options for axes that have one value in all layouts of a plan."""
_MOST_UNTRIED = 20
"""Limit of layouts evaluated in addition to a plan; the fastest of them stands for the rest."""
_FREE = ("tp", "pp", "cp", "ep", "mbs")
"""Axes set to 1 if not constrained, so that the fewest rules are violated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot(Encoded):
    """Reason why none of the requested layouts is first."""

    JSON: ClassVar[str] = "asked=question num_layouts best=best.label text"

    constraint: LayoutConstraint
    num_layouts: int
    """Number of requested layouts that were searched; 0 if none, or if a rule forbids all."""
    best: Candidate | None
    """The fastest that fits, else the one that needs least memory; None if there is none."""
    text: str

    @property
    def question(self) -> str:
        """The requested layouts, in the notation of the command line."""
        return str(self.constraint)


def why_not(
    constraint: LayoutConstraint,
    plan: Plan,
    constrained_plan: Plan,
    num_ranks: int,
    priced: Callable[[Sequence[RunConfig]], Sequence[Candidate]],
) -> WhyNot:
    """Return why no layout that satisfies ``constraint`` is first in ``plan``.

    ``constrained_plan`` is a plan of such layouts only.  The reason is their time against the first
    layout that fits; memory if none of them fits; the rule that forbids them if there are none on
    ``num_ranks`` ranks.  If no rule forbids them and no plan tries them, ``priced`` evaluates the
    best layouts with the requested values put in.
    """
    tried = constrained_plan.candidates
    elsewhere = _elsewhere(constraint, plan.running.config, num_ranks)
    others = () if tried or elsewhere else tuple(_untried(constraint, plan, num_ranks))
    rows = tried or tuple(priced(others))
    fitting = [one for one in rows if one.verdict is not Verdict.DOES_NOT_FIT]
    best: Candidate | None = None
    if fitting:
        best = min(fitting, key=lambda one: one.step_time_s)
        text = _behind(best, plan)
    elif rows:
        best = min(rows, key=lambda one: one.memory.total_nbytes)
        text = f"none fits in memory; {_needed(best, constrained_plan.memory_capacity_nbytes)}"
    else:
        text = elsewhere or _rule(constraint, plan.running.config, num_ranks)
    if others:
        text = f"not among the layouts that are tried; {text}"
    if best is not None and (
        clause := unsupported_options_reason(best.config, plan.running.config)
    ):
        text = f"{text}; {clause}"
    return WhyNot(
        constraint=constraint,
        num_layouts=constrained_plan.num_layouts if tried else 0,
        best=best,
        text=text,
    )


def _behind(best: Candidate, plan: Plan) -> str:
    able = [one for one in plan.rows.values() if one.verdict is not Verdict.DOES_NOT_FIT]
    first = min(able, key=lambda one: one.step_time_s, default=best)
    if first.config == best.config:
        return f"no layout does: {best.label} is first"
    behind = format_frac(best.step_time_s / first.step_time_s - 1, signed=True)
    return (
        f"the fastest, {best.label}, takes {format_time(best.step_time_s)}, {behind} against "
        f"{first.label}"
    )


def _needed(least: Candidate, capacity_nbytes: int | None) -> str:
    needs = f"{least.label} needs least, {format_bytes(least.memory.total_nbytes)}"
    return needs if capacity_nbytes is None else f"{needs} of {format_bytes(capacity_nbytes)}"


def _untried(constraint: LayoutConstraint, plan: Plan, num_ranks: int) -> Iterator[RunConfig]:
    """Yield the best layouts with the requested values put in, if they can run, each once."""
    able = plan.rows.values()
    ours = (one.config for one in able if one.config.parallelism.num_ranks == num_ranks)
    words = _words({**_first(constraint), "gpus": num_ranks})
    seen: set[RunConfig] = set()
    for config in ours:
        try:
            changed = apply_options(config, words)
        except ConfigError:
            continue
        if constraint.allows(changed) and changed not in seen and changed != plan.running.config:
            seen.add(changed)
            yield changed
        if len(seen) == _MOST_UNTRIED:
            return


def _elsewhere(constraint: LayoutConstraint, running: RunConfig, num_ranks: int) -> str:
    """Return the option for a requested value that this plan cannot have; empty if it can."""
    for name, option in _OF_THE_PLAN.items():
        here = num_ranks if name == "gpus" else layout_name(name).read(running)
        values = constraint.values_of(name)
        if values is not None and here not in values:
            return f"this plan is for {name}={here}; ask for {option} {values[0]}"
    return ""


def _rule(constraint: LayoutConstraint, running: RunConfig, num_ranks: int) -> str:
    """Return the rule that the first requested values violate in an otherwise minimal layout."""
    if constraint.allows(running) and running.parallelism.num_ranks == num_ranks:
        return "it is the running layout"
    named = _first(constraint)
    simple = {name: 1 for name in (*_FREE, "vpp") if name not in named}
    if running.model.experts is None:
        simple.pop("ep", None)
    if "pp" not in named and "vpp" in named:
        simple["pp"] = 2  # Virtual stages are stages of a pipeline.
    try:
        apply_options(running, _words({"gpus": num_ranks, **simple, **named}))
    except ConfigError as err:
        return str(err)
    return "no layout of the run becomes it; forerun predict estimates its step time"


def _first(constraint: LayoutConstraint) -> dict[str, AxisValue]:
    return {one.name: one.values[0] for one in constraint.axes}


def _words(values: Mapping[str, AxisValue]) -> list[str]:
    return [word for name, value in values.items() for word in layout_name(name).options(value)]
