"""Other layouts of the same run, ranked by predicted step time, with memory and interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from ..arguments import (
    NEEDS_ENGINE,
    TRANSFORMER_ENGINE,
    Keep,
    layout_name,
    options,
    program_name,
    refusals,
    untaken,
)
from ..fit import Source
from ..forecast import Throughput, throughput
from ..memory import MemoryEstimate, Verdict, fit_probability, host_nbytes, memory, verdict
from ..plain_json import JsonObject
from ..regressors import Z_90
from ..search import (
    FSDP_OPTIONS,
    OFFLOAD_OPTIONS,
    Effort,
    MemoryBudget,
    Proof,
    SearchResult,
    best_layouts,
    cells_of,
    layout_label,
    modules_of,
    num_variants,
)
from ..steps import (
    MEASURED_SIGMA_LOG,
    MISFIT,
    FittedSteps,
    StepEstimate,
    error_ratio,
    paired_sigma_log,
)
from ..units import INDISTINGUISHABLE, format_bytes, format_change, format_frac, format_time
from ..workload import Encoded, Routed, RunConfig, Sharding, routed, takes_options

_AXES = {
    "tp": "--tensor-model-parallel-size",
    "sp": "--sequence-parallel",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-layers-per-virtual-pipeline-stage",
    "mbs": "--micro-batch-size",
    "recompute": "--recompute-granularity",
}
"""Axes that stay as they are where nothing says another value."""
_EXPERT_AXES = {"ep": "--expert-model-parallel-size"}
_WITHIN = (
    *("--pipeline-model-parallel-layout", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--use-distributed-optimizer", "--overlap-grad-reduce"),
    *("--overlap-param-gather", "--num-distributed-optimizer-instances"),
)
"""What splits, recompute and states of an axis need."""
_NOT_ON_A_CPU = ("--context-parallel-size", *FSDP_OPTIONS, *OFFLOAD_OPTIONS)


def fix_unavailable_axes(config: RunConfig, keep: Keep | None) -> Keep | None:
    """The layouts that are asked for, with each axis that the program has no option for as it runs.

    An axis that is asked for otherwise stays asked for: its rows say why they are not offered.
    """
    if not takes_options(config):
        return keep
    constraint = keep
    for name, option in _axes(config).items():
        if option in config.absent:
            base = constraint or Keep()
            constraint = base.having(name, layout_name(name).read(config)) or base
    return constraint


def count_excluded(
    config: RunConfig, num_ranks: int, keep: Keep | None, result: SearchResult
) -> SearchResult:
    """What was found, with the layouts that the program cannot be asked for among what rules cut.

    ``keep`` is what was asked for.
    """
    reason = exclusion_reason(config)
    if not reason:
        return result
    cells = cells_of(replace(config, absent=()), num_ranks, keep)
    number = max(0, num_variants(cells, keep) - result.proof.num_layouts)
    proof = replace(result.proof, cut={**result.proof.cut, reason: number})
    return replace(result, proof=proof)


def exclusion_reason(config: RunConfig) -> str:
    """Why layouts of a run were not searched; empty where its program takes all options.

    Options that no layout of this model and device needs are not named.
    """
    if not config.absent or not takes_options(config):
        return ""
    wanted = dict.fromkeys((*_axes(config).values(), *_WITHIN, *FSDP_OPTIONS, *OFFLOAD_OPTIONS))
    if config.device == "cpu":
        wanted = {option: None for option in wanted if option not in _NOT_ON_A_CPU}
    missing = ", ".join(option for option in wanted if option in config.absent)
    texts = [f"{program_name(config)} takes no {missing}"] if missing else []
    engine_modules = [
        name for name in modules_of(replace(config, absent=())) if name in NEEDS_ENGINE
    ]
    if TRANSFORMER_ENGINE in config.absent and engine_modules:
        texts.append(f"recompute of {', '.join(engine_modules)} needs Transformer Engine")
    return "; ".join(texts)


def _axes(config: RunConfig) -> dict[str, str]:
    return _AXES | (_EXPERT_AXES if config.model.experts is not None else {})


_FORMS = {
    Sharding.NONE: "a whole optimizer",
    Sharding.OPTIMIZER: "the distributed optimizer",
    Sharding.GRADS: "Megatron-FSDP",
    Sharding.WEIGHTS: "Megatron-FSDP",
}
"""Of which each saves its states in a form of its own."""


def converter(config: RunConfig, running: RunConfig) -> str:
    """Why a run cannot go on under another sharding; empty where it can.

    Megatron's optimizers save their states in forms of their own, which only a converter joins
    (Megatron-LM issue 851); FSDP wants ``--ckpt-format fsdp_dtensor``.

    >>> from dataclasses import replace
    >>> from ..workload import Batch, ModelShape, Parallelism
    >>> gpt = ModelShape(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4,
    ...     num_query_groups=4, kv_channels=16, seq_length=64, vocab_size=128)
    >>> here = RunConfig(model=gpt, parallelism=Parallelism(dp=2),
    ...     batch=Batch(micro_batch_size=1, global_batch_size=8))
    >>> there = replace(here, parallelism=Parallelism(dp=2, is_optimizer_distributed=True))
    >>> converter(there, here)
    'its checkpoint (the distributed optimizer) would need a converter'
    """
    if not takes_options(running):
        return ""
    form = _FORMS[config.parallelism.sharded]
    is_same = form == _FORMS[running.parallelism.sharded]
    return "" if is_same else f"its checkpoint ({form}) would need a converter"


__all__ = [
    "Candidate",
    "Plan",
    "compare",
    "layout_label",
    "plan",
    "takes_options",
    "unsupported_reason",
]

SCHEMA = 1
# Few enough that somebody tries them.
_NUM_WORTH_MEASURING = 3


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Candidate(Encoded):
    """One layout.  ``time_frac`` is its step time over that of the running layout, minus one; it
    and what belongs to it are NaN where nothing runs that does the same work on such a device."""

    JSON: ClassVar[str] = (
        "label num_ranks=config.parallelism.num_ranks tp=config.parallelism.tp "
        "pp=config.parallelism.pp vp=config.parallelism.vp dp=config.parallelism.dp "
        "cp=config.parallelism.cp ep=config.parallelism.ep "
        "micro_batch_size=config.batch.micro_batch_size recompute=config.recompute routing "
        "step_time_s low_s high_s **ratios throughput memory host_nbytes_per_node verdict "
        "fit_probability source_frac options"
    )

    config: RunConfig
    step_time_s: float
    low_s: float
    high_s: float
    time_frac: float
    time_frac_low: float
    time_frac_high: float
    log_ratio_sigma: float
    """Standard deviation of the log of the ratio; shared errors have cancelled."""
    error_log: Mapping[str, float]
    """Change of the log of the ratio when one thing that is not known is off by one deviation."""
    memory: MemoryEstimate
    verdict: Verdict
    source_frac: Mapping[Source, float]
    options: tuple[str, ...]
    fit_probability: float | None = None
    """That it fits in the memory of a device; None where nobody knows how much that is."""

    def __repr__(self) -> str:
        step, low, high = map(format_time, (self.step_time_s, self.low_s, self.high_s))
        size = format_bytes(self.memory.total_nbytes)
        return f"{self.label}: step {step} (90 %: {low} to {high}), {size} ({self.verdict.value})"

    @property
    def label(self) -> str:
        """The layout in short, as ``TP4 PP2 mbs2``."""
        return layout_label(self.config)

    @property
    def routing(self) -> Routed | None:
        """How tokens are taken to spread over the ranks of its experts; None without experts."""
        return routed(self.config)

    @property
    def throughput(self) -> Throughput:
        """What its step time is worth."""
        return throughput(self.config, self.step_time_s)

    @property
    def is_comparable(self) -> bool:
        """True where a running layout does the same work, so that the ratio means something."""
        return not math.isnan(self.time_frac)

    @property
    def is_unsure(self) -> bool:
        """True where the interval of the ratio holds 1, so that the layout may be faster or slower,
        and where the model does not describe the run."""
        return self.is_doubtful or self.time_frac_low < 0 < self.time_frac_high

    @property
    def is_doubtful(self) -> bool:
        """True where the model misses the running layout and this one was not recorded."""
        return bool(self.error_log.get(MISFIT))

    @property
    def against_text(self) -> str:
        """How much more or less the step takes than the running layout's, in short; empty where
        that does other work."""
        if not self.is_comparable:
            return ""
        return INDISTINGUISHABLE if self.is_unsure else format_frac(self.time_frac, signed=True)

    @property
    def change_text(self) -> str:
        """How much less or more the step takes than the running layout's, with its interval; empty
        where that does other work."""
        if not self.is_comparable:
            return ""
        return format_change(self.time_frac, self.time_frac_low, self.time_frac_high)

    @property
    def ratios(self) -> dict[str, float | None]:
        """Its step against the running one, by name; None where they do other work."""
        names = ("time_frac", "time_frac_low", "time_frac_high", "log_ratio_sigma")
        return {name: getattr(self, name) if self.is_comparable else None for name in names}

    @property
    def host_nbytes_per_node(self) -> int | None:
        """Bytes of host memory that offloading takes on a node."""
        return host_nbytes(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Encoded):
    """The running layout and the others, fastest that may run first."""

    JSON: ClassVar[str] = (
        "schema config=running.config own=running measured_step_time_s memory_capacity_nbytes "
        "num_layouts "
        "search best=best.label doubt? telling candidates"
    )
    schema: ClassVar[int] = SCHEMA

    running: Candidate
    """The layout that runs; of a plan for another model, batch or device the asked run in it."""
    measured_step_time_s: float | None
    memory_capacity_nbytes: int | None
    candidates: tuple[Candidate, ...]
    proofs: Mapping[int, Proof] = field(default_factory=dict)
    """What became of all layouts on each number of ranks."""
    misfit_log: float = 0.0
    """Measured over modelled step of the running layout, log, where the model's interval does not
    hold it; else 0."""
    has_checkpoints: bool = True
    """The run saves this model, and a layout has to go on from that."""
    is_unmeasured: bool = False
    """Nothing of the machine was measured: a layout that is tight in memory is not offered."""

    @property
    def num_layouts(self) -> int:
        """How many layouts these are the best of."""
        return sum(proof.num_layouts for proof in self.proofs.values())

    @property
    def doubt(self) -> str:
        """The reason why the model cannot rank these layouts, and the remedy; empty where its
        interval holds the running layout's step."""
        if not self.misfit_log:
            return ""
        off_frac = abs(math.expm1(-self.misfit_log))
        return (
            f"the model is {format_frac(off_frac)} off the step of the running layout, more than "
            "its interval allows: record the other layout too, or more steps (--calibrate-steps)"
        )

    @property
    def best(self) -> Candidate | None:
        """The fastest other layout that may be offered; None where none is faster, fits, and can be
        asked of the host."""
        return next((c for c in self.candidates if not self.obstacle(c)), None)

    @property
    def by_code(self) -> Candidate | None:
        """The fastest layout that is surely faster and that no option of the running program sets,
        only its code; None where one may be offered, and without such a layout."""
        running = self.running.config
        if self.best is not None or takes_options(running) or not self.running.is_comparable:
            return None
        surely = (
            c
            for c in self.candidates
            if c.verdict is not Verdict.DOES_NOT_FIT and c.time_frac < 0 and not c.is_unsure
        )
        return next((c for c in surely if not self.conversion(c.config)), None)

    @property
    def nearest(self) -> Candidate | None:
        """The layout that comes nearest to an offer: the fastest that fits, else the one that lacks
        the least memory; None without others."""
        fitting = [c for c in self.candidates if c.verdict is not Verdict.DOES_NOT_FIT]
        if fitting:
            return min(fitting, key=lambda c: c.step_time_s)
        return min(self.candidates, key=lambda c: c.memory.total_nbytes, default=None)

    @property
    def nearest_miss(self) -> str:
        """Which layout comes nearest to an offer, and why it is none; empty without others."""
        nearest = self.nearest
        return "" if nearest is None else self.missed_by(nearest, nearest.label)

    def missed_by(self, candidate: Candidate, name: str) -> str:
        """Why a layout that is called so is not offered, after how much it would gain."""
        gain = f" ({candidate.against_text})"
        if candidate.verdict is Verdict.DOES_NOT_FIT or not candidate.is_comparable:
            gain = ""
        return f"nearest is {name}{gain}: {self.obstacle(candidate)}"

    def obstacle(self, candidate: Candidate) -> str:
        """Why a layout is not offered; empty where it may be: faster than what runs, if anything
        does, fitting, and one that the host can be asked for and would train in.

        What Megatron would refuse of the running layout too is no obstacle: it runs.
        """
        config, running = candidate.config, self.running.config
        if candidate.verdict is Verdict.DOES_NOT_FIT:
            return "it does not fit in memory"
        if candidate.verdict is Verdict.TIGHT and self.is_unmeasured:
            return f"it fits in memory with a probability of {candidate.fit_probability:.2f} only"
        if candidate.time_frac >= 0:
            return "it is not faster"
        return unsupported_reason(config, running) or self.conversion(config)

    def conversion(self, config: RunConfig) -> str:
        """The converter that the run's checkpoint needs before this layout can resume from it;
        empty where none is needed, and where the run has no checkpoint of this model."""
        return converter(config, self.running.config) if self.has_checkpoints else ""

    @property
    def worth_measuring(self) -> tuple[Candidate, ...]:
        """The layouts whose measured step decides most: the fastest of those that fit, may be
        faster than what runs, and are less sure than a measurement would make them."""
        able = [
            c
            for c in self.candidates
            if c.verdict is not Verdict.DOES_NOT_FIT
            and not (c.verdict is Verdict.TIGHT and self.is_unmeasured)
            # Nothing of it is known where no running layout does the same work.
            and not (c.time_frac_low >= 0 or c.log_ratio_sigma < 2 * MEASURED_SIGMA_LOG)
        ]
        return tuple(sorted(able, key=lambda c: c.step_time_s)[:_NUM_WORTH_MEASURING])

    @property
    def search(self) -> list[JsonObject]:
        """How far the search of each number of ranks has come."""
        return [{"num_ranks": number, **proof.to_json()} for number, proof in self.proofs.items()]

    @property
    def telling(self) -> list[str]:
        """Labels of the layouts that are worth measuring next."""
        return [candidate.label for candidate in self.worth_measuring]


