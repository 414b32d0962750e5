"""Answers on layouts: best layouts by number and kind of GPUs, predictions, explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...calib.advice.explanation import Explanation, explain
from ...calib.advice.named_layouts import named_layout
from ...calib.advice.obstacles import WhyNot, why_not
from ...calib.advice.planning import Candidate, Plan, compare
from ...calib.advice.remedies import FittingLayouts, Remedy
from ...calib.advice.scaling import Scaling, best_on, compute_scaling
from ...calib.arguments.megatron_args import apply_options
from ...calib.arguments.option_words import options_of
from ...calib.arguments.short_names import LayoutConstraint, split_degrees
from ...calib.arguments.taken_options import unsupported_options_reason
from ...calib.errors import ConfigError, ForerunError
from ...calib.fit.priors import is_processor
from ...calib.forecast.rates import RemainingRun
from ...calib.forecast.whole import WholeRun, whole_run
from ...calib.memory.devices import known_device
from ...calib.memory.peak import MemoryEstimate, Verdict, host_nbytes
from ...calib.network.cluster import link_figures
from ...calib.records.iso_times import stamped
from ...calib.search.results import TOP, Effort
from ...calib.shell import joined
from ...calib.units import format_bytes, format_time
from ...calib.workload.argument_values import shown
from ...calib.workload.choices import AxisValue, choice, layout_label
from ...calib.workload.config import RunConfig, takes_options
from ...calib.workload.model_shape import at_least_one, at_most
from ..known.machine import Machine, plan_on
from ..options.config_files import completed
from ..options.plan_options import Objective, PlanQuestion, read_prices, read_tokens
from ..store.forecast_log import read_remaining_run
from ..views.answer_tables import (
    BestLayout,
    layouts_table,
    plan_notes,
    plans_table,
    rest_json,
    scaling_text,
)
from ..views.explain_text import explanation_parts
from ..views.table import Command, Part, screen_of
from ._answer_types import LayoutAnswer, PrintableAnswer
from .other_run import OtherRun

if TYPE_CHECKING:
    import pandas as pd

    from .row_command import RowCommand


Searching: TypeAlias = Callable[[int], AbstractContextManager[Effort]]
"""Context that provides the effort of a search for that many layouts."""
_OPENED = ("throughput", "memory")
"""Objects in a layout's JSON whose entries become columns."""
_EXCLUDED_KEYS = ("routing", "source_frac", "options")


class RunLike(Protocol):
    """Part of ``Run`` that answers on layouts use."""

    @property
    def directory(self) -> Path:
        """Directory given as ``--calibrate-dir``."""
        ...

    @property
    def searching(self) -> Searching:
        """Context of a plan's search."""
        ...

    def machine(self, device: str | None = None) -> Machine:
        """Return the step model, on the given device or else the run's."""
        ...


