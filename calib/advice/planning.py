"""Other layouts of the same run, ranked by predicted step time, with memory and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

from ..arguments.megatron_args import options
from ..arguments.megatron_rules import refusals
from ..arguments.short_names import LayoutConstraint
from ..arguments.taken_options import (
    NEEDS_ENGINE,
    TRANSFORMER_ENGINE,
    program_name,
    unsupported_options_reason,
)
from ..errors import check_ascending
from ..forecast.rates import Throughput, throughput
from ..memory.peak import (
    MemoryEstimate,
    Verdict,
    host_nbytes,
)
from ..plain_json import JsonObject
from ..regressors.estimate import Estimate
from ..search.best_layouts import best_layouts
from ..search.cells import cells_of, choices_of, num_variants
from ..search.results import ANY_MEMORY, Effort, MemoryBudget, SearchResult, Tried
from ..search.space import FSDP_OPTIONS, OFFLOAD_OPTIONS, modules_of
from ..steps.estimate import StepEstimate
from ..steps.known_steps import MEASURED_SIGMA_LOG
from ..steps.model import MISFIT, FittedSteps
from ..units import INDISTINGUISHABLE, format_bytes, format_change, format_frac, format_time
from ..workload.choices import AXES, CHOICES, Choice, choice, layout_label
from ..workload.config import CheckpointForm, RunConfig, takes_options
from ..workload.config_json import Encoded, encoded
from ..workload.parallelism import Sharding
from ..workload.routing import RoutingBalance, routed

_WITHIN = (
    *("--pipeline-model-parallel-layout", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--num-distributed-optimizer-instances"),
)
"""Further options for splits, recompute and optimizer states."""
_NOT_ON_A_CPU = ("--context-parallel-size", *FSDP_OPTIONS, *OFFLOAD_OPTIONS)


def fix_unavailable_axes(
    config: RunConfig, keep: LayoutConstraint | None
) -> LayoutConstraint | None:
    """Return the constraint with each axis that the program has no option for at its running value.

    If another value of such an axis was requested, the request stands, and its rows say why they
    are not offered.
    """
    if not takes_options(config):
        return keep
    constraint = keep
    for one in _varied(config):
        if one.option in config.absent:
            base = constraint or LayoutConstraint()
            constraint = base.with_axis_value(one.name, one.read(config)) or base
    return constraint


def count_excluded(
    config: RunConfig, num_ranks: int, keep: LayoutConstraint | None, result: SearchResult
) -> SearchResult:
    """Return the result with layouts that the program has no options for counted as cut by rules.

    ``keep`` is the constraint as requested.
    """
    reason = exclusion_reason(config)
    if not reason:
        return result
    cells = cells_of(replace(config, absent=()), num_ranks, keep)
    number = max(0, num_variants(choices_of(cells, keep)) - result.tried.num_layouts)
    return replace(result, tried=replace(result.tried, cut={**result.tried.cut, reason: number}))


def exclusion_reason(config: RunConfig) -> str:
    """Return why some layouts of a run were not searched; empty if its program takes all options.

    Options that no layout of this model and device needs are not named.
    """
    if not config.absent or not takes_options(config):
        return ""
    varied = (one.option for one in _varied(config))
    unwanted = _NOT_ON_A_CPU if config.device == "cpu" else ()
    wanted = [
        option
        for option in (*varied, *_WITHIN, *FSDP_OPTIONS, *OFFLOAD_OPTIONS)
        if option not in unwanted
    ]
    missing = ", ".join(option for option in wanted if option in config.absent)
    texts = [f"{program_name(config)} takes no {missing}"] if missing else []
    engine_modules = [
        name for name in modules_of(replace(config, absent=())) if name in NEEDS_ENGINE
    ]
    if TRANSFORMER_ENGINE in config.absent and engine_modules:
        texts.append(f"recompute of {', '.join(engine_modules)} needs Transformer Engine")
    return "; ".join(texts)


def _varied(config: RunConfig) -> list[Choice]:
    """Return the choices that a plan varies if the program has their options."""
    is_dense = config.model.experts is None
    varied = [one for one in CHOICES if one.needs_option and not (is_dense and one.name == "ep")]
    return sorted(varied, key=lambda one: AXES.index(one.axis_name))


_FORMS = {
    Sharding.NONE: "a whole optimizer",
    Sharding.OPTIMIZER: "the distributed optimizer",
    Sharding.GRADS: "Megatron-FSDP",
    Sharding.WEIGHTS: "Megatron-FSDP",
}
"""Optimizers by sharding; each has its own checkpoint format."""
_SPLIT_AXES = ("tp", "pp", "vpp", "ep", "etp")
_SAVES_FOR_ANY = "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable saves one for any"
_OF_ONE_SPLIT = (CheckpointForm.BY_RANK, CheckpointForm.BY_BUFFER, CheckpointForm.BY_SHARD)
_NEEDS: Mapping[CheckpointForm, tuple[str, str]] = {
    CheckpointForm.BY_RANK: (
        "has a file for each rank of the model (--ckpt-format torch)",
        _SAVES_FOR_ANY,
    ),
    CheckpointForm.BY_BUFFER: ("holds buffers of the distributed optimizer", _SAVES_FOR_ANY),
    CheckpointForm.BY_WEIGHT: ("keeps states of split experts apart", "others need a converter"),
    CheckpointForm.BY_SHARD: ("is of FSDP", "no other split is known to load it"),
}
"""Why a form needs something of the layout that loads it, and the remedy."""


def converter(config: RunConfig, running: RunConfig) -> str:
    """Return why a layout cannot load the run's checkpoints as they are; empty if it can.

    Megatron's optimizers have their own checkpoint formats, between which only a converter
    translates (Megatron-LM issue 851).  What else a form needs is that of core 0.16.1
    (``megatron/training/checkpointing.py``, ``DistributedOptimizer.sharded_state_dict``).

    >>> from dataclasses import replace
    >>> from ..workload.config import Batch, Cadence
    >>> from ..workload.model_shape import ModelShape
    >>> from ..workload.parallelism import Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> here = RunConfig(model=gpt, parallelism=Parallelism(dp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8),
    ...     cadence=Cadence(checkpoint_form=CheckpointForm.BY_RANK))
    >>> converter(replace(here, parallelism=Parallelism(dp=2, is_optimizer_distributed=True)), here)
    'its checkpoint (the distributed optimizer) would need a converter'
    >>> converter(replace(here, parallelism=Parallelism(tp=2)), here)[:70]
    'the checkpoint has a file for each rank of the model (--ckpt-format to'
    """
    saved = running.cadence.checkpoint_form
    if not takes_options(running) or saved is CheckpointForm.NONE:
        return ""
    form = _FORMS[config.parallelism.sharded]
    if form != _FORMS[running.parallelism.sharded]:
        return f"its checkpoint ({form}) would need a converter"
    if saved is CheckpointForm.WEIGHTS:
        return "the checkpoint lacks the optimizer's states; leave --no-save-optim out"
    is_distributed = running.parallelism.sharded is Sharding.OPTIMIZER
    if saved in _NEEDS and is_distributed and TRANSFORMER_ENGINE in running.absent:
        return "Megatron loads the distributed optimizer with Transformer Engine or Apex alone"
    there, here = (_needs(one, running, saved) for one in (config, running))
    needed = [f"{name} {value}" for name, value in here.items() if there.get(name, value) != value]
    if not needed:
        return ""
    why, remedy = _NEEDS[saved]
    return f"the checkpoint {why} and needs {', '.join(needed)}; {remedy}"


def _needs(config: RunConfig, running: RunConfig, saved: CheckpointForm) -> dict[str, object]:
    """Return what a layout must have as the run has it to load its checkpoints, by name."""
    par, is_dense = config.parallelism, config.model.experts is None
    num_replicas, other = par.dp * par.cp, running.parallelism
    needs: dict[str, object] = {}
    if saved in _OF_ONE_SPLIT:
        names = _SPLIT_AXES[:3] if is_dense else _SPLIT_AXES
        needs = {name: choice(name).read(config) for name in names}
        needs["layers of chunks"] = par.chunk_layers or "even"
    if saved is CheckpointForm.BY_BUFFER:
        # Megatron's buckets: 40 million gradients, or one million for each replica.
        needs["buckets of gradients"] = max(40, num_replicas) if par.overlaps_grad_reduce else "one"
    if saved in (CheckpointForm.BY_BUFFER, CheckpointForm.BY_WEIGHT) and not is_dense:
        needs["ep"] = par.ep if saved in _OF_ONE_SPLIT or par.ep == 1 else "above 1"
        # Each replica has a random state then, which Megatron loads unless tp or pp differ.
        if par.ep > 1 and (par.tp, par.pp) == (other.tp, other.pp):
            needs["replicas"] = num_replicas
    return needs


SCHEMA = 1
# Few enough for a user to try them all.
_NUM_WORTH_MEASURING = 3
_UNKNOWN = Estimate(median=math.nan, unshared_sigma_log=math.nan)
_SHOWN_DEGREES = ("tp", "pp", "vp", "dp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Candidate(StepEstimate):
    """One layout with its step time, memory and verdict."""

    ratio: Estimate
    """Its step time over that of the running layout, shared errors cancelled; NaN if no running
    layout does the same work on such a device."""
    memory: MemoryEstimate
    verdict: Verdict
    options: tuple[str, ...]
    fit_probability: float | None = None
    """Probability that it fits in device memory; None if the capacity is unknown."""
    conversion: str = ""
    """Why it cannot load the run's checkpoints as they are; empty if it can, or if there are
    none of this model."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            label=self.label,
            num_ranks=self.config.parallelism.num_ranks,
            **{name: getattr(self.config.parallelism, name) for name in _SHOWN_DEGREES},
            micro_batch_size=self.config.batch.micro_batch_size,
            recompute=self.config.recompute,
            routing=self.routing,
            step_time_s=self.step_time_s,
            low_s=self.low_s,
            high_s=self.high_s,
            **self.ratios,
            throughput=self.throughput,
            memory=self.memory,
            host_nbytes_per_node=self.host_nbytes_per_node,
            verdict=self.verdict,
            fit_probability=self.fit_probability,
            source_frac=self.source_frac,
            host_wait_frac=self.host_wait_frac,
            host_wait_high_frac=self.host_wait_high_frac,
            options=self.options,
            conversion=self.conversion or None,
        )

    def __post_init__(self) -> None:
        check_ascending(
            "seconds of a layout's step", 0.0, self.low_s, self.step_time_s, self.high_s
        )
        check_ascending("change of a layout's step", -1.0, self.time_frac)
        check_ascending("probability that a layout fits", 0.0, self.fit_probability, 1.0)

    def __repr__(self) -> str:
        step, low, high = map(format_time, (self.step_time_s, self.low_s, self.high_s))
        size = format_bytes(self.memory.total_nbytes)
        return f"{self.label}: step {step} (90 %: {low} to {high}), {size} ({self.verdict.value})"

    @property
    def step_time_s(self) -> float:
        """Median step time."""
        return self.median

    @property
    def label(self) -> str:
        """Short name of the layout, as ``TP4 PP2 mbs2``."""
        return layout_label(self.config)

    @property
    def routing(self) -> RoutingBalance | None:
        """Assumed or measured routing of tokens to its experts; None without experts."""
        return routed(self.config)

    @property
    def throughput(self) -> Throughput:
        """Throughput at its step time."""
        return throughput(self.config, self.step_time_s)

    @property
    def time_frac(self) -> float:
        """Its step time over that of the running layout, minus one."""
        return self.ratio.median - 1

    @property
    def is_comparable(self) -> bool:
        """True if a running layout does the same work, so that the ratio is defined."""
        return not math.isnan(self.time_frac)

    @property
    def is_unsure(self) -> bool:
        """True if the interval of the ratio contains 1, so that the layout may be faster or slower,
        or if the model misfits the run."""
        return self.is_doubtful or self.ratio.low < 1 < self.ratio.high

    @property
    def is_doubtful(self) -> bool:
        """True if the model misfits the running layout and this one was not recorded."""
        return bool(self.ratio.error_log.get(MISFIT))

    @property
    def against_text(self) -> str:
        """Change of the step against the running layout in short; empty if they do different
        work."""
        if not self.is_comparable:
            return ""
        return INDISTINGUISHABLE if self.is_unsure else format_frac(self.time_frac, signed=True)

    @property
    def change_text(self) -> str:
        """Change of the step against the running layout, with its interval; empty if they do
        different work."""
        if not self.is_comparable:
            return ""
        return format_change(self.time_frac, self.ratio.low - 1, self.ratio.high - 1)

    @property
    def ratios(self) -> dict[str, float | None]:
        """Ratios to the running step, by field name; None if they do different work."""
        numbers = {
            "time_frac": self.time_frac,
            "time_frac_low": self.ratio.low - 1,
            "time_frac_high": self.ratio.high - 1,
            "log_ratio_sigma": self.ratio.sigma_log,
        }
        return {name: n if self.is_comparable else None for name, n in numbers.items()}

    @property
    def host_nbytes_per_node(self) -> int | None:
        """Bytes of host memory per node that offloading takes."""
        return host_nbytes(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Encoded):
    """The running layout and others, ranked: those that fit first, then by time."""

    schema: ClassVar[int] = SCHEMA

    running: Candidate
    """The running layout; in a plan for another model, batch or device, the requested run."""
    measured_step_time_s: float | None
    memory_capacity_nbytes: int | None
    candidates: tuple[Candidate, ...]
    tried: Mapping[int, Tried] = field(default_factory=dict)
    """Layouts that were tried for each number of ranks."""
    misfit_log: float = 0.0
    """Log of measured over modelled step of the running layout, if outside the model's interval;
    else 0."""
    is_unmeasured: bool = False
    """True if nothing of the machine was measured; layouts tight in memory are not offered then."""
    not_searched: str = ""
    """Why the search for other layouts failed; empty if it did not."""
    is_listed: bool = True
    """False if ``running`` is no layout that anybody runs or requested."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(
            schema=self.schema,
            config=self.running.config,
            own=self.running,
            measured_step_time_s=self.measured_step_time_s,
            memory_capacity_nbytes=self.memory_capacity_nbytes,
            num_layouts=self.num_layouts,
            search=[{"num_ranks": n, **tried.to_json()} for n, tried in self.tried.items()],
            best=self.best and self.best.label,
            doubt=self.doubt or None,
            telling=[candidate.label for candidate in self.worth_measuring],
            candidates=self.candidates,
        )

    @property
    def rows(self) -> dict[int, Candidate]:
        """Layouts by row of the table: 0 is the running one, if it has a row."""
        first = 0 if self.is_listed else 1
        return dict(enumerate((self.running, *self.candidates)[first:], first))

    @property
    def num_layouts(self) -> int:
        """Number of layouts that were searched."""
        return sum(one.num_layouts for one in self.tried.values())

    @property
    def doubt(self) -> str:
        """Reason why the model cannot rank these layouts, and the remedy; empty if its interval
        contains the running layout's step."""
        if not self.misfit_log:
            return ""
        off_frac = abs(math.expm1(-self.misfit_log))
        return (
            f"the model is {format_frac(off_frac)} off the step of the running layout, more than "
            "its interval allows: record the other layout too, or more steps (--calibrate-steps)"
        )

    @property
    def best(self) -> Candidate | None:
        """The fastest other layout without an obstacle; None if none is faster, fits, and is
        supported by the program."""
        return next((c for c in self.candidates if not self.obstacle(c)), None)

    @property
    def by_code(self) -> Candidate | None:
        """The fastest layout that is surely faster but needs a change of the program's code.

        None if another layout may be offered, if options set the layout, or without such a layout.
        """
        running = self.running.config
        if self.best is not None or takes_options(running) or not self.running.is_comparable:
            return None
        return next(
            (
                c
                for c in self.candidates
                if c.verdict is not Verdict.DOES_NOT_FIT and c.time_frac < 0 and not c.is_unsure
            ),
            None,
        )

    @property
    def nearest(self) -> Candidate | None:
        """The layout nearest to an offer: the fastest that fits, else the one that needs the least
        memory; None without others."""
        fitting = [c for c in self.candidates if c.verdict is not Verdict.DOES_NOT_FIT]
        if fitting:
            return min(fitting, key=lambda c: c.step_time_s)
        return min(self.candidates, key=lambda c: c.memory.total_nbytes, default=None)

    @property
    def nearest_miss(self) -> str:
        """The layout nearest to an offer and its obstacle, in words; empty without others."""
        nearest = self.nearest
        return "" if nearest is None else self.missed_by(nearest, nearest.label)

    def missed_by(self, candidate: Candidate, name: str) -> str:
        """Return the gain of a layout, called ``name``, and why it is not offered."""
        gain = f" ({candidate.against_text})"
        if candidate.verdict is Verdict.DOES_NOT_FIT or not candidate.is_comparable:
            gain = ""
        return f"nearest is {name}{gain}: {self.obstacle(candidate)}"

    def obstacle(self, candidate: Candidate) -> str:
        """Return why a layout is not offered; empty if it may be.

        It may be if it is faster than the running layout, if there is one, fits, and is supported
        by the program.  Rules that the running layout violates too are no obstacle, as it runs.
        """
        config, running = candidate.config, self.running.config
        if candidate.verdict is Verdict.DOES_NOT_FIT:
            return "it does not fit in memory"
        if candidate.verdict is Verdict.TIGHT and self.is_unmeasured:
            return f"it fits in memory with a probability of {candidate.fit_probability:.2f} only"
        if candidate.time_frac >= 0:
            return "it is not faster"
        return unsupported_reason(config, running) or candidate.conversion

    @property
    def worth_measuring(self) -> tuple[Candidate, ...]:
        """Layouts for which a measurement is most informative: the fastest that fit, may be faster
        than the running one, and are less certain than a measurement would make them."""
        able = [
            c
            for c in self.candidates
            if c.verdict is not Verdict.DOES_NOT_FIT
            and not (c.verdict is Verdict.TIGHT and self.is_unmeasured)
            # Comparisons with NaN are false: keep layouts without a running one of the same work.
            and not (c.ratio.low >= 1 or c.ratio.sigma_log < 2 * MEASURED_SIGMA_LOG)
        ]
        return tuple(sorted(able, key=lambda c: c.step_time_s)[:_NUM_WORTH_MEASURING])


