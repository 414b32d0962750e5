"""The best layouts on numbers of GPUs, of the run's kind or of others: ``forerun plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...calib.advice import Candidate, Scaling, best_on, curve
from ...calib.errors import ConfigError
from ...calib.forecast import whole_run
from ...calib.records import stamped
from ...calib.search import TOP, Effort
from ..known.machines import Machine
from ..options.plan_options import Objective, PlanQuestion
from ..report.plan_tables import BestLayout
from ..report.throughput_cells import rest_json
from .one_plan import OnePlan, nothing, plans
from .other_run import OtherRun
from .plan_parts import one_parts, several_parts
from .predicted import network_json
from .told import Told

if TYPE_CHECKING:
    import pandas as pd

    from .drawn import Part
    from .row_command import RowCommand

Searching: TypeAlias = Callable[[int], AbstractContextManager[Effort]]
"""How a search for so many layouts is done."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanAnswer(Told):
    """One plan, or several beside each other; rows are those of the one that is preferred.

    Row 0 is the running layout, row 1 the fastest other that fits.
    """

    question: PlanQuestion
    plans: tuple[OnePlan, ...]
    """By device, then by number of ranks."""
    directory: Path
    other: OtherRun

    @property
    def run_id(self) -> str:
        """The run, or the machine that was imported."""
        return self.plans[0].machine.name

    @cached_property
    def chosen(self) -> OnePlan:
        """Of several the one that the objective prefers; it is told in full.

        ``ConfigError`` where no layout runs on any of the numbers.
        """
        if len(self.plans) == 1:
            return self.plans[0]
        if all(not one.plan.candidates for one in self.plans):
            first = self.plans[0]
            raise ConfigError(nothing(first.plan.own.config, first.num_ranks, self.question))
        is_cost = self.question.objective is Objective.COST
        worth = [one.cost_order if is_cost else one.time_order for one in self.best_layouts]
        return self.plans[min(range(len(worth)), key=worth.__getitem__)]

    @cached_property
    def best_layouts(self) -> tuple[BestLayout, ...]:
        """Of each plan the layout that fits and comes first; the running one where it is that."""
        return tuple(_best(one, self.question) for one in self.plans)

    @cached_property
    def curves(self) -> tuple[Scaling, ...]:
        """Of several numbers of GPUs what each brings, by device; empty of a single plan."""
        return tuple(_curves(self.plans, self.best_layouts)) if len(self.plans) > 1 else ()

    @property
    def running(self) -> Candidate:
        """What layouts are held against: row 0."""
        return self.chosen.plan.own

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The layouts that were found, the fastest that fits first: rows 1 and up."""
        return self.chosen.plan.candidates

    @property
    def best(self) -> Candidate | None:
        """The fastest that may be offered; None where nothing is faster, fits and can be asked."""
        return self.chosen.plan.best

    def command(self, row: int = 1) -> RowCommand:
        """A row as a launch command that runs; ``ConfigError`` for a row that is not there."""
        from .row_command import row_command  # launch lines are built for this alone

        found = self.chosen
        return row_command(self.directory, self.run_id, found.plan, row, self.other)

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a description of another run says and the model does not know."""
        return tuple(dict.fromkeys(text for one in self.plans for text in one.left_out))

    @property
    def problems(self) -> tuple[str, ...]:
        """Damaged records, and what was not measured."""
        return tuple(dict.fromkeys(text for one in self.plans for text in one.machine.problems))

    @property
    def notes(self) -> tuple[str, ...]:
        """All that a reader should know beside it."""
        return (*self.left_out, *self.problems)

    def to_frame(self) -> pd.DataFrame:
        """A row for each layout, by the names of JSON, in seconds and bytes."""
        from .plan_frame import plan_frame

        return plan_frame(self.plans, self.question.top)

    def plot(self, axes: Any = None) -> Any:
        """Steps with their intervals on axes of matplotlib, which are returned.

        Raises ``ConfigError`` where that is not installed.
        """
        from .plan_frame import plan_plot

        return plan_plot(self.to_frame(), axes)

    def __repr__(self) -> str:
        from .drawn import screen_of

        return screen_of(self.parts())

    def to_json(self) -> dict[str, Any]:
        """As ``forerun plan --json``: one plan as it is, several under ``plans`` with curves."""
        pairs = zip(self.plans, self.best_layouts, strict=True)
        values = [_plan_json(one, fastest, self.question) for one, fastest in pairs]
        head = {"run_id": self.run_id, "objective": self.question.objective.value}
        if len(values) == 1:
            return stamped({**head, **values[0]})
        scaling = [found.to_json() for found in self.curves]
        return stamped({**head, "plans": values, "scaling": scaling})

    def parts(self) -> Iterator[Part]:
        """Tables and sentences, those of the chosen plan last."""
        is_one_of_many = len(self.plans) > 1
        if is_one_of_many:
            yield from several_parts(self.best_layouts, self.curves)
        best = self.best_layouts[self.plans.index(self.chosen)]
        yield from one_parts(self.chosen, best, self.question, is_one_of_many=is_one_of_many)