@dataclass(frozen=True, kw_only=True)
class OnePlan:
    """Plan for one device and one number of ranks, with its inputs."""

    question: PlanQuestion
    num_ranks: int
    machine: Machine
    plan: Plan
    price_per_gpu_hour: float | None
    why: WhyNot | None
    description_notes: tuple[str, ...] = ()
    """Settings of another run's description that the model does not cover."""
    remaining_run: RemainingRun | None = None
    """Remainder of the run, if known and if the model is the run's."""

    @property
    def device(self) -> str:
        """Device, by the driver's name."""
        return self.machine.running.device

    @property
    def is_as_run(self) -> bool:
        """True if layouts are compared with the run itself, not with a changed request."""
        return self.plan.running.config == self.machine.running

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """Requested rows from 1 on, and all rows up to the offered one."""
        plan, top = self.plan, self.question.top
        last = top if plan.best is None else max(top, plan.candidates.index(plan.best) + 1)
        return plan.candidates[:last]

    @cached_property
    def best(self) -> BestLayout:
        """First layout that fits, which may be the running one."""
        candidate, ahead = best_on(self.num_ranks, self.plan, self.question.keep), None
        price, num_tokens = self.price_per_gpu_hour, self.question.num_tokens
        # A described run has the length in its arguments, which a run's forecast replaces.
        is_long = candidate and self.machine.basis and candidate.config.cadence.train_iters
        if candidate is not None and (num_tokens or is_long):
            steps = self.machine.steps
            ahead = whole_run(
                candidate.config, steps, num_tokens=num_tokens, price_per_gpu_hour=price
            )
        return BestLayout(
            candidate=candidate,
            whole_run=ahead,
            device=self.device,
            num_ranks=self.num_ranks,
            price_per_gpu_hour=price,
        )

    @property
    def sentence(self) -> str:
        """Fastest layout with its step, memory and whole run, or that none fits."""
        best, on = self.best.candidate, f"on {self.num_ranks:,} x {self.device}"
        if best is None:
            return f"fits: no layout of this model {on}"
        row = next((n for n, one in self.plan.rows.items() if one is best), 0)
        parts = (
            f"fastest {on}: row {row}, {best.label}",
            f"step {format_time(best.step_time_s)}",
            f"fits: {fit_text(best, self.plan.memory_capacity_nbytes) or 'memory not known'}",
            "" if self.best.whole_run is None else self.best.whole_run.lines[0],
        )
        return " · ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """Return the plan with its inputs."""
        best, plan = self.best, self.plan

        def row(candidate: Candidate) -> dict[str, Any]:
            return {**candidate.to_json(), "rest": rest_json(candidate, self.remaining_run)}

        def known(part: Any) -> Any:
            return None if part is None else part.to_json()

        return {
            **plan.to_json(),
            "own": row(plan.running) if plan.is_listed else None,
            "device": self.device,
            "basis": self.machine.basis or None,
            "num_ranks": self.num_ranks,
            "global_batch_size": plan.running.config.batch.global_batch_size,
            "gpu_hours_per_giga_token": best.gpu_hours_per_giga_token,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "cost_per_giga_token": best.cost_per_giga_token,
            "whole_run": known(best.whole_run),
            "why": known(self.why),
            "candidates": [row(one) for one in self.shown],
            "network": network_json(self.machine),
        }

    def parts(self, *, is_one_of_many: bool) -> Iterator[Part]:
        """Yield the plan in full: its layouts, the offered one, and its basis."""
        title = f"Layouts on {self.num_ranks} GPUs, {self.device}" if is_one_of_many else "Layouts"
        plan, best, basis = self.plan, self.best, self.machine.basis
        running_label = "running" if self.is_as_run and plan.running.is_comparable else "as now"
        running_label = "as described" if basis else running_label
        if plan.candidates:
            top = self.question.top
            yield layouts_table(
                plan,
                top,
                remaining_run=self.remaining_run,
                title=title,
                running_label=running_label,
            )
        if best.candidate is not None and best.whole_run is not None:
            yield "\n".join([f"a run in {best.candidate.label}", *best.whole_run.lines])
        if self.why is not None:
            yield f"why not {self.question.why}: {self.why.text}"
        yield from _offer(plan)
        yield from filter(None, [basis])
        yield from plan_notes(plan)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanAnswer(PrintableAnswer):
    """One plan or several; rows are those of the preferred plan.

    Row 0 is the running or described layout, row 1 the fastest other one that fits.
    """

    question: PlanQuestion
    plans: tuple[OnePlan, ...]
    """Plans by device, then by number of ranks."""
    run: RunLike
    other: OtherRun

    @property
    def run_id(self) -> str:
        """Run id, or name of the imported machine."""
        return self.plans[0].machine.name

    @cached_property
    def chosen(self) -> OnePlan:
        """Plan that the objective prefers, which is reported in full.

        Raises ``ConfigError`` if no layout runs on any of the numbers of ranks.
        """
        first = self.plans[0]
        if len(self.plans) > 1 and all(not one.plan.candidates for one in self.plans):
            raise ConfigError(
                no_layout_message(first.plan.running.config, first.num_ranks, self.question)
            )
        is_cost = self.question.objective is Objective.COST
        return min(self.plans, key=lambda one: one.best.order(is_cost=is_cost))

    @property
    def best_layouts(self) -> tuple[BestLayout, ...]:
        """First layout of each plan that fits, which may be the running one."""
        return tuple(one.best for one in self.plans)

    @cached_property
    def curves(self) -> tuple[Scaling, ...]:
        """Scaling over numbers of GPUs, by device; empty for a single plan."""
        return tuple(_curves(self.plans)) if len(self.plans) > 1 else ()

    @property
    def running(self) -> Candidate | None:
        """Row 0: the layout that others are compared with; None if nobody described one."""
        return self.chosen.plan.rows.get(0)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Rows 1 and up: the ranked layouts, the fastest that fits first."""
        return self.chosen.plan.candidates

    @property
    def best(self) -> Candidate | None:
        """Fastest layout that may be offered; None if none is faster, fits and can be requested."""
        return self.chosen.plan.best

    def command(self, row: int = 1) -> RowCommand:
        """Return a row as a runnable launch command; ``ConfigError`` if there is no such row."""
        from .row_command import row_command  # used only here

        plan, machine = self.chosen.plan, self.chosen.machine
        # A described launch starts its own number of ranks, whatever row 0 has.
        launched = machine.running if machine.basis else plan.running.config
        return row_command(self.run.directory, self.run_id, plan, row, self.other, launched)

    @property
    def notes(self) -> tuple[str, ...]:
        """Settings of another run's description that the model does not cover, damaged records, and
        anything not measured."""
        description_notes = dict.fromkeys(
            text for one in self.plans for text in one.description_notes
        )
        problems = dict.fromkeys(text for one in self.plans for text in one.machine.problems)
        return (*description_notes, *problems)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layout of each plan, with row 0 the running one, if there is one;
        columns are named as in JSON, in seconds and bytes."""
        import pandas as pd  # slow to import, and no verb needs it

        return pd.DataFrame([*_rows(self.plans)])

    def plot(self, axes: Any = None) -> Any:
        """Plot step times with their intervals on matplotlib axes, and return these.

        Raises ``ConfigError`` if matplotlib is not installed.
        """
        return _plot(self.to_frame(), axes)

    def __repr__(self) -> str:
        return screen_of(self.parts())

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``forerun plan --json``: one plan, or several under ``plans`` with
        curves."""
        values = [one.to_json() for one in self.plans]
        head = {"run_id": self.run_id, "objective": self.question.objective.value}
        if len(values) == 1:
            return stamped({**head, **values[0]})
        scaling = [scaling_curve.to_json() for scaling_curve in self.curves]
        return stamped({**head, "plans": values, "scaling": scaling})

    def parts(self) -> Iterator[Part]:
        """Yield tables and sentences, those of the chosen plan last."""
        chosen, is_one_of_many = self.chosen, len(self.plans) > 1
        if chosen.machine.basis:
            yield chosen.sentence
        if is_one_of_many:
            points = {(one.device, p.num_ranks): p for one in self.curves for p in one.points}
            yield plans_table(
                [
                    replace(one, point=points.get((one.device, one.num_ranks)))
                    for one in self.best_layouts
                ]
            )
            yield "\n".join(["", scaling_text(self.curves), ""])
        yield from chosen.parts(is_one_of_many=is_one_of_many)