def plan(
    config: RunConfig,
    steps: FittedSteps,
    *,
    num_ranks: int | Sequence[int] | None = None,
    budget: MemoryBudget = ANY_MEMORY,
    is_running: bool = True,
    is_listed: bool = True,
    has_checkpoints: bool = True,
    is_unmeasured: bool = False,
    keep: LayoutConstraint | None = None,
    effort: Effort | None = None,
) -> Plan:
    """Return the best layouts on one or several numbers of ranks, compared with the running one.

    ``steps`` predicts step times, with measured steps as measured; errors that two layouts share
    cancel in their ratio.  Without ``is_running``, ``config`` is a requested layout, and nothing is
    compared with it; without ``is_listed`` it only states model and batch, and may be one of the
    best.  ``has_checkpoints``: a layout has to resume from the run's checkpoints.
    ``keep`` excludes layouts that it does not allow; layouts that the
    program has no options for are excluded too, and counted.  Behind layouts that fit are some that
    do not, least lacking first.
    """
    counts = num_ranks if isinstance(num_ranks, Sequence) else (num_ranks,)
    wanted = dict.fromkeys(count or config.parallelism.num_ranks for count in counts)

    search = partial(best_layouts, config, steps, budget=budget, effort=effort, is_listed=is_listed)
    given = fix_unavailable_axes(config, keep)
    results = {n: count_excluded(config, n, keep, search(n, keep=given)) for n in wanted}
    plan_of = partial(
        _make_plan,
        config,
        steps,
        results,
        is_listed=is_listed,
        is_unmeasured=is_unmeasured,
        budget=budget,
        is_running=is_running,
        has_checkpoints=has_checkpoints,
    )
    first = plan_of(())
    if is_unmeasured and first.best is None:
        # All of the fastest are tight: those that surely fit are slower than these.
        surely = partial(search, keep=given, budget=replace(budget, is_sure=True))
        return plan_of([one.config for count in wanted for one in surely(count).best])
    followed = _resumable_constraint(config, given or LayoutConstraint())
    # The ratio is NaN if no running layout does the same work; such layouts may be offered.
    quicker = [c for c in first.candidates if not c.time_frac >= 0]
    is_host_alone = any(c.verdict is not Verdict.DOES_NOT_FIT for c in quicker)
    if first.best is not None or followed is None or not is_host_alone:
        return first
    # Layouts that the program supports may rank behind all of these.
    return plan_of([one for count in wanted for one in search(count, keep=followed).layouts])