def plan(
    config: RunConfig,
    steps: FittedSteps,
    *,
    num_ranks: int | Sequence[int] | None = None,
    memory_capacity_nbytes: int | None = None,
    memory_offset_nbytes: int | None = None,
    is_running: bool = True,
    keep: Keep | None = None,
    effort: Effort | None = None,
) -> Plan:
    """The best layouts of one or several numbers of ranks against the running one.

    ``steps`` says how long each takes, whose step was measured as it was; errors that both share
    cancel in the ratio of two.  Without ``is_running`` the layout is what was asked for and nothing
    is held against it.  ``memory_offset_nbytes`` is what the measured peak had beyond its estimate
    (None: not measured).  ``keep`` leaves out what it does not allow; what the program of the run
    cannot be asked for is left out too, and counted.  Behind those that fit stand some that do not,
    the least lacking first.
    """
    counts = num_ranks if isinstance(num_ranks, Sequence) else (num_ranks,)
    wanted = dict.fromkeys(count or config.parallelism.num_ranks for count in counts)
    budget = MemoryBudget(
        capacity_nbytes=memory_capacity_nbytes, offset_nbytes=memory_offset_nbytes or 0
    )

    def searched(count: int, constraint: Keep | None) -> SearchResult:
        result = best_layouts(
            config, steps, count, budget=budget, keep=constraint, effort=effort or Effort()
        )
        if constraint is None or not constraint.axes:
            return result
        number = num_variants(cells_of(config, count, constraint), constraint)
        return replace(result, proof=replace(result.proof, num_requested=number))

    planned = partial(
        _make_plan, config, steps, memory_capacity_nbytes, memory_offset_nbytes, is_running
    )
    given = fix_unavailable_axes(config, keep)
    results = {n: count_excluded(config, n, keep, searched(n, given)) for n in wanted}
    first = planned(results, ())
    followed = _resumable_constraint(config, given or Keep())
    # The ratio is NaN where no running layout does the same work; such layouts may be offered.
    quicker = [c for c in first.candidates if not c.time_frac >= 0]
    is_host_alone = any(c.verdict is not Verdict.DOES_NOT_FIT for c in quicker)
    if first.best is not None or followed is None or not is_host_alone:
        return first
    # What the host takes may stand behind all of these.
    others = [layout for count in wanted for layout in searched(count, followed).layouts]
    return planned(results, others)