def planned(run: RunLike, question: PlanQuestion, other: OtherRun, num_rows: int = 0) -> PlanAnswer:
    """Return the requested plans, by device and then by number of ranks, with at least ``num_rows``
    layouts searched for each.

    Raises ``ConfigError`` if no layout runs on the only number of ranks.
    """
    plans: list[OnePlan] = []
    with run.searching(max(TOP, question.top, num_rows)) as effort:
        for place, device in enumerate(question.devices or (None,)):
            machine = run.machine(device)
            for count in question.counts or (0,):
                known, config, description_notes = other.of(machine, count)
                num_ranks = count or config.parallelism.num_ranks
                known, requested = _requested(question, known, config, num_ranks)
                one_plan = _one_plan(known, requested, num_ranks, question, place, effort)
                plans.append(
                    replace(
                        one_plan,
                        description_notes=description_notes,
                        remaining_run=_remaining_run(run.directory, one_plan),
                    )
                )
    return PlanAnswer(question=question, plans=tuple(plans), run=run, other=other)


def _requested(
    question: PlanQuestion, machine: Machine, config: RunConfig, num_ranks: int
) -> tuple[Machine, RunConfig]:
    """Return the requested run, without a run of the user's in its layout on ``num_ranks`` ranks.

    If it cannot have its degrees there, it states the model and batch alone.
    """
    for is_placed in (True, False)[not machine.basis :]:
        with suppress(ConfigError):
            return machine, question.apply_to(config, num_ranks, is_placed=is_placed)
    par = config.parallelism
    alone = replace(par, tp=1, pp=1, cp=1, ep=1, etp=0, dp=par.num_ranks, vp=1, chunk_layers=())
    machine = replace(machine, has_layout=False)
    return machine, question.apply_to(replace(config, parallelism=alone), num_ranks)