def planned(
    machine_on: Callable[[str | None], Machine],
    directory: Path,
    question: PlanQuestion,
    other: OtherRun,
    searching: Searching,
    num_rows: int = 0,
) -> PlanAnswer:
    """The plans that are asked for; at least ``num_rows`` layouts are searched for each."""
    with searching(max(TOP, question.top, num_rows)) as effort:
        found = tuple(plans(machine_on, directory, question, other, effort))
    return PlanAnswer(question=question, plans=found, directory=directory, other=other)


def _best(one: OnePlan, question: PlanQuestion) -> BestLayout:
    found, ahead = best_on(one.num_ranks, one.plan, question.keep), None
    if found is not None and question.num_tokens:
        ahead = whole_run(
            found.config,
            one.machine.steps,
            num_tokens=question.num_tokens,
            price_per_gpu_hour=one.price_per_gpu_hour,
        )
    return BestLayout(
        candidate=found,
        whole_run=ahead,
        device=one.device,
        num_ranks=one.num_ranks,
        price_per_gpu_hour=one.price_per_gpu_hour,
    )


def _curves(plans: Sequence[OnePlan], best: Sequence[BestLayout]) -> Iterator[Scaling]:
    """Of each device, over the numbers of GPUs that a layout fits on."""
    for device in dict.fromkeys(one.device for one in plans):
        places = [place for place, one in enumerate(plans) if one.device == device]
        places.sort(key=lambda place: plans[place].num_ranks)
        chosen = [(best[place].candidate, best[place].num_ranks) for place in places]
        able = [candidate for candidate, _ in chosen if candidate is not None]
        if able:
            without = tuple(num for candidate, num in chosen if candidate is None)
            steps = plans[places[0]].machine.steps
            yield replace(curve(able, steps, device=device), without=without)


def _plan_json(one: OnePlan, best: BestLayout, question: PlanQuestion) -> dict[str, Any]:
    def row(candidate: Candidate) -> dict[str, Any]:
        return {**candidate.to_json(), "rest": rest_json(candidate, one.left)}

    sharp = one.breadth
    return {
        **one.plan.to_json(),
        "own": row(one.plan.own),
        "device": one.device,
        "basis": one.machine.basis or None,
        "num_ranks": one.num_ranks,
        "global_batch_size": one.plan.own.config.batch.global_batch_size,
        "gpu_hours_per_giga_token": best.gpu_hours_per_giga_token,
        "price_per_gpu_hour": one.price_per_gpu_hour,
        "cost_per_giga_token": best.cost_per_giga_token,
        "whole_run": None if best.whole_run is None else best.whole_run.to_json(),
        "why": one.why.to_json() if one.why is not None else None,
        "breadth": sharp.to_json() if sharp is not None else None,
        "candidates": [row(candidate) for candidate in one.plan.candidates[: question.top]],
        "network": network_json(one.machine),
    }
