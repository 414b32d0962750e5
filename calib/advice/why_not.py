"""What keeps some layouts from the top of a plan: a rule, memory, or time."""

from __future__ import annotations

from dataclasses import dataclass

from ..arguments.keep import Keep
from ..arguments.megatron_args import apply_options
from ..arguments.short_names import layout_name
from ..errors import ConfigError
from ..memory.peak import Verdict
from ..plain_json import JsonObject
from ..units import format_bytes, format_frac, format_time
from ..workload.config import RunConfig
from .plan import Candidate, Plan

_FREE = ("tp", "pp", "cp", "ep", "mbs")
"""Axes that a layout has at 1 where nothing is asked of them: least stands in its way then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Why none of the layouts that were asked for is first."""

    asked: Keep
    num_layouts: int
    """How many of them there are; 0: a rule forbids all."""
    best: Candidate | None
    """The fastest that fits, else the one that needs least; None where there is none."""
    text: str

    def to_json(self) -> JsonObject:
        """A JSON object."""
        return {
            "asked": str(self.asked),
            "num_layouts": self.num_layouts,
            "best": self.best.label if self.best is not None else None,
            "text": self.text,
        }


def why_not(asked: Keep, found: Plan, kept: Plan, num_ranks: int) -> WhyNot:
    """What keeps the layouts of ``kept``, a plan of those alone, from the top of ``found``.

    Time against the first that fits; memory where none does; the rule that forbids them where
    there are none on ``num_ranks`` ranks.
    """
    fitting = [one for one in kept.candidates if one.verdict is not Verdict.DOES_NOT_FIT]
    best: Candidate | None
    if fitting:
        best = min(fitting, key=lambda one: one.step_time_s)
        text = _behind(best, found)
    elif kept.candidates:
        best = min(kept.candidates, key=lambda one: one.memory.total_nbytes)
        text = f"none fits in memory; {_needed(best, kept.memory_capacity_nbytes)}"
    else:
        best = None
        is_own = asked.allows(found.own.config)
        text = "it is the running layout" if is_own else _rule(asked, found.own.config, num_ranks)
    num_layouts = kept.num_layouts if kept.candidates else 0
    return WhyNot(asked=asked, num_layouts=num_layouts, best=best, text=text)


def _behind(best: Candidate, found: Plan) -> str:
    able = [found.own, *found.candidates]
    able = [one for one in able if one.verdict is not Verdict.DOES_NOT_FIT]
    first = min(able, key=lambda one: one.step_time_s, default=best)
    if first.config == best.config:
        return f"nothing does: {best.label} is first"
    behind = format_frac(best.step_time_s / first.step_time_s - 1, signed=True)
    return (
        f"the fastest, {best.label}, takes {format_time(best.step_time_s)}, {behind} against "
        f"{first.label}"
    )


def _needed(least: Candidate, capacity_nbytes: int | None) -> str:
    needs = f"{least.label} needs least, {format_bytes(least.memory.total_nbytes)}"
    return needs if capacity_nbytes is None else f"{needs} of {format_bytes(capacity_nbytes)}"


def _rule(asked: Keep, running: RunConfig, num_ranks: int) -> str:
    """What the first of the values breaks, the rest of the layout being as simple as can be."""
    named = {one.name: one.values[0] for one in asked.axes}
    simple = {name: 1 for name in (*_FREE, "vpp") if name not in named}
    if running.model.experts is None:
        simple.pop("ep", None)
    if "pp" not in named and "vpp" in named:
        simple["pp"] = 2  # Virtual stages are stages of a pipeline.
    wanted = {"gpus": num_ranks, **simple, **named}
    words = [word for name, value in wanted.items() for word in layout_name(name).options(value)]
    try:
        apply_options(running, words)
    except ConfigError as err:
        return str(err)
    return (
        "no rule of the model forbids it, and it is not among the layouts that are tried: "
        "forerun predict says how long it takes"
    )