def _one_plan(
    machine: Machine,
    config: RunConfig,
    num_ranks: int,
    question: PlanQuestion,
    place: int,
    effort: Effort,
) -> OnePlan:
    def made(keep: LayoutConstraint | None) -> Plan:
        return plan_on(
            machine,
            config,
            num_ranks,
            effort=effort,
            keep=keep,
            memory_capacity_nbytes=question.memory_nbytes,
        )

    layout_plan = made(question.keep)
    # Among several numbers of ranks, one without layouts is reported as a row; the running layout
    # may be the only one.
    is_alone = any(tried.evaluated for tried in layout_plan.tried.values())
    if not (layout_plan.candidates or is_alone or question.why) and len(question.counts) < 2:
        raise ConfigError(no_layout_message(config, num_ranks, question))
    why = None
    if question.why is not None:
        why = why_not(question.why, layout_plan, made(question.why), num_ranks)
    return OnePlan(
        question=question,
        num_ranks=num_ranks,
        machine=machine,
        plan=layout_plan,
        price_per_gpu_hour=question.price(place),
        why=why,
    )


def _remaining_run(directory: Path, one: OnePlan) -> RemainingRun | None:
    machine, running = one.machine, one.plan.running
    if running.config.model != machine.running.model:
        return None
    step_s = running.step_time_s if one.is_as_run else machine.steps.measured_s(machine.running)
    price = one.price_per_gpu_hour
    return read_remaining_run(
        directory, machine.name, machine.running, step_s, price_per_gpu_hour=price
    )


def no_layout_message(config: RunConfig, num_ranks: int, question: PlanQuestion) -> str:
    """Return why no layout runs on ``num_ranks`` ranks, and the remedy."""
    if question.keep is not None:
        return (
            f"no layout of this model on {num_ranks} ranks has {question.keep}; --why "
            f"{question.keep} explains why"
        )
    return (
        f"no layout of this model runs on {num_ranks} ranks with global_batch_size "
        f"{config.batch.global_batch_size}; choose a number of ranks that divides it"
    )


def _curves(plans: Sequence[OnePlan]) -> Iterator[Scaling]:
    """Yield the scaling of each device over the numbers of GPUs on which a layout fits."""
    for device in dict.fromkeys(one.device for one in plans):
        device_plans = sorted(
            (p for p in plans if p.device == device), key=lambda one: one.num_ranks
        )
        able = [one.best.candidate for one in device_plans if one.best.candidate is not None]
        if able:
            yield compute_scaling(
                able,
                device=device,
                without=[one.num_ranks for one in device_plans if one.best.candidate is None],
            )


def _offer(plan: Plan) -> Iterator[str]:
    """Yield the options of the fastest layout that may be offered, and why faster ones are not; or
    the nearest miss."""
    if plan.doubt:
        yield plan.doubt
    best = plan.best
    if best is None and (coded := plan.by_code) is not None:
        row = plan.candidates.index(coded) + 1
        yield f"row {row}, {coded.label}, needs a change of the code: {plan.obstacle(coded)}"
        return
    if best is None:
        nothing_else = (
            "nothing faster to offer" if plan.running.is_comparable else "nothing to offer"
        )
        yield " · ".join(filter(None, [nothing_else, plan.nearest_miss]))
        return
    row, first = plan.candidates.index(best) + 1, plan.candidates[0]
    if row > 1:
        yield f"row 1, {first.label}, is not offered: {plan.obstacle(first)}"
    if takes_options(plan.running.config):
        yield Command(f"row {row}, {best.label}: {joined(best.options)}")
    else:
        yield f"fastest that may be offered: {best.label}"


def _rows(plans: Sequence[OnePlan]) -> Iterator[dict[str, Any]]:
    for one in plans:
        for number, candidate in one.plan.rows.items():
            if number > len(one.shown):
                break
            value: dict[str, Any] = candidate.to_json()
            opened = {key: entry for name in _OPENED for key, entry in value.pop(name).items()}
            plain = {name: entry for name, entry in value.items() if name not in _EXCLUDED_KEYS}
            yield {"device": one.device, "row": number, **plain, **opened}


