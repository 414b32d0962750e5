"""``forerun plan``: the best layouts on numbers of GPUs, of the run's kind or of others."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...calib.advice.breadth import breadth
from ...calib.advice.plan import Candidate, Plan, compare
from ...calib.advice.plan import plan as make_plan
from ...calib.advice.scaling import Scaling, best_on, curve
from ...calib.advice.why_not import WhyNot, why_not
from ...calib.arguments.keep import Keep
from ...calib.errors import ConfigError
from ...calib.forecast.throughput import RunLeft
from ...calib.search.found import TOP, Effort
from ...calib.workload.config import RunConfig
from ...calib.workload.hosts import takes_options
from ..directory.run_left import run_left
from ..known.machines import Machine
from ..options.plan_options import Objective, PlanQuestion, plan_question
from ..options.show_options import asks_for_command
from ..report.layout_tables import (
    layouts_table,
    left_out_note,
    routing_note,
    search_note,
    telling_note,
)
from ..report.plan_tables import BestLayout, plans_table
from ..report.scaling_text import scaling_text
from ..report.table import console, show_table
from ..report.throughput_cells import rest_json
from .answer_commands import described, machine_of, network_json
from .outcome import ExitCode, print_json, tell
from .search_effort import search_effort


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The plan for one device and one number of ranks, and what it was made from."""

    device: str
    num_ranks: int
    machine: Machine
    plan: Plan
    price_per_gpu_hour: float | None
    why: WhyNot | None
    left: RunLeft | None = None
    """The rest of the run, where it is known and the model is the run's."""

    @property
    def is_as_run(self) -> bool:
        """Whether layouts are held against the run itself, not against what was asked of it."""
        return self.plan.own.config == self.machine.own


def plan(args: argparse.Namespace) -> int:
    """Print the layouts that were asked for, best first."""
    question = plan_question(args)
    row = args.show or 0
    with search_effort(max(TOP, question.top, row)) as effort:
        answers = list(_answers(args, question, effort))
    best = [_best(one, question) for one in answers]
    curves = _curves(answers, best) if len(answers) > 1 else []
    # Of several the first that the objective prefers is told in full.
    if asks_for_command(args):
        chosen = answers[0] if len(answers) == 1 else _preferred(answers, question)
        from .shown_command import show  # launch lines are built for this alone

        return show(args, chosen.machine.name, chosen.plan)
    if args.json:
        print_json(_json(answers, best, curves, question))
        return ExitCode.ANSWER
    tell(*dict.fromkeys(text for one in answers for text in one.machine.problems))
    out = console()
    if len(answers) > 1:
        show_table(plans_table(_on_curves(best, curves)), out)
        print("", scaling_text(curves), "", sep="\n")
    chosen = answers[0] if len(answers) == 1 else _preferred(answers, question)
    _show(chosen, question, is_one_of_many=len(answers) > 1)
    return ExitCode.ANSWER


def _answers(args: argparse.Namespace, question: PlanQuestion, effort: Effort) -> Iterator[_Answer]:
    for place, device in enumerate(question.devices or (None,)):
        machine = machine_of(args, device)
        counts = question.counts or (0,)
        for count in counts:
            config = described(args, machine.own, count) or machine.own
            num_ranks = count or config.parallelism.num_ranks
            asked = question.asked_of(config, num_ranks)
            found = _answer(machine, asked, num_ranks, question, place, effort)
            yield replace(found, left=_left(args.directory, found))


def _answer(
    machine: Machine,
    config: RunConfig,
    num_ranks: int,
    question: PlanQuestion,
    place: int,
    effort: Effort,
) -> _Answer:
    memory = {
        "memory_capacity_nbytes": question.memory_nbytes or machine.memory_capacity_nbytes,
        "memory_offset_nbytes": machine.memory_offset_nbytes,
    }

    def made(keep: Keep | None) -> Plan:
        return make_plan(
            config, machine.steps, num_ranks=num_ranks, keep=keep, effort=effort, **memory
        )

    found = made(question.keep)
    # Of several numbers one that nothing runs on is a row that says so.
    if not found.candidates and question.why is None and len(question.counts) < 2:
        raise ConfigError(_nothing(config, num_ranks, question))
    why = None
    if question.why is not None:
        priced = partial(compare, config, steps=machine.steps, **memory)
        why = why_not(question.why, found, made(question.why), num_ranks, priced)
    return _Answer(
        device=machine.own.device,
        num_ranks=num_ranks,
        machine=machine,
        plan=found,
        price_per_gpu_hour=question.price(place),
        why=why,
    )


def _left(directory: Path, one: _Answer) -> RunLeft | None:
    machine, own = one.machine, one.plan.own
    if own.config.model != machine.own.model:
        return None
    step_s = own.step_time_s if one.is_as_run else machine.steps.measured_s(machine.own)
    price = one.price_per_gpu_hour
    return run_left(directory, machine.name, machine.own, step_s, price_per_gpu_hour=price)