def unsupported_reason(config: RunConfig, running: RunConfig) -> str:
    """Why the program of the running layout cannot be asked for another one, or would refuse it;
    empty where it would train in it."""
    is_same_split = config.parallelism == running.parallelism and (
        replace(running, batch=config.batch) == config
    )
    if not takes_options(running) and not is_same_split:
        return f"no option of {running.framework.partition(' ')[0]} sets it; set it in the code"
    if not takes_options(running):
        return ""
    if clause := untaken(config, running):
        return clause
    fresh = [clause for clause in refusals(config) if clause not in refusals(running)]
    return f"Megatron would refuse it: {fresh[0]}" if fresh else ""


def _make_plan(
    config: RunConfig,
    steps: FittedSteps,
    capacity_nbytes: int | None,
    offset_nbytes: int | None,
    is_running: bool,
    results: Mapping[int, SearchResult],
    others: Sequence[RunConfig],
) -> Plan:
    layouts = [layout for one in results.values() for layout in one.layouts]
    running, *candidates = compare(
        config,
        [config, *dict.fromkeys((*layouts, *others))],
        steps,
        memory_capacity_nbytes=capacity_nbytes,
        memory_offset_nbytes=offset_nbytes,
        is_running=is_running,
    )
    candidates.sort(key=_standing)
    return Plan(
        running=running,
        misfit_log=steps.misfit_log if running.is_comparable else 0.0,
        measured_step_time_s=steps.measured_s(config),
        memory_capacity_nbytes=capacity_nbytes,
        proofs={count: one.proof for count, one in results.items()},
        candidates=tuple(candidates),
    )