def _plot(frame: pd.DataFrame, axes: Any) -> Any:
    """Plot the layouts of a single plan, or row 1 of each of several plans."""
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as err:
        raise ConfigError(
            "plot() needs matplotlib, which is not installed; pip install matplotlib, or draw what "
            "to_frame() has"
        ) from err
    axes = pyplot.subplots()[1] if axes is None else axes
    is_one = (frame["row"] == 1).sum() == 1
    frame = frame[(frame["verdict"] != "does not fit") & (is_one | (frame["row"] == 1))]
    ends = [frame["step_time_s"] - frame["low_s"], frame["high_s"] - frame["step_time_s"]]
    places = range(len(frame))
    axes.errorbar(frame["step_time_s"], places, xerr=ends, fmt="o")
    names = frame["label"] if is_one else frame["device"] + ", " + frame["num_ranks"].astype(str)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("step (s) with its 90 % interval")
    return axes


def fit_text(one: Candidate, capacity_nbytes: int | None) -> str:
    """Return whether a layout fits, and how much of the memory of a GPU and node it needs; empty if
    the memory is unknown."""
    if capacity_nbytes is None or one.verdict is Verdict.UNKNOWN:
        return ""
    host, needed = one.host_nbytes_per_node, one.memory.total_nbytes
    answer = "no" if one.verdict is Verdict.DOES_NOT_FIT else "perhaps"
    if needed <= capacity_nbytes:  # the allocator's reserve and the error of the estimate decide
        answer += f" (probability {one.fit_probability:.2f})"
    answer = "yes" if one.verdict is Verdict.FITS else answer
    sizes = f"{format_bytes(needed)} of {format_bytes(capacity_nbytes)}"
    return f"{answer}, {sizes}" + (f" and {format_bytes(host)} of each host" if host else "")


