"""The reason why requested layouts are not first in a plan: a rule, their memory or their time."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments.megatron_args import apply_options
from ..arguments.short_names import LayoutConstraint
from ..arguments.taken_options import unsupported_options_reason
from ..errors import ConfigError
from ..memory.peak import Verdict
from ..plain_json import JsonObject
from ..units import format_bytes, format_frac, format_time
from ..workload.choices import choice
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encode_fields, encoded
from .planning import Candidate, Plan

_OF_THE_PLAN = ("gpus", "gbs", "seq")
"""Axes that have one value in all layouts of a plan."""
_FREE = ("tp", "pp", "cp", "ep", "mbs")
"""Axes set to 1 if not constrained, so that the fewest rules are violated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot(Encoded):
    """Reason why none of the requested layouts is first."""

    asked: str
    """The requested layouts, in the notation of the command line."""
    num_layouts: int
    """Number of requested layouts that were searched; 0 if none, or if a rule forbids all."""
    best: Candidate | None
    """The fastest that fits, else the one that needs least memory; None if there is none."""
    text: str

    def to_json(self) -> JsonObject:
        """Return the JSON object, with the label of the best."""
        return encode_fields(self) | encoded(best=self.best and self.best.label)


def why_not(
    constraint: LayoutConstraint, plan: Plan, constrained_plan: Plan, num_ranks: int
) -> WhyNot:
    """Return why no layout that satisfies ``constraint`` is first in ``plan``.

    ``constrained_plan`` is a plan of such layouts only.  The reason is their time against the first
    layout that fits; memory if none of them fits; the rule that forbids them if there are none on
    ``num_ranks`` ranks.
    """
    running, rows = plan.running.config, constrained_plan.candidates
    fitting = [one for one in rows if one.verdict is not Verdict.DOES_NOT_FIT]
    best: Candidate | None = None
    if fitting:
        best = min(fitting, key=lambda one: one.step_time_s)
        text = _behind(best, plan)
    elif rows:
        best = min(rows, key=lambda one: one.memory.total_nbytes)
        text = f"none fits in memory; {best.label} needs least, "
        text += format_bytes(best.memory.total_nbytes)
        if (capacity_nbytes := constrained_plan.memory_capacity_nbytes) is not None:
            text += f" of {format_bytes(capacity_nbytes)}"
    else:
        text = _elsewhere(constraint, running, num_ranks) or _rule(constraint, running, num_ranks)
    if best is not None and (clause := unsupported_options_reason(best.config, running)):
        text = f"{text}; {clause}"
    num_layouts = constrained_plan.num_layouts if rows else 0
    return WhyNot(asked=str(constraint), num_layouts=num_layouts, best=best, text=text)


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


def _elsewhere(constraint: LayoutConstraint, running: RunConfig, num_ranks: int) -> str:
    """Return the option for a requested value that this plan cannot have; empty if it can."""
    for one in map(choice, _OF_THE_PLAN):
        here = num_ranks if one.name == "gpus" else one.read(running)
        values = constraint.axes.get(one.name, (here,))
        if here not in values:
            option = " ".join(one.options(values[0]))
            return f"this plan is for {one.name}={here}; ask for {option}"
    return ""


def _rule(constraint: LayoutConstraint, running: RunConfig, num_ranks: int) -> str:
    """Return the rule that the first requested values violate in an otherwise minimal layout."""
    if constraint.allows(running) and running.parallelism.num_ranks == num_ranks:
        return "it is the running layout"
    named = {name: values[0] for name, values in constraint.axes.items()}
    simple = {name: 1 for name in (*_FREE, "vpp") if name not in named}
    if running.model.experts is None:
        simple.pop("ep", None)
    if "pp" not in named and "vpp" in named:
        simple["pp"] = 2  # Virtual stages are stages of a pipeline.
    try:
        values = {"gpus": num_ranks, **simple, **named}
        words = [word for name, value in values.items() for word in choice(name).options(value)]
        config = apply_options(running, words)
    except ConfigError as err:
        return str(err)
    return unsupported_options_reason(config, running) or (
        "no layout of the run becomes it; forerun predict estimates its step time"
    )
