"""The plan for one device and one number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ...calib.advice import Breadth, Plan, WhyNot, breadth, compare, why_not
from ...calib.arguments import Keep
from ...calib.errors import ConfigError
from ...calib.forecast import RunLeft
from ...calib.search import Effort
from ...calib.workload import RunConfig
from ..directory.forecast_log import run_left
from ..known.machine import Machine, plan_on
from ..options.plan_options import PlanQuestion
from .other_run import OtherRun


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePlan:
    """The plan for one device and one number of ranks, and what it was made from."""

    device: str
    num_ranks: int
    machine: Machine
    plan: Plan
    price_per_gpu_hour: float | None
    why: WhyNot | None
    left_out: tuple[str, ...] = ()
    """What a description of another run says and the model does not know."""
    left: RunLeft | None = None
    """The rest of the run, where it is known and the model is the run's."""

    @property
    def is_as_run(self) -> bool:
        """Whether layouts are held against the run itself, not against what was asked of it."""
        return self.plan.own.config == self.machine.own

    @property
    def breadth(self) -> Breadth | None:
        """How wide the choice is within the intervals."""
        return breadth(self.plan, self.machine.steps)


def plans(
    machine_on: Callable[[str | None], Machine],
    directory: Path,
    question: PlanQuestion,
    other: OtherRun,
    effort: Effort,
) -> Iterator[OnePlan]:
    """The plans of a question, by device and then by number of ranks.

    Raises ``ConfigError`` where no layout runs on the only number of ranks.
    """
    for place, device in enumerate(question.devices or (None,)):
        machine = machine_on(device)
        for count in question.counts or (0,):
            known, config, left_out = other.of(machine, count)
            num_ranks = count or config.parallelism.num_ranks
            asked = question.asked_of(config, num_ranks)
            found = _one_plan(known, asked, num_ranks, question, place, effort)
            yield replace(found, left_out=left_out, left=_left(directory, found))


def _one_plan(
    machine: Machine,
    config: RunConfig,
    num_ranks: int,
    question: PlanQuestion,
    place: int,
    effort: Effort,
) -> OnePlan:
    def made(keep: Keep | None) -> Plan:
        return plan_on(
            machine,
            config,
            num_ranks,
            effort=effort,
            keep=keep,
            memory_capacity_nbytes=question.memory_nbytes,
        )

    found = made(question.keep)
    # Of several numbers one that nothing runs on is a row that says so; the running layout may be
    # the only one.
    is_alone = any(proof.tally.evaluated for proof in found.proofs.values())
    if not (found.candidates or is_alone or question.why) and len(question.counts) < 2:
        raise ConfigError(nothing(config, num_ranks, question))
    why = None
    if question.why is not None:
        priced = partial(
            compare,
            config,
            steps=machine.steps,
            memory_capacity_nbytes=found.memory_capacity_nbytes,
            memory_offset_nbytes=machine.memory_offset_nbytes,
            is_running=machine.runs(config),
        )
        why = why_not(question.why, found, made(question.why), num_ranks, priced)
    return OnePlan(
        device=machine.own.device,
        num_ranks=num_ranks,
        machine=machine,
        plan=found,
        price_per_gpu_hour=question.price(place),
        why=why,
    )


def _left(directory: Path, one: OnePlan) -> RunLeft | None:
    machine, own = one.machine, one.plan.own
    if own.config.model != machine.own.model:
        return None
    step_s = own.step_time_s if one.is_as_run else machine.steps.measured_s(machine.own)
    price = one.price_per_gpu_hour
    return run_left(directory, machine.name, machine.own, step_s, price_per_gpu_hour=price)


def nothing(config: RunConfig, num_ranks: int, question: PlanQuestion) -> str:
    """Why nothing runs on so many ranks, and what to ask instead."""
    if question.keep is not None:
        return (
            f"no layout of this model on {num_ranks} ranks has {question.keep}; --why "
            f"{question.keep} explains why"
        )
    return (
        f"no layout of this model runs on {num_ranks} ranks with global_batch_size "
        f"{config.batch.global_batch_size}; choose a number of ranks that divides it"
    )