Options: TypeAlias = "Sequence[str] | Mapping[str, Any]"
"""Megatron options as words, or by name: True for a switch, a list for several values."""
_LARGER = ("H200", "B200", "B300")
"""Larger devices to suggest if a layout does not fit."""
_NUM_DEVICES = 2
_MOST_GPUS = 4096
"""Largest number on which a model is tried that does not fit on fewer."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Prediction(LayoutAnswer):
    """Step of a layout with a 90 % interval, compared with the running one if that does the same
    work."""

    layout: Candidate
    run: RunLike
    described: RunConfig
    """Run to which the options were applied."""
    other: OtherRun
    whole_run: WholeRun | None = None
    """Whole run from first step to last, if requested."""

    @cached_property
    def memory_budget(self) -> FittingLayouts | None:
        """Memory budget of the device; None if unknown, and on a CPU."""
        return _memory_budget(self.layout.config, self.machine)

    @property
    def running(self) -> RunConfig:
        """Running layout."""
        return self.machine.running

    @property
    def layouts(self) -> dict[str, RunConfig]:
        """This layout and the running one, if they differ."""
        both = {"asked": self.layout.config, "running": self.running}
        return both if self.layout.config != self.running else {"running": self.running}

    def to_tokens(
        self, tokens: float | str | None, price_per_gpu_hour: float | str | None
    ) -> Prediction:
        """Return the prediction with the whole run added: to ``tokens`` tokens, else of the run's
        length; unchanged if neither is known.

        Raises ``ConfigError`` if there is a price and the length of the run is unknown.
        """
        is_long = self.layout.config.cadence.train_iters
        if tokens is None and price_per_gpu_hour is None and not is_long:
            return self
        number = 0 if tokens is None else read_tokens(tokens)
        return replace(self, whole_run=self._length(number, price_per_gpu_hour))

    def _length(self, num_tokens: int = 0, price: float | str | None = None) -> WholeRun:
        question = PlanQuestion(prices=() if price is None else read_prices(str(price)))
        return whole_run(
            self.layout.config,
            self.machine.steps,
            num_tokens=num_tokens,
            price_per_gpu_hour=question.price(0),
        )

    @property
    def label(self) -> str:
        """Short label, such as ``TP4 PP2 mbs2``."""
        return self.layout.label

    @property
    def step_time_s(self) -> float:
        """Predicted step time, seconds."""
        return self.layout.step_time_s

    @property
    def low_s(self) -> float:
        """Lower end of the 90 % interval, seconds."""
        return self.layout.low_s

    @property
    def high_s(self) -> float:
        """Upper end of the 90 % interval, seconds."""
        return self.layout.high_s

    @property
    def time_frac(self) -> float | None:
        """Step time over that of the running layout, minus one; None if that trains another model
        or batch, or runs on another device."""
        return self.layout.time_frac if self.layout.is_comparable else None

    @property
    def memory(self) -> MemoryEstimate:
        """Peak memory of the fullest device."""
        return self.layout.memory

    @cached_property
    def largest_micro_batch(self) -> Remedy | None:
        """Largest micro-batch that fits with all else unchanged; None if none does, or if the
        memory is unknown."""
        return None if self.memory_budget is None else self.memory_budget.largest_micro_batch()

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Cheapest options that would make the layout fit, then larger devices on which it fits;
        empty if it fits."""
        if self.memory_budget is None or self.layout.verdict is not Verdict.DOES_NOT_FIT:
            return ()
        return (*self.memory_budget.remedies(), *self._larger_devices())

    def _larger_devices(self) -> Iterator[Remedy]:
        num_fitting = 0
        for name in _LARGER:
            device = known_device(name)
            config = replace(self.layout.config, device=device.driver_name)
            if num_fitting == _NUM_DEVICES or config.device == self.layout.config.device:
                continue
            budget = None
            with suppress(ForerunError):  # imported steps apply only to their own device
                budget = _memory_budget(config, self.run.machine(name))
            if budget is not None and budget.verdict(config) is Verdict.FITS:
                num_fitting += 1
                (one,) = budget.priced({("--device", name): config})
                step_frac = one.layout.step_time_s / self.step_time_s - 1.0
                yield replace(one, slower_frac=step_frac)

    @property
    def options(self) -> tuple[str, ...]:
        """Megatron options that produce the layout."""
        return self.layout.options

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``forerun predict --json``."""
        largest, ahead = self.largest_micro_batch, self.whole_run
        extras = {
            "network": network_json(self.machine),
            "left_out": list(self.description_notes),
            "basis": self.machine.basis or None,
            "largest_micro_batch": None if largest is None else largest.to_json(),
            "remedies": [one.to_json() for one in self.remedies],
            "whole_run": None if ahead is None else ahead.to_json(),
        }
        return stamped({"run_id": self.run_id, **self.layout.to_json(), **extras})

    @cached_property
    def fewest_gpus(self) -> Candidate | None:
        """Layout on the fewest GPUs that surely fits, where none of the remedies on as many does;
        None if this one fits.  The number of GPUs is doubled until there is one."""
        config, machine = self.layout.config, self.machine
        if self.layout.verdict is not Verdict.DOES_NOT_FIT or self._same_gpus:
            return None
        num_ranks = config.parallelism.num_ranks
        while num_ranks <= _MOST_GPUS:
            with self.run.searching(1) as effort:
                plan = plan_on(_unplaced(machine), config, num_ranks, effort=effort)
            best = best_on(num_ranks, plan)
            if best is not None and (best.verdict is Verdict.FITS or not machine.basis):
                return best
            num_ranks *= 2
        return None

    @property
    def _same_gpus(self) -> tuple[Remedy, ...]:
        return tuple(one for one in self.remedies if "--device" not in one.words)

    @property
    def _fit_sentence(self) -> str:
        """Verdict on the layout's memory, and a layout that fits if it does not."""
        one, more = self.layout, ""
        if not (fits := fit_text(one, self.machine.budget.capacity_nbytes)):
            return ""
        num_ranks = one.config.parallelism.num_ranks
        if self._same_gpus:
            more = f"; with {' '.join(self._same_gpus[0].words)} it does"
        elif (fewest := self.fewest_gpus) is not None:
            number = fewest.config.parallelism.num_ranks
            size = fit_text(fewest, self.machine.budget.capacity_nbytes).partition(", ")[2]
            where = "on as many GPUs fits" if number == num_ranks else f"on {number:,} GPUs fits"
            more = f"; {where} {fewest.label} ({size})"
        elif one.verdict is Verdict.DOES_NOT_FIT:
            more = f"; no layout does on as many GPUs, doubled up to {_MOST_GPUS:,}"
        return f"fits: {fits} on {num_ranks:,} x {one.config.device}{more}"

    def write_sbatch(self, path: Path | str) -> None:
        """Write an ``sbatch`` script whose ``--time`` suffices for 95 % of such runs.

        Raises ``ConfigError`` if the layout cannot run or the length of the run is unknown.
        """
        from .row_command import MARK, batch_script, launch_for, write_script

        launch = launch_for(self.run.directory, self.run_id, self.described, self.other)
        comments = (f"{MARK} for {self.run_id}", self.sentence)
        run = self.whole_run or self._length()
        script = self.other.script
        text = batch_script(self.layout, run, launch, self.described, comments, script)
        write_script(path, text, script)

    @property
    def sentence(self) -> str:
        """Layout with its step time, throughput and memory."""
        one = self.layout
        host = host_nbytes(one.config)
        parts = (
            f"{one.label}: step {format_time(one.step_time_s)} (90 %: "
            f"{format_time(one.low_s)} to {format_time(one.high_s)})",
            one.throughput.text,
            f"{one.against_text} against the running layout" * one.is_comparable,
            f"memory {format_bytes(one.memory.total_nbytes)}",
            f"host memory {format_bytes(host)} a node" if host else "",
            one.routing.text if one.routing is not None else "",
        )
        return " · ".join(filter(None, parts))

    def parts(self) -> Iterator[Part]:
        """Yield the sentence, memory limits, and the options if there are any."""
        from ..views.table import Command

        if self.memory_budget is not None:
            yield self._fit_sentence
        yield self.sentence
        if self.memory_budget is not None:
            largest = self.largest_micro_batch
            size = "none" if largest is None else largest.text.removeprefix("--mbs ")
            yield f"largest micro-batch that fits: {size}"
        yield from () if self.whole_run is None else self.whole_run.lines
        if self.machine.basis:
            yield self.machine.basis
        if self.machine.steps.omission_log:
            yield "an option of this run is not modelled: the step may be off by a factor of 2 more"
        if self.layout.verdict is Verdict.DOES_NOT_FIT:
            yield "it does not fit in memory, so its options are not printed"
            if self.remedies:
                alternatives = ", ".join(one.text.replace(" ", "\u00a0") for one in self.remedies)
                yield f"it would fit with {alternatives}"
        elif clause := unsupported_options_reason(self.layout.config, self.running):
            yield f"{clause}; its options are not printed"
        elif takes_options(self.running):
            yield Command(joined(self.options))