def unsupported_reason(config: RunConfig, running: RunConfig) -> str:
    """Return why the running program has no option for another layout, or would refuse it; empty if
    it would train in it."""
    is_same_split = config.parallelism == running.parallelism and (
        replace(running, batch=config.batch) == config
    )
    if not takes_options(running) and not is_same_split:
        return f"no option of {running.framework.partition(' ')[0]} sets it; set it in the code"
    if not takes_options(running):
        return ""
    if clause := unsupported_options_reason(config, running):
        return clause
    fresh = [clause for clause in refusals(config) if clause not in refusals(running)]
    return f"Megatron would refuse it: {fresh[0]}" if fresh else ""


def _make_plan(
    config: RunConfig,
    steps: FittedSteps,
    results: Mapping[int, SearchResult],
    others: Sequence[RunConfig],
    *,
    is_listed: bool,
    is_unmeasured: bool,
    budget: MemoryBudget,
    **settings: Any,
) -> Plan:
    layouts = [layout for one in results.values() for layout in one.layouts]
    running, *candidates = compare(
        config,
        [config, *dict.fromkeys((*layouts, *others))],
        steps,
        budget=budget,
        **settings,
    )
    candidates.sort(key=_standing)
    return Plan(
        running=running,
        misfit_log=steps.misfit_log if running.is_comparable else 0.0,
        measured_step_time_s=steps.measured_s(config),
        memory_capacity_nbytes=budget.capacity_nbytes,
        tried={count: one.tried for count, one in results.items()},
        candidates=tuple(candidates),
        is_listed=is_listed,
        is_unmeasured=is_unmeasured,
    )


