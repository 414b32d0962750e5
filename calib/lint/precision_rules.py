"""Numbers that a device is slow with, and options that Megatron refuses together."""

from __future__ import annotations

from collections.abc import Iterator

from ..arguments.megatron_args import apply_options
from ..arguments.megatron_rules import is_fsdp
from ..workload.config import Precision
from .rule import Harm, Remedy, StatedRule, missing
from .stated_launch import StatedLaunch

_ARGUMENTS = "megatron/training/arguments.py"
_REFUSED = "the run ends before its first step"


def _wide(launch: StatedLaunch) -> Iterator[Remedy]:
    config = launch.config
    if launch.is_on_gpu and config.precision is Precision.FP32:
        narrow = Precision.FP16 if config.is_before_ampere else Precision.BF16
        option = f"--{narrow.value}"
        layout = apply_options(config, [option])  # with the width of gradients that follows
        yield Remedy(what=missing(option), put=((option,),), layout=layout)


def _emulated(launch: StatedLaunch) -> Iterator[Remedy]:
    config = launch.config
    if config.is_without_tensor_cores:
        what = f"--bf16 on {config.device}, which has no tensor cores for it"
        layout = apply_options(config, ["--fp16"])
        yield Remedy(what=what, put=(("--fp16",),), drop=("--bf16",), layout=layout)


def _both(launch: StatedLaunch) -> Iterator[Remedy]:
    if launch.says("--bf16") and launch.says("--fp16"):
        yield Remedy(what="--bf16 --fp16", drop=("--fp16",))


def _gathered(launch: StatedLaunch) -> Iterator[Remedy]:
    option, needed = "--overlap-param-gather", "--use-distributed-optimizer"
    has_shards = launch.says(needed) or is_fsdp(launch.config)
    if launch.says(option) and not has_shards:
        yield Remedy(what=option, drop=(option,))


def _fused_loss(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--cross-entropy-fusion-impl"
    if launch.text(option) == "te":
        yield Remedy(what=launch.written(option), drop=(option,))


RULES = (
    StatedRule(
        name="precision",
        harm=Harm.WASTES,
        when="neither `--bf16` nor `--fp16` on GPUs",
        why="products in fp32 run at a sixteenth to a half of the rate, and activations take twice "
        "the memory",
        source=_ARGUMENTS,
        find=_wide,
    ),
    StatedRule(
        name="bf16-before-ampere",
        harm=Harm.WASTES,
        when="`--bf16` on a device before Ampere (V100, T4)",
        why="tensor cores there take fp16 alone, so that products in bf16 run at the rate of fp32 "
        "at best",
        source="NVIDIA A100 Tensor Core GPU Architecture; TransformerEngine: sm80",
        find=_emulated,
    ),
    StatedRule(
        name="bf16-and-fp16",
        harm=Harm.RISKS,
        when="`--bf16` and `--fp16`",
        why="Megatron takes one of them alone, and ends at both",
        source=_ARGUMENTS,
        unpriced=_REFUSED,
        find=_both,
    ),
    StatedRule(
        name="param-gather",
        harm=Harm.RISKS,
        when="`--overlap-param-gather` without `--use-distributed-optimizer`",
        why="without shards there is nothing to gather, and Megatron ends",
        source=_ARGUMENTS,
        unpriced=_REFUSED,
        find=_gathered,
    ),
    StatedRule(
        name="cross-entropy-fusion-impl",
        harm=Harm.RISKS,
        when="`--cross-entropy-fusion-impl te`",
        why="core 0.19 and later refuse Transformer Engine's loss",
        source="megatron/training/arguments.py of core_v0.19.0",
        unpriced=_REFUSED,
        find=_fused_loss,
    ),
)