def _standing(one: Candidate) -> tuple[bool, bool, float, str]:
    """The order of a plan: what fits first, then what is surely faster, then by time."""
    is_faster = one.time_frac < 0 and not one.is_unsure
    return one.verdict is Verdict.DOES_NOT_FIT, not is_faster, one.step_time_s, one.label


_USER_LOOP_AXES = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "recompute")
"""What a loop of the user's own decides beside its sharding."""


def _resumable_constraint(config: RunConfig, keep: Keep) -> Keep | None:
    """Layouts that the host of a run can go on in; None where others are asked for."""
    names = ("sharding",) if takes_options(config) else ("sharding", *_USER_LOOP_AXES)
    constraint: Keep | None = keep
    for name in names:
        constraint = constraint and constraint.having(name, layout_name(name).read(config))
    return constraint


def compare(
    config: RunConfig,
    layouts: Sequence[RunConfig],
    steps: FittedSteps,
    *,
    memory_capacity_nbytes: int | None = None,
    memory_offset_nbytes: int | None = None,
    is_running: bool = True,
) -> list[Candidate]:
    """Each of the layouts, in their order, against the running one where that does the same work;
    see ``plan``."""
    running, *others = steps.estimates([config, *layouts])
    return [
        _candidate(
            estimate,
            running if is_running and estimate.config.does_work_of(config) else None,
            memory_capacity_nbytes,
            memory_offset_nbytes,
        )
        for estimate in others
    ]