def _standing(one: Candidate) -> tuple[bool, bool, float, str]:
    """Return the sort key of a plan: layouts that fit, then surely faster ones, then by time."""
    is_faster = one.time_frac < 0 and not one.is_unsure
    return one.verdict is Verdict.DOES_NOT_FIT, not is_faster, one.step_time_s, one.label


_USER_LOOP_AXES = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "recompute")
"""Axes fixed by the code of a custom training loop, in addition to its sharding."""


def _resumable_constraint(config: RunConfig, keep: LayoutConstraint) -> LayoutConstraint | None:
    """Return the constraint to layouts that the run can resume in; None if contrary to ``keep``."""
    is_of_one_split = config.cadence.checkpoint_form in _OF_ONE_SPLIT
    names = ("sharding", *(_SPLIT_AXES if is_of_one_split else ()))
    names = names if takes_options(config) else ("sharding", *_USER_LOOP_AXES)
    constraint: LayoutConstraint | None = keep
    for name in names:
        constraint = constraint and constraint.with_axis_value(name, choice(name).read(config))
    return constraint


def compare(
    config: RunConfig,
    layouts: Sequence[RunConfig],
    steps: FittedSteps,
    *,
    budget: MemoryBudget = ANY_MEMORY,
    is_running: bool = True,
    has_checkpoints: bool = True,
) -> list[Candidate]:
    """Return a candidate for each layout, in order, compared with the running one if both do the
    same work; see ``plan``."""
    running, *others = steps.estimates([config, *layouts])
    candidates = []
    for estimate in others:
        is_compared = is_running and estimate.config.does_work_of(config)
        needed = budget.needed(estimate.config, config)
        one = Candidate(
            **{part.name: getattr(estimate, part.name) for part in fields(estimate)},
            ratio=estimate.over(running)
            if is_compared
            else replace(_UNKNOWN, error_log=estimate.error_log),
            memory=needed,
            verdict=budget.verdict(needed),
            options=options(estimate.config),
            fit_probability=budget.fit_probability(needed),
            conversion=converter(estimate.config, config) if has_checkpoints else "",
        )
        candidates.append(one)
    return candidates