def predicted(run: RunLike, words: Sequence[str], other: OtherRun) -> Prediction:
    """Predict the step of the layout given by options on top of the run, or of another run.

    Raises ``ConfigError`` for an unknown option and an impossible layout.
    """
    num_ranks = _num_ranks(words)
    try:
        machine, base, notes = other.of(run.machine(), num_ranks)
    except ConfigError:
        if not (words and (other.config or other.command)):
            raise
        # The options may state a size that the description lacks.
        other = replace(other, command=completed(other.command, words))
        machine, base, notes = other.of(run.machine(), num_ranks)
    try:
        config = apply_options(base, words)
    except ConfigError as err:
        if machine.has_layout or (found := _fastest_layout(run, machine, base, words)) is None:
            raise
        config = found
        reason = str(err) if split_degrees(words)[0].axes else "no layout was given"
        text = f"{reason}: {layout_label(config)} is the fastest that plan finds"
        machine = replace(machine, problems=(*machine.problems, text))
    (candidate,) = compare(
        machine.running,
        [config],
        machine.steps,
        budget=machine.budget,
        is_running=machine.runs(config),
    )
    return Prediction(
        layout=candidate,
        machine=machine,
        run=run,
        described=base,
        other=other,
        description_notes=notes,
    )


def _fastest_layout(
    run: RunLike, machine: Machine, base: RunConfig, words: Sequence[str]
) -> RunConfig | None:
    """Return the fastest layout with the settings that options name; None if there is none."""
    keep, rest = split_degrees(words)
    config, named = apply_options(base, rest), {option for option, _ in options_of(rest)}
    for axis in map(choice, ("mbs", "recompute", "sharding")):
        value = axis.read(config)
        if named & {*axis.options(value)}:
            keep = keep.with_axis_value(axis.name, value) or keep
    num_ranks = _num_ranks(words) or base.parallelism.num_ranks
    with run.searching(TOP) as effort:
        plan = plan_on(machine, config, num_ranks, effort=effort, keep=keep)
    best = best_on(num_ranks, plan, keep) or next(iter(plan.candidates), None)
    return None if best is None else best.config


def _unplaced(machine: Machine) -> Machine:
    """Return the machine for plans in which the running layout has no row."""
    return replace(machine, has_layout=False, is_elsewhere=True)


def _memory_budget(config: RunConfig, machine: Machine) -> FittingLayouts | None:
    if not machine.budget.capacity_nbytes or is_processor(config.device):
        return None
    return FittingLayouts(
        requested=config,
        steps=machine.steps,
        budget=machine.budget,
        measured=machine.running,
    )


