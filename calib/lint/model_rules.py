"""Rules that hold only where the model of the run says so: there is no finding without a gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..advice.micro_batch import faster_probability
from ..advice.plan import Candidate
from ..arguments.megatron_options import NAMES
from ..arguments.megatron_values import as_options, layout_values
from ..errors import ConfigError
from ..regressors.intervals import Z_90
from ..workload.config import RunConfig
from .pricing import Pricing
from .rule import Gain, Harm, Part, Remedy, Rule
from .stated_launch import StatedLaunch

_MOST_EVAL_FRAC, _WANTED_EVAL_FRAC = 0.05, 0.02
"""Shares of the run: how often to evaluate is a choice, so only what is far from little is told,
and what is offered leaves room below that."""
_LEAST_SAVE_GAIN_FRAC = 0.005
"""The loss is flat around its least: an interval twice as long or half as long costs a quarter more
of it, which is less than this where saves cost little."""
_MICRO = "--micro-batch-size"
_RECOMPUTE = tuple("--" + name.replace("_", "-") for name in NAMES["said_together"]["recompute"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule(Rule):
    """A rule that asks the model whether it holds."""

    find: Callable[[StatedLaunch, Pricing], Iterable[Remedy]]


def _virtual_stages(launch: StatedLaunch, pricing: Pricing) -> Iterator[Remedy]:
    config, par = launch.config, launch.config.parallelism
    if par.pp == 1 or par.vp > 1 or par.chunk_layers:
        return
    each = config.model.num_layers // par.pp
    layouts: dict[int, RunConfig] = {}
    for vp in (number for number in range(2, each + 1) if each % number == 0):
        split = replace(par, vp=vp, overlaps_p2p=True)
        try:
            layouts[each // vp] = replace(config, parallelism=split)
        except ConfigError:  # micro-batches come in groups of pp
            continue
    if not layouts:
        return
    times = pricing.steps.median_times(list(layouts.values())).tolist()
    best = min(zip(times, layouts, strict=True))[1]
    option = "--num-layers-per-virtual-pipeline-stage"
    yield Remedy(
        what=f"{par.pp} stages without virtual ones",
        put=((option, str(best)),),
        layout=layouts[best],
    )


def _recompute(launch: StatedLaunch, pricing: Pricing) -> Iterator[Remedy]:
    config = launch.config
    micro = config.batch.micro_batch_size
    for one in pricing.micro_batch.choices:
        if one.config.batch.micro_batch_size == micro and one.config.recompute != config.recompute:
            yield from _sure(launch, pricing, one, _written(launch))


def _micro_batch(launch: StatedLaunch, pricing: Pricing) -> Iterator[Remedy]:
    best, micro = pricing.micro_batch.best, launch.config.batch.micro_batch_size
    if best is not None and best.config.batch.micro_batch_size > micro:
        yield from _sure(launch, pricing, best, f"{_MICRO} {micro}")


def _sure(launch: StatedLaunch, pricing: Pricing, one: Candidate, what: str) -> Iterator[Remedy]:
    """The choice, where it is faster as surely as a plan asks."""
    if faster_probability(one) < pricing.micro_batch.confidence:
        return
    changed = one.config.batch != launch.config.batch
    said = {name: v for name, v in layout_values(one.config).items() if _is_recompute(name)}
    put = [(option, *words) for option, words in as_options(said)]
    if changed:
        put.insert(0, (_MICRO, str(one.config.batch.micro_batch_size)))
    named = {phrase[0] for phrase in put}
    drop = tuple(name for name in _RECOMPUTE if launch.says(name) and name not in named)
    yield Remedy(what=what, put=tuple(put), drop=drop, layout=one.config)


def _is_recompute(name: str) -> bool:
    return name in NAMES["said_together"]["recompute"]


def _written(launch: StatedLaunch) -> str:
    said = [launch.written(option) for option in _RECOMPUTE if launch.says(option)]
    return " ".join(said) or f"recompute {launch.config.recompute.value}"


def _evaluations(launch: StatedLaunch, pricing: Pricing) -> Iterator[Remedy]:
    cadence, step_s = launch.config.cadence, pricing.own.step_time_s
    if not cadence.eval_interval or not cadence.eval_iters:
        return
    time_s, _ = pricing.part_s(Part.EVALUATIONS)
    if time_s / (time_s + step_s * cadence.eval_interval) < _MOST_EVAL_FRAC:
        return
    wanted = _round_up(time_s * (1 / _WANTED_EVAL_FRAC - 1) / step_s)
    yield Remedy(
        what=f"--eval-interval {cadence.eval_interval} with --eval-iters {cadence.eval_iters}",
        put=(("--eval-interval", str(wanted)),),
        gain=pricing.apart(Part.EVALUATIONS, wanted),
    )


def _saves(launch: StatedLaunch, pricing: Pricing) -> Iterator[Remedy]:
    """Where less is lost, of each second of steps, to saves and to what is done again.

    A failure comes once in MTBI + MTTR (mean times between interrupts and to restart), and half an
    interval T is done again: save / T + T / (2 (MTBI + MTTR)), least at T = sqrt(2 (MTBI + MTTR)
    save), the first-order interval of Young (1974) and Daly (2006).
    """
    interval, mtbf_s = launch.config.cadence.save_interval, pricing.mtbf_s
    if not interval or not mtbf_s or launch.says("--async-save"):
        return
    step_s, (save_s, sigma_log) = pricing.own.step_time_s, pricing.part_s(Part.SAVES)
    between_s = mtbf_s + pricing.restart_s
    wanted = max(1, round(math.sqrt(2 * between_s * save_s) / step_s))

    def lost_frac(steps: int, one_s: float) -> float:
        return one_s / (steps * step_s) + steps * step_s / (2 * between_s)

    def change(one_s: float) -> float:
        return (1 + lost_frac(wanted, one_s)) / (1 + lost_frac(interval, one_s)) - 1

    spread = math.exp(Z_90 * sigma_log)
    ends = sorted((change(save_s / spread), change(save_s * spread)))
    gain = Gain(time_frac=change(save_s), low_frac=ends[0], high_frac=ends[1], of_run=True)
    if gain.time_frac < -_LEAST_SAVE_GAIN_FRAC:
        yield Remedy(
            what=f"--save-interval {interval}",
            put=(("--save-interval", str(wanted)),),
            gain=gain,
        )


def _round_up(number: float) -> int:
    """With two digits, so that it can be remembered.

    >>> _round_up(1234.5), _round_up(7.1)
    (1300, 8)
    """
    unit = 10 ** max(0, math.floor(math.log10(max(number, 1.0))) - 1)
    return math.ceil(number / unit) * unit


RULES = (
    ModelRule(
        name="virtual-stages",
        harm=Harm.WASTES,
        when="a pipeline whose layers divide into virtual stages, without any",
        why="the pipeline fills and drains at the pace of whole stages",
        source="megatron/core/pipeline_parallel/schedules.py",
        is_planned=True,
        find=_virtual_stages,
    ),
    ModelRule(
        name="recompute",
        harm=Harm.WASTES,
        when="recompute, and room in the measured memory for a lighter one",
        why="activations that memory has room for are computed a second time",
        source="megatron/core/transformer/transformer_config.py",
        is_planned=True,
        find=_recompute,
    ),
    ModelRule(
        name="micro-batch",
        harm=Harm.WASTES,
        when="room in the measured memory for a larger micro-batch that is faster",
        why="memory has room for larger products and fewer launches",
        source="docs/user-guide/parallelism-guide.md",
        is_planned=True,
        find=_micro_batch,
    ),
    ModelRule(
        name="eval-interval",
        harm=Harm.WASTES,
        when="evaluations that take more than 5 % of the run",
        why="training stands still while the model is evaluated",
        source="megatron/training/training.py",
        find=_evaluations,
    ),
    ModelRule(
        name="save-interval",
        harm=Harm.WASTES,
        when="`--save-interval` far from Young's and Daly's, where the time between failures is "
        "given",
        why="saves, and work that is repeated after a failure, take more time than they need",
        source="Daly 2006: sqrt(2 (MTBI + MTTR) t_save)",
        find=_saves,
    ),
)
