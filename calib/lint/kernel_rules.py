"""Kernels that are slower than those that the host has for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..arguments.megatron_rules import is_fsdp
from ..workload.config import Attention, PositionEmbedding, Precision
from .rule import Harm, Remedy, StatedRule, missing, with_experts
from .stated_launch import StatedLaunch

_ARGUMENTS = "megatron/training/arguments.py"
_MOE = "megatron/core/transformer/moe/README.md"
_UNTIMED = "the other kernel was not timed, and no law gives its time"


def _without(option: str, is_used: Callable[[StatedLaunch], bool]) -> StatedRule:
    """A switch that puts one fused kernel out of use, where the launch would use it."""

    def find(launch: StatedLaunch) -> Iterator[Remedy]:
        if launch.says(option) and launch.is_on_gpu and is_used(launch):
            yield Remedy(what=option, drop=(option,))

    what = option.removeprefix("--no-").removesuffix("-fusion").replace("-", " ")
    return StatedRule(
        name=option.removeprefix("--no-"),
        harm=Harm.WASTES,
        when=f"`{option}` where {what} could be fused",
        why=f"{what} runs as several kernels that each read and write the activations",
        source=_ARGUMENTS,
        unpriced=_UNTIMED,
        find=find,
    )


def _softmax(launch: StatedLaunch) -> Iterator[Remedy]:
    config, option = launch.config, "--no-masked-softmax-fusion"
    is_used = launch.is_on_gpu and config.precision is not Precision.FP32
    if launch.says(option) and is_used and not config.is_attention_fused:
        yield Remedy(what=option, drop=(option,), layout=replace(config, is_softmax_fused=True))


def _gradients(launch: StatedLaunch) -> Iterator[Remedy]:
    config, option = launch.config, "--no-gradient-accumulation-fusion"
    # FSDP2 needs it; without Transformer Engine it is an extension of Apex.
    if launch.says(option) and launch.has_engine and not is_fsdp(config):
        layout = replace(config, fuses_gradient_accumulation=True)
        yield Remedy(what=option, drop=(option,), layout=layout)


def _loss(launch: StatedLaunch) -> Iterator[Remedy]:
    config, option = launch.config, "--cross-entropy-loss-fusion"
    is_open = launch.is_on_gpu and not config.is_loss_fused
    if is_open and not launch.says("--deterministic-mode"):
        yield Remedy(
            what=missing(option), put=((option,),), layout=replace(config, is_loss_fused=True)
        )


def _attention(launch: StatedLaunch) -> Iterator[Remedy]:
    config, option = launch.config, "--attention-backend"
    is_chosen = launch.text(option) in ("unfused", "local")
    if is_chosen and launch.has_engine and config.attention is Attention.UNFUSED:
        layout = replace(config, attention=Attention.AUTO)
        yield Remedy(what=launch.written(option), drop=(option,), layout=layout)


def _implementation(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--transformer-impl"
    if launch.text(option) == "local" and launch.is_on_gpu:
        yield Remedy(what=launch.written(option), drop=(option,))


def _grouped(launch: StatedLaunch) -> Iterator[Remedy]:
    config, experts = launch.config, launch.config.model.experts
    if experts is None or experts.is_grouped or not launch.has_engine:
        return
    is_many = experts.num_experts > config.parallelism.ep
    if is_many and config.precision is not Precision.FP32:
        option = "--moe-grouped-gemm"
        layout = with_experts(launch, is_grouped=True)
        yield Remedy(what=missing(option), put=((option,),), layout=layout)


def _permuted(launch: StatedLaunch) -> Iterator[Remedy]:
    option = "--moe-permute-fusion"
    has_some = launch.config.model.experts is not None and launch.has_engine
    if has_some and not launch.says(option):
        yield Remedy(what=missing(option), put=((option,),))


def _has_rope(launch: StatedLaunch) -> bool:
    model = launch.config.model
    has_positions = model.position_embedding is PositionEmbedding.ROPE
    is_plain = model.latent_attention is None and not launch.says("--rotary-interleaved")
    return has_positions and is_plain and launch.has_engine


def _has_bias(launch: StatedLaunch) -> bool:
    return launch.config.model.has_bias and not launch.config.model.is_gated


RULES = (
    StatedRule(
        name="masked-softmax-fusion",
        harm=Harm.WASTES,
        when="`--no-masked-softmax-fusion` with unfused attention",
        why="scale, mask and softmax each read and write a matrix of sequence x sequence",
        source=_ARGUMENTS,
        find=_softmax,
    ),
    StatedRule(
        name="gradient-accumulation-fusion",
        harm=Harm.WASTES,
        when="`--no-gradient-accumulation-fusion` with Transformer Engine",
        why="gradients of weights are written once more, to be added",
        source=_ARGUMENTS,
        find=_gradients,
    ),
    StatedRule(
        name="cross-entropy-loss-fusion",
        harm=Harm.WASTES,
        when="no `--cross-entropy-loss-fusion`",
        why="the loss reads and writes the logits in several kernels",
        source=_MOE,
        find=_loss,
    ),
    StatedRule(
        name="attention-backend",
        harm=Harm.WASTES,
        when="`--attention-backend unfused` or `local`",
        why="attention writes a matrix of sequence x sequence, which flash attention never does",
        source="megatron/core/transformer/transformer_config.py",
        find=_attention,
    ),
    StatedRule(
        name="transformer-impl",
        harm=Harm.WASTES,
        when="`--transformer-impl local` on GPUs",
        why="layers are PyTorch's, without the fused kernels of Transformer Engine",
        source=_ARGUMENTS,
        unpriced=_UNTIMED,
        find=_implementation,
    ),
    _without("--no-rope-fusion", _has_rope),
    _without("--no-bias-swiglu-fusion", lambda launch: launch.config.model.is_gated),
    _without("--no-bias-gelu-fusion", _has_bias),
    _without("--no-bias-dropout-fusion", lambda launch: launch.config.hidden_dropout > 0),
    StatedRule(
        name="moe-grouped-gemm",
        harm=Harm.WASTES,
        when="several experts on a rank, no `--moe-grouped-gemm`",
        why="every expert has products of its own, each too small for the GPU",
        source=_MOE,
        find=_grouped,
    ),
    StatedRule(
        name="moe-permute-fusion",
        harm=Harm.WASTES,
        when="experts, no `--moe-permute-fusion`",
        why="tokens are sorted for their experts by several kernels",
        source=_MOE,
        unpriced=_UNTIMED,
        find=_permuted,
    ),
)