def words_of(options: Options, layout: Mapping[str, AxisValue]) -> list[str]:
    """Return short names and Megatron options as words of a command line.

    Raises ``ConfigError`` with the nearest name for an unknown one.

    >>> words_of({"micro_batch_size": 2, "swiglu": True}, {"tp": 4})
    ['--tp=4', '--micro-batch-size', '2', '--swiglu']
    """
    for name in layout:
        choice(name)
    return [*(f"--{name}={value}" for name, value in layout.items()), *_options(options)]


def network_json(machine: Machine) -> dict[str, Any]:
    """Return the link figures that transfers were priced with, and their origin; empty without
    NCCL."""
    known = machine.steps.base.conditions.network
    figures = {} if known is None else link_figures(known)
    return {name: asdict(figure) for name, figure in figures.items()}


def _num_ranks(words: Sequence[str]) -> int:
    """Return the value of ``--gpus`` among the options of a layout; 0 if not given."""
    given = next((words for option, words in options_of(words) if option == "--gpus"), [])
    if not given:
        return 0
    return int(choice("gpus").parse(given[0]))


def _options(options: Options) -> Iterator[str]:
    if isinstance(options, str):
        raise ConfigError(
            f"{shown(options)} is a single string; give a list of words, or a mapping"
        )
    if not isinstance(options, Mapping):
        yield from options
        return
    for name, value in options.items():
        option = name.lstrip("-").replace("_", "-")
        if value is False:
            yield f"--no-{option}"
            continue
        yield f"--{option}"
        if value is not True:
            is_one = isinstance(value, str) or not isinstance(value, Sequence)
            yield from (str(one) for one in ((value,) if is_one else value))


Named: TypeAlias = "str | int | RunConfig | Candidate"
"""Reference to a layout: as a plan prints it (``TP4 PP2``), as a change of the running one
(``tp4 pp2``), ``running``, a row of the plan, or an object from an answer."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExplainAnswer(LayoutAnswer):
    """Terms of a step, or of the difference between two."""

    found: Explanation

    @property
    def sentence(self) -> str:
        """Largest terms of the step, or the terms that decide between the two."""
        return self.found.sentence

    @property
    def layouts(self) -> dict[str, RunConfig]:
        """Explained layout, and the one that it is compared with."""
        against = self.found.difference
        sides = [self.found.one] if against is None else [self.found.one, against.other]
        return {name: side.estimate.config for name, side in zip("AB", sides, strict=False)}

    def to_json(self) -> dict[str, Any]:
        """Return the value of ``forerun explain --json``."""
        return stamped({"run_id": self.run_id, **self.found.to_json()})

    def write_svg(self, path: Path | str) -> None:
        """Draw the terms as a waterfall chart into a file."""
        # Slow to import, and used only here.
        from ...calib.records.files import write_text
        from ..views.charts import waterfall

        write_text(Path(path), waterfall(self.found).alone())

    def parts(self) -> Iterable[Part]:
        """Return a sentence, the terms, and the changes from one layout to the other."""
        return explanation_parts(self.found)


def explained(
    run: RunLike, one: Named, other: Named | None, num_ranks: int | None, described: OtherRun
) -> ExplainAnswer:
    """Explain a layout's step, or its difference from another's.

    Raises ``ConfigError`` if a name is invalid, a row does not exist, or a layout cannot run.
    """
    if num_ranks is not None:
        at_least_one("--gpus", num_ranks)
        at_most("--gpus", num_ranks)
    machine, running, notes = described.of(run.machine(), num_ranks or 0)
    rows: list[RunConfig] = []

    def layout(named: Named) -> RunConfig:
        if isinstance(named, RunConfig):
            return named
        if isinstance(named, Candidate):
            return named.config
        if not str(named).strip().isdecimal():
            return named_layout(str(named), running, num_ranks or 0)
        if not rows:
            count = num_ranks or running.parallelism.num_ranks
            with run.searching(TOP) as effort:
                plan = plan_on(machine, running, count, effort=effort)
            # Numbered as in tables of layouts: 0 is the running one.
            rows.extend([running, *(candidate.config for candidate in plan.candidates)])
        if int(named) >= len(rows):
            raise ConfigError(
                f"row {int(named)} is not in the plan; give one from 0 to {len(rows) - 1}"
            )
        return rows[int(named)]

    config, against = layout(one), None if other is None else layout(other)
    explanation = explain(config, against, machine.steps)
    return ExplainAnswer(machine=machine, found=explanation, description_notes=notes)
