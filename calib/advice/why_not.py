"""What keeps some layouts from the top of a plan: a rule, memory, or time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..arguments.keep import Keep
from ..arguments.megatron_args import apply_options
from ..arguments.short_names import AxisValue, layout_name
from ..arguments.taken_options import untaken
from ..errors import ConfigError
from ..memory.peak import Verdict
from ..units import format_bytes, format_frac, format_time
from ..workload.config import RunConfig
from ..workload.config_json import Encoded
from .plan import Candidate, Plan

_OF_THE_PLAN = {"gpus": "--gpus", "gbs": "--global-batch-size", "seq": "--seq-length"}
"""Axes that all layouts of a plan share, and the option that asks for another value."""
_MOST_UNTRIED = 20
"""Layouts that are priced beyond a plan: the fastest of them stands for the rest."""
_FREE = ("tp", "pp", "cp", "ep", "mbs")
"""Axes that a layout has at 1 where nothing is asked of them: least stands in its way then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot(Encoded):
    """Why none of the layouts that were asked for is first."""

    JSON: ClassVar[str] = "asked=question num_layouts best=best.label text"

    asked: Keep
    num_layouts: int
    """How many of them a plan is the best of; 0: none, or a rule forbids all."""
    best: Candidate | None
    """The fastest that fits, else the one that needs least; None where there is none."""
    text: str

    @property
    def question(self) -> str:
        """The layouts that were asked for, as the command line names them."""
        return str(self.asked)


def why_not(
    asked: Keep,
    found: Plan,
    kept: Plan,
    num_ranks: int,
    priced: Callable[[Sequence[RunConfig]], Sequence[Candidate]],
) -> WhyNot:
    """What keeps the layouts of ``kept``, a plan of those alone, from the top of ``found``.

    Time against the first that fits; memory where none does; where there are none on ``num_ranks``
    ranks, the rule that forbids them.  What no rule forbids and no plan tries is ``priced`` in
    place of the best layouts.
    """
    tried = kept.candidates
    elsewhere = _elsewhere(asked, found.own.config, num_ranks)
    others = () if tried or elsewhere else tuple(_untried(asked, found, num_ranks))
    rows = tried or tuple(priced(others))
    fitting = [one for one in rows if one.verdict is not Verdict.DOES_NOT_FIT]
    best: Candidate | None = None
    if fitting:
        best = min(fitting, key=lambda one: one.step_time_s)
        text = _behind(best, found)
    elif rows:
        best = min(rows, key=lambda one: one.memory.total_nbytes)
        text = f"none fits in memory; {_needed(best, kept.memory_capacity_nbytes)}"
    else:
        text = elsewhere or _rule(asked, found.own.config, num_ranks)
    if others:
        text = f"not among the layouts that are tried; {text}"
    if best is not None and (clause := untaken(best.config, found.own.config)):
        text = f"{text}; {clause}"
    return WhyNot(asked=asked, num_layouts=kept.num_layouts if tried else 0, best=best, text=text)


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


def _untried(asked: Keep, found: Plan, num_ranks: int) -> Iterator[RunConfig]:
    """The best layouts with what is asked in its place, where they can be, none twice."""
    able = [found.own, *found.candidates]
    ours = (one.config for one in able if one.config.parallelism.num_ranks == num_ranks)
    words = _words({**_first(asked), "gpus": num_ranks})
    seen: set[RunConfig] = set()
    for config in ours:
        try:
            changed = apply_options(config, words)
        except ConfigError:
            continue
        if asked.allows(changed) and changed not in seen and changed != found.own.config:
            seen.add(changed)
            yield changed
        if len(seen) == _MOST_UNTRIED:
            return


def _elsewhere(asked: Keep, running: RunConfig, num_ranks: int) -> str:
    """Which option asks for what all layouts of a plan have alike; empty where they have it."""
    for name, option in _OF_THE_PLAN.items():
        here = num_ranks if name == "gpus" else layout_name(name).read(running)
        values = asked.values_of(name)
        if values is not None and here not in values:
            return f"this plan is for {name}={here}; ask for {option} {values[0]}"
    return ""


def _rule(asked: Keep, running: RunConfig, num_ranks: int) -> str:
    """What the first of the values breaks, the rest of the layout being as simple as can be."""
    if asked.allows(running) and running.parallelism.num_ranks == num_ranks:
        return "it is the running layout"
    named = _first(asked)
    simple = {name: 1 for name in (*_FREE, "vpp") if name not in named}
    if running.model.experts is None:
        simple.pop("ep", None)
    if "pp" not in named and "vpp" in named:
        simple["pp"] = 2  # Virtual stages are stages of a pipeline.
    try:
        apply_options(running, _words({"gpus": num_ranks, **simple, **named}))
    except ConfigError as err:
        return str(err)
    return "no layout of the run becomes it; forerun predict says how long one takes"


def _first(asked: Keep) -> dict[str, AxisValue]:
    return {one.name: one.values[0] for one in asked.axes}


def _words(values: Mapping[str, AxisValue]) -> list[str]:
    return [word for name, value in values.items() for word in layout_name(name).options(value)]
