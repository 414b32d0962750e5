"""What a training loop does beside its steps: timers, logs, profilers, data, tests and saves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .rule import Harm, Remedy, Rule, StatedLaunch, missing

if TYPE_CHECKING:
    from .pricing import Pricing

_TRAINING = "megatron/training/training.py"
_ARGUMENTS = "megatron/training/arguments.py"
_COMMON = "megatron/training/common_config.py"
_CONFIG = "megatron/training/training_config.py"
_CHECKPOINTS = "megatron/training/checkpointing.py"
_HOST = "the cost of a waiting host depends on how far it runs ahead, which is not in the model"
_PROFILED = "it slows a few steps, or each one by the cost of a profiler, which is not in the model"
_LOG_EVERY = "10"
"""Reports that are so far apart let the host run ahead between them."""
_GARBAGE_EVERY = "100"
"""What Megatron's own guide for experts advises (``megatron/core/transformer/moe/README.md``)."""
_MOST_EVAL_FRAC, _WANTED_EVAL_FRAC = 0.05, 0.02
"""Shares of the run: how often to evaluate is a choice, so only what is far from little is told,
and what is offered leaves room below that."""
_LEAST_SAVE_GAIN_FRAC = 0.005
"""The loss is flat around its least: an interval twice as long or half as long costs a quarter more
of it, which is less than this where saves cost little."""


def _exceeds_zero(launch: StatedLaunch, option: str) -> bool:
    return launch.is_on_gpu and (launch.number(option) or 0) > 0


def _lacks_gc(launch: StatedLaunch) -> bool:
    has_many = launch.is_on_gpu and launch.config.parallelism.num_ranks > 1
    return has_many and not launch.says("--manual-gc")


def _checks_nan(launch: StatedLaunch) -> bool:
    # Where nothing overlaps, nothing is held up.
    has_overlap = launch.is_on_gpu and launch.config.parallelism.overlaps_grad_reduce
    return has_overlap and not launch.says("--no-check-for-nan-in-loss-and-grad")