def _candidate(
    estimate: StepEstimate,
    running: StepEstimate | None,
    capacity_nbytes: int | None,
    offset_nbytes: int | None,
) -> Candidate:
    ratio = sigma = math.nan
    if running is not None:
        ratio = estimate.time_s / running.time_s
        sigma = paired_sigma_log(estimate, running)
    # The ratio is log-normal: its interval is symmetric in the logarithm.
    spread = math.exp(Z_90 * sigma)
    needed = memory(estimate.config, offset_nbytes=offset_nbytes or 0)
    is_calibrated = offset_nbytes is not None
    return Candidate(
        config=estimate.config,
        step_time_s=estimate.time_s,
        low_s=estimate.low_s,
        high_s=estimate.high_s,
        time_frac=ratio - 1,
        time_frac_low=ratio / spread - 1,
        time_frac_high=ratio * spread - 1,
        log_ratio_sigma=sigma,
        error_log=error_ratio(estimate, running) if running is not None else estimate.error_log,
        memory=needed,
        source_frac=estimate.source_frac,
        verdict=verdict(needed, capacity_nbytes, is_calibrated=is_calibrated),
        options=options(estimate.config),
        fit_probability=fit_probability(needed, capacity_nbytes, is_calibrated=is_calibrated)
        if capacity_nbytes
        else None,
    )