def _nothing(config: RunConfig, num_ranks: int, question: PlanQuestion) -> str:
    if question.keep is not None:
        return (
            f"no layout of this model on {num_ranks} ranks has {question.keep}; "
            f"--why {question.keep} tells what is in the way"
        )
    return (
        f"no layout of this model runs on {num_ranks} ranks with global_batch_size "
        f"{config.batch.global_batch_size}; choose a number of ranks that divides it"
    )


def _best(one: _Answer, question: PlanQuestion) -> BestLayout:
    """The layout of an answer that fits and comes first; the running one where it is that."""
    return BestLayout(
        candidate=best_on(one.num_ranks, one.plan, question.keep),
        device=one.device,
        num_ranks=one.num_ranks,
        price_per_gpu_hour=one.price_per_gpu_hour,
    )


def _curves(answers: Sequence[_Answer], best: Sequence[BestLayout]) -> list[Scaling]:
    """Of each device, over the numbers of GPUs that a layout fits on."""
    found: list[Scaling] = []
    for device in dict.fromkeys(one.device for one in answers):
        places = [place for place, one in enumerate(answers) if one.device == device]
        places.sort(key=lambda place: answers[place].num_ranks)
        chosen = [(best[place].candidate, best[place].num_ranks) for place in places]
        able = [candidate for candidate, _ in chosen if candidate is not None]
        if able:
            without = tuple(num for candidate, num in chosen if candidate is None)
            steps = answers[places[0]].machine.steps
            found.append(replace(curve(able, steps, device=device), without=without))
    return found


def _on_curves(best: Sequence[BestLayout], curves: Sequence[Scaling]) -> list[BestLayout]:
    points = {(one.device, point.num_ranks): point for one in curves for point in one.points}
    return [replace(one, point=points.get((one.device, one.num_ranks))) for one in best]


def _preferred(answers: Sequence[_Answer], question: PlanQuestion) -> _Answer:
    is_cost = question.objective is Objective.COST

    def worth(one: _Answer) -> float:
        best = _best(one, question)
        return best.cost_order if is_cost else best.time_order

    if all(not one.plan.candidates for one in answers):
        raise ConfigError(_nothing(answers[0].plan.own.config, answers[0].num_ranks, question))
    return min(answers, key=worth)


def _show(one: _Answer, question: PlanQuestion, *, is_one_of_many: bool) -> None:
    out = console()
    title = f"Layouts on {one.num_ranks} GPUs, {one.device}" if is_one_of_many else "Layouts"
    own_name = "running" if one.is_as_run else "as now"
    found = one.plan
    if found.candidates:
        named = {"title": title, "own_name": own_name}
        show_table(layouts_table(found, question.top, left=one.left, **named), out)
    if one.why is not None:
        print(f"why not {question.why}: {one.why.text}")
    print(_offer(found))
    sharp = breadth(found, one.machine.steps)
    notes = (left_out_note(found), routing_note(found), telling_note(found), search_note(found))
    for note in filter(None, (sharp.text if sharp is not None else "", *notes)):
        print(note)


def _offer(found: Plan) -> str:
    """The options of the fastest layout that may be offered, and why none before it is; or what
    came nearest."""
    best = found.best
    if best is None:
        return " · ".join(filter(None, ["nothing faster to offer", found.nearest_miss]))
    row = found.candidates.index(best) + 1
    first = found.candidates[0]
    why = f"row 1, {first.label}, is not offered: {found.obstacle(first)}\n" if row > 1 else ""
    if not takes_options(found.own.config):
        return f"{why}fastest that may be offered: {best.label}"
    return f"{why}row {row}, {best.label}: {shlex.join(best.options)}"


def _json(
    answers: Sequence[_Answer],
    best: Sequence[BestLayout],
    curves: Sequence[Scaling],
    question: PlanQuestion,
) -> dict[str, Any]:
    """One plan as it is, several under ``plans`` with the curves of devices."""
    pairs = zip(answers, best, strict=True)
    values = [_plan_json(one, fastest, question) for one, fastest in pairs]
    head = {"run_id": answers[0].machine.name, "objective": question.objective.value}
    if len(values) == 1:
        return {**head, **values[0]}
    return {**head, "plans": values, "scaling": [found.to_json() for found in curves]}


def _plan_json(one: _Answer, best: BestLayout, question: PlanQuestion) -> dict[str, Any]:
    def row(candidate: Candidate) -> dict[str, Any]:
        return {**candidate.to_json(), "rest": rest_json(candidate, one.left)}

    sharp = breadth(one.plan, one.machine.steps)
    return {
        **one.plan.to_json(),
        "own": row(one.plan.own),
        "device": one.device,
        "num_ranks": one.num_ranks,
        "global_batch_size": one.plan.own.config.batch.global_batch_size,
        "gpu_hours_per_giga_token": best.gpu_hours_per_giga_token,
        "price_per_gpu_hour": one.price_per_gpu_hour,
        "cost_per_giga_token": best.cost_per_giga_token,
        "why": one.why.to_json() if one.why is not None else None,
        "breadth": sharp.to_json() if sharp is not None else None,
        "candidates": [row(candidate) for candidate in one.plan.candidates[: question.top]],
        "network": network_json(one.machine),
    }