def _async_save(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    option, worker = "--async-save", "--use-persistent-ckpt-worker"
    interval = launch.config.cadence.save_interval
    is_able = launch.text("--ckpt-format", "torch_dist") == "torch_dist" and launch.is_on_gpu
    if not (is_able and interval and launch.says("--save")) or launch.says(option):
        return None
    gain = pricing.apart(pricing.save, interval) if pricing is not None else None
    return Remedy(what=missing(option), put=((option,), (worker,)), gain=gain)


def _evaluations(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    cadence = launch.config.cadence
    if pricing is None or not cadence.eval_interval or not cadence.eval_iters:
        return None
    part, step_s = pricing.evaluation, pricing.own.step_time_s
    if part.time_s / (part.time_s + step_s * cadence.eval_interval) < _MOST_EVAL_FRAC:
        return None
    wanted = _round_up(part.time_s * (1 / _WANTED_EVAL_FRAC - 1) / step_s)
    return Remedy(
        what=f"--eval-interval {cadence.eval_interval} with --eval-iters {cadence.eval_iters}",
        put=(("--eval-interval", str(wanted)),),
        gain=pricing.apart(part, cadence.eval_interval, wanted),
    )


def _saves(launch: StatedLaunch, pricing: Pricing | None) -> Remedy | None:
    """Where less is lost, of each second of steps, to saves and to what is done again.

    A failure comes once in MTBI + MTTR (mean times between interrupts and to restart), and half an
    interval T is done again: save / T + T / (2 (MTBI + MTTR)), least at T = sqrt(2 (MTBI + MTTR)
    save), the first-order interval of Young (1974) and Daly (2006).
    """
    interval = launch.config.cadence.save_interval
    if pricing is None or not interval or not pricing.mtbf_s or launch.says("--async-save"):
        return None
    step_s, between_s = pricing.own.step_time_s, pricing.mtbf_s + pricing.restart_s
    wanted = max(1, round(math.sqrt(2 * between_s * pricing.save.time_s) / step_s))

    def lost_frac(steps: int, one_s: float) -> float:
        return one_s / (steps * step_s) + steps * step_s / (2 * between_s)

    gain = pricing.save.gain(
        lambda one_s: (1 + lost_frac(wanted, one_s)) / (1 + lost_frac(interval, one_s)) - 1
    )
    if gain.time_frac >= -_LEAST_SAVE_GAIN_FRAC:
        return None
    put = (("--save-interval", str(wanted)),)
    return Remedy(what=f"--save-interval {interval}", put=put, gain=gain)


def _round_up(number: float) -> int:
    """With two digits, so that it can be remembered.

    >>> _round_up(1234.5), _round_up(7.1)
    (1300, 8)
    """
    unit = 10 ** max(0, math.floor(math.log10(max(number, 1.0))) - 1)
    return math.ceil(number / unit) * unit


RULES = (
    Rule(
        name="timing-log-level",
        harm=Harm.DISTORTS,
        when="`--timing-log-level` above 0",
        why="Megatron's timers wait for the device where they start and where they stop",
        source="megatron/core/timers.py",
        unpriced=_HOST,
        drop="--timing-log-level",
        holds=lambda launch: _exceeds_zero(launch, "--timing-log-level"),
    ),
    Rule(
        name="log-interval",
        when="`--log-interval 1`",
        why="each report waits for the device and for all ranks",
        source=_TRAINING,
        unpriced=_HOST,
        put=(("--log-interval", _LOG_EVERY),),
        holds=lambda launch: launch.number("--log-interval") == 1 and launch.is_on_gpu,
    ),
    Rule(
        name="log-params-norm",
        when="`--log-params-norm`",
        why="the norm of all parameters is computed, reduced and read after each step",
        source=_TRAINING,
        unpriced=_HOST,
        drop="--log-params-norm",
    ),
    Rule(
        name="log-num-zeros-in-grad",
        when="`--log-num-zeros-in-grad`",
        why="zeros of all gradients are counted, reduced and read after each step",
        source="megatron/core/optimizer/clip_grads.py",
        unpriced=_HOST,
        drop="--log-num-zeros-in-grad",
    ),
    Rule(
        name="profile",
        harm=Harm.DISTORTS,
        when="`--profile`",
        why="steps under a profiler are slower; by default these are steps 10 and 11",
        source=_COMMON,
        unpriced=_PROFILED,
        drop="--profile",
    ),
    Rule(
        name="record-memory-history",
        harm=Harm.DISTORTS,
        when="`--record-memory-history`",
        why="every allocation is recorded with its stack",
        source=_COMMON,
        unpriced=_PROFILED,
        drop="--record-memory-history",
    ),
    Rule(
        name="check-for-nan",
        when="`--overlap-grad-reduce`, no `--no-check-for-nan-in-loss-and-grad`",
        why="the host reads a norm of each bucket before its reduction starts; without it a NaN "
        "shows only in the norm of all gradients",
        source="megatron/core/distributed/param_and_grad_buffer.py",
        unpriced=_HOST,
        put=(("--no-check-for-nan-in-loss-and-grad",),),
        holds=_checks_nan,
    ),
    Rule(
        name="deterministic-mode",
        when="`--deterministic-mode`",
        why="deterministic kernels and one NCCL algorithm are slower than the usual ones",
        source=_ARGUMENTS,
        unpriced="the usual kernels were not timed",
        drop="--deterministic-mode",
    ),
    Rule(
        name="empty-unused-memory",
        when="`--empty-unused-memory-level` above 0",
        why="each step gives its memory back and asks for it anew, which waits for the device",
        source=_CONFIG,
        unpriced=_HOST,
        drop="--empty-unused-memory-level",
        holds=lambda launch: _exceeds_zero(launch, "--empty-unused-memory-level"),
    ),
    Rule(
        name="num-workers",
        when="`--num-workers 0`",
        why="the training process itself reads the data, between steps",
        source="megatron/training/datasets/data_samplers.py",
        unpriced="how long data take is not in the model",
        drop="--num-workers",
        holds=lambda launch: launch.number("--num-workers") == 0 and not launch.says("--mock-data"),
    ),
    Rule(
        name="manual-gc",
        when="several ranks, no `--manual-gc`",
        why="Python collects garbage on each rank at another moment, and all others wait for it",
        source=_CONFIG,
        unpriced=_HOST,
        put=(("--manual-gc",), ("--manual-gc-interval", _GARBAGE_EVERY)),
        holds=_lacks_gc,
    ),
    Rule(
        name="ckpt-format",
        when="`--ckpt-format torch`",
        why="one rank of each group of replicas writes for all, while training stands still",
        source=_CHECKPOINTS,
        unpriced="how fast each way writes to this storage is not known",
        drop="--ckpt-format",
        holds=lambda launch: (
            launch.text("--ckpt-format") == "torch" and launch.says("--save") and launch.is_on_gpu
        ),
    ),
    Rule(
        name="async-save",
        when="`--save` with its interval, no `--async-save`",
        why="training stands still while a checkpoint is written",
        source=_CHECKPOINTS,
        find=_async_save,
    ),
    Rule(
        name="async-save-worker",
        harm=Harm.RISKS,
        when="`--async-save` without `--use-persistent-ckpt-worker`",
        why="Megatron switches `--async-save` off then",
        source=_ARGUMENTS,
        unpriced="a save beside training takes no time in the model",
        put=(("--use-persistent-ckpt-worker",),),
        what="--async-save without --use-persistent-ckpt-worker",
        holds=lambda launch: (
            launch.says("--async-save") and not launch.says("--use-persistent-ckpt-worker")
        ),
    ),
    Rule(
        name="eval-interval",
        when="evaluations that take more than 5 % of the run",
        why="training stands still while the model is evaluated",
        source=_TRAINING,
        find=_evaluations,
    ),
    Rule(
        name="save-interval",
        when="`--save-interval` far from Young's and Daly's, where the time between failures is "
        "given",
        why="saves, and work that is repeated after a failure, take more time than they need",
        source="Daly 2006: sqrt(2 (MTBI + MTTR) t_save)",
        find=_saves,
    ),
)
