"""A plan for people: its tables, what is offered, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...calib.advice import Plan, Scaling
from ...calib.shell import joined
from ...calib.workload import takes_options
from ..options.plan_options import PlanQuestion
from ..report.layout_tables import (
    layouts_table,
    left_out_note,
    routing_note,
    search_note,
    telling_note,
)
from ..report.plan_tables import BestLayout, plans_table
from ..report.scaling_text import scaling_text
from .drawn import Part
from .one_plan import OnePlan


def several_parts(best: Sequence[BestLayout], curves: Sequence[Scaling]) -> Iterator[Part]:
    """The best layout of each of several plans beside each other, and what more GPUs bring."""
    points = {(one.device, point.num_ranks): point for one in curves for point in one.points}
    yield plans_table([replace(one, point=points.get((one.device, one.num_ranks))) for one in best])
    yield "\n".join(["", scaling_text(curves), ""])


def one_parts(
    one: OnePlan, best: BestLayout, question: PlanQuestion, *, is_one_of_many: bool
) -> Iterator[Part]:
    """One plan in full: its layouts, what is offered, and what that rests on."""
    title = f"Layouts on {one.num_ranks} GPUs, {one.device}" if is_one_of_many else "Layouts"
    plan, sharp = one.plan, one.breadth
    if one.machine.basis:
        yield one.machine.basis
    own_name = "running" if one.is_as_run and plan.own.is_comparable else "as now"
    if one.machine.basis:
        own_name = "as described"
    if plan.candidates:
        yield layouts_table(plan, question.top, left=one.left, title=title, own_name=own_name)
    if best.candidate is not None and best.whole_run is not None:
        yield "\n".join([f"a run in {best.candidate.label}", *best.whole_run.lines])
    if one.why is not None:
        yield f"why not {question.why}: {one.why.text}"
    yield from _offer(plan)
    notes = (left_out_note(plan), routing_note(plan), telling_note(plan), search_note(plan))
    yield from filter(None, (sharp.text if sharp is not None else "", *notes))


def _offer(plan: Plan) -> Iterator[str]:
    """The options of the fastest layout that may be offered, and why none before it is; or what
    came nearest."""
    if plan.doubt:
        yield plan.doubt
    best = plan.best
    if best is None and (coded := plan.by_code) is not None:
        row = plan.candidates.index(coded) + 1
        yield f"row {row}, {coded.label}, takes a change of the code: {plan.obstacle(coded)}"
        return
    if best is None:
        nothing = "nothing faster to offer" if plan.own.is_comparable else "nothing to offer"
        yield " · ".join(filter(None, [nothing, plan.nearest_miss]))
        return
    row, first = plan.candidates.index(best) + 1, plan.candidates[0]
    if row > 1:
        yield f"row 1, {first.label}, is not offered: {plan.obstacle(first)}"
    if takes_options(plan.own.config):
        yield f"row {row}, {best.label}: {joined(best.options)}"
    else:
        yield f"fastest that may be offered: {best.label}"
