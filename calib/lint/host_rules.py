"""What a training loop does beside its steps: timers, logs, profilers, garbage, data, saves."""

from __future__ import annotations

from collections.abc import Iterator

from .rule import Find, Harm, Part, Remedy, StatedRule, missing
from .stated_launch import StatedLaunch

_TRAINING = "megatron/training/training.py"
_ARGUMENTS = "megatron/training/arguments.py"
_CONFIG = "megatron/training/training_config.py"
_HOST = "the cost of a waiting host depends on how far it runs ahead, which is not in the model"
_PROFILED = "it slows a few steps, or each one by the cost of a profiler, which is not in the model"
_LOG_EVERY = 10
"""Reports that are so far apart let the host run ahead between them."""
_GARBAGE_EVERY = 100
"""What Megatron's own guide for experts advises (``megatron/core/transformer/moe/README.md``)."""


def _dropped(option: str, *, more_than: int | None = None) -> Find:
    """Where an option is there, or a number ``more_than`` this one with it."""

    def find(launch: StatedLaunch) -> Iterator[Remedy]:
        number = launch.number(option)
        is_used = more_than is None or (number is not None and number > more_than)
        if launch.says(option) and is_used and launch.is_on_gpu:
            yield Remedy(what=launch.written(option), drop=(option,))

    return find


def _log_interval(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--log-interval"
    if launch.number(option) == 1 and launch.is_on_gpu:
        yield Remedy(what=launch.written(option), put=((option, str(_LOG_EVERY)),))


def _nan_check(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--no-check-for-nan-in-loss-and-grad"
    # Where nothing overlaps, nothing is held up.
    has_overlap = launch.config.parallelism.overlaps_grad_reduce
    if launch.is_on_gpu and has_overlap and not launch.says(option):
        yield Remedy(what=missing(option), put=((option,),))


def _workers(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--num-workers"
    if launch.number(option) == 0 and not launch.says("--mock-data"):
        yield Remedy(what=launch.written(option), drop=(option,))


def _garbage(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--manual-gc"
    if launch.is_on_gpu and launch.config.parallelism.num_ranks > 1 and not launch.says(option):
        every = ("--manual-gc-interval", str(_GARBAGE_EVERY))
        yield Remedy(what=missing(option), put=((option,), every))


def _format(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--ckpt-format"
    if launch.text(option) == "torch" and launch.says("--save") and launch.is_on_gpu:
        yield Remedy(what=launch.written(option), drop=(option,))


def _async_save(launch: StatedLaunch) -> Iterator[Remedy]:
    option, worker = "--async-save", "--use-persistent-ckpt-worker"
    is_able = launch.text("--ckpt-format", "torch_dist") == "torch_dist" and launch.is_on_gpu
    if is_able and launch.says("--save") and not launch.says(option):
        put = ((option,), (worker,))
        yield Remedy(what=missing(option), put=put, spares=Part.SAVES)


def _async_worker(launch: StatedLaunch) -> Iterator[Remedy]:
    option, worker = "--async-save", "--use-persistent-ckpt-worker"
    if launch.says(option) and not launch.says(worker):
        yield Remedy(what=f"{option} without {worker}", put=((worker,),))


RULES = (
    StatedRule(
        name="timing-log-level",
        harm=Harm.DISTORTS,
        when="`--timing-log-level` above 0",
        why="Megatron's timers wait for the device where they start and where they stop",
        source="megatron/core/timers.py",
        unpriced=_HOST,
        find=_dropped("--timing-log-level", more_than=0),
    ),
    StatedRule(
        name="log-interval",
        harm=Harm.WASTES,
        when="`--log-interval 1`",
        why="each report waits for the device and for all ranks",
        source=_TRAINING,
        unpriced=_HOST,
        find=_log_interval,
    ),
    StatedRule(
        name="log-params-norm",
        harm=Harm.WASTES,
        when="`--log-params-norm`",
        why="the norm of all parameters is computed, reduced and read after each step",
        source=_TRAINING,
        unpriced=_HOST,
        find=_dropped("--log-params-norm"),
    ),
    StatedRule(
        name="log-num-zeros-in-grad",
        harm=Harm.WASTES,
        when="`--log-num-zeros-in-grad`",
        why="zeros of all gradients are counted, reduced and read after each step",
        source="megatron/core/optimizer/clip_grads.py",
        unpriced=_HOST,
        find=_dropped("--log-num-zeros-in-grad"),
    ),
    StatedRule(
        name="profile",
        harm=Harm.DISTORTS,
        when="`--profile`",
        why="steps under a profiler are slower; by default these are steps 10 and 11",
        source="megatron/training/common_config.py",
        unpriced=_PROFILED,
        find=_dropped("--profile"),
    ),
    StatedRule(
        name="record-memory-history",
        harm=Harm.DISTORTS,
        when="`--record-memory-history`",
        why="every allocation is recorded with its stack",
        source="megatron/training/common_config.py",
        unpriced=_PROFILED,
        find=_dropped("--record-memory-history"),
    ),
    StatedRule(
        name="check-for-nan",
        harm=Harm.WASTES,
        when="`--overlap-grad-reduce`, no `--no-check-for-nan-in-loss-and-grad`",
        why=(
            "the host reads a norm of each bucket before its reduction starts; without it a NaN "
            "shows only in the norm of all gradients"
        ),
        source="megatron/core/distributed/param_and_grad_buffer.py",
        unpriced=_HOST,
        find=_nan_check,
    ),
    StatedRule(
        name="deterministic-mode",
        harm=Harm.WASTES,
        when="`--deterministic-mode`",
        why="deterministic kernels and one NCCL algorithm are slower than the usual ones",
        source=_ARGUMENTS,
        unpriced="the usual kernels were not timed",
        find=_dropped("--deterministic-mode"),
    ),
    StatedRule(
        name="empty-unused-memory",
        harm=Harm.WASTES,
        when="`--empty-unused-memory-level` above 0",
        why="each step gives its memory back and asks for it anew, which waits for the device",
        source=_CONFIG,
        unpriced=_HOST,
        find=_dropped("--empty-unused-memory-level", more_than=0),
    ),
    StatedRule(
        name="num-workers",
        harm=Harm.WASTES,
        when="`--num-workers 0`",
        why="the training process itself reads the data, between steps",
        source="megatron/training/datasets/data_samplers.py",
        unpriced="how long data take is not in the model",
        find=_workers,
    ),
    StatedRule(
        name="manual-gc",
        harm=Harm.WASTES,
        when="several ranks, no `--manual-gc`",
        why="Python collects garbage on each rank at another moment, and all others wait for it",
        source=_CONFIG,
        unpriced=_HOST,
        find=_garbage,
    ),
    StatedRule(
        name="ckpt-format",
        harm=Harm.WASTES,
        when="`--ckpt-format torch`",
        why="one rank of each group of replicas writes for all, while training stands still",
        source="megatron/training/checkpointing.py",
        unpriced="how fast each way writes to this storage is not known",
        find=_format,
    ),
    StatedRule(
        name="async-save",
        harm=Harm.WASTES,
        when="`--save`, no `--async-save`",
        why="training stands still while a checkpoint is written",
        source="megatron/training/checkpointing.py",
        find=_async_save,
    ),
    StatedRule(
        name="async-save-worker",
        harm=Harm.RISKS,
        when="`--async-save` without `--use-persistent-ckpt-worker`",
        why="Megatron switches `--async-save` off then",
        source=_ARGUMENTS,
        unpriced="a save beside training takes no time in the model",
        find=_async_worker,
    ),
)
