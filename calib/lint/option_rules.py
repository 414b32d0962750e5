"""Options that waste or risk steps: precision, transfers that nothing hides, and kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..arguments.megatron_args import apply_options
from ..arguments.megatron_rules import is_fsdp
from ..workload.config import (
    Attention,
    Dispatcher,
    PositionEmbedding,
    Precision,
    RunConfig,
)
from .rule import Harm, Remedy, Rule, StatedLaunch, missing

_ARGUMENTS = "megatron/training/arguments.py"
_GUIDE = "docs/user-guide/parallelism-guide.md"
_MOE = "megatron/core/transformer/moe/README.md"
_TRANSFORMER = "megatron/core/transformer/transformer_config.py"
_REFUSED = "the run ends before its first step"
_UNTIMED = "the other kernel was not timed, and no law gives its time"
_LOADS = ("--load", "--finetune", "--pretrained-checkpoint", "--use-checkpoint-args")
"""Of a model that is there already, sizes are what they are."""
_HEAD_MULTIPLE = 8
"""Of the size of a head: what flash and fused attention take."""

_Then = Callable[[StatedLaunch], RunConfig]


def _with(**fields: object) -> _Then:
    """What runs with other fields of the configuration."""
    return lambda launch: replace(launch.config, **fields)  # type: ignore[arg-type]


def _with_parallelism(**fields: bool) -> _Then:
    def then(launch: StatedLaunch) -> RunConfig:
        config = launch.config
        return replace(config, parallelism=replace(config.parallelism, **fields))

    return then


def _with_experts(**fields: bool | Dispatcher) -> _Then:
    def then(launch: StatedLaunch) -> RunConfig:
        model = launch.config.model
        experts = model.experts and replace(model.experts, **fields)  # type: ignore[arg-type]
        return replace(launch.config, model=replace(model, experts=experts))

    return then


def _wide(launch: StatedLaunch, _: object) -> Remedy | None:
    config = launch.config
    if not launch.is_on_gpu or config.precision is not Precision.FP32:
        return None
    option = f"--{(Precision.FP16 if config.is_before_ampere else Precision.BF16).value}"
    layout = apply_options(config, [option])  # with the width of gradients that follows
    return Remedy(what=missing(option), put=((option,),), layout=layout)


def _emulated(launch: StatedLaunch, _: object) -> Remedy | None:
    config = launch.config
    if not config.is_without_tensor_cores:
        return None
    what = f"--bf16 on {config.device}, which has no tensor cores for it"
    layout = apply_options(config, ["--fp16"])
    return Remedy(what=what, put=(("--fp16",),), drop=("--bf16",), layout=layout)


def _has_replicas(launch: StatedLaunch) -> bool:
    """Whether gradients are reduced as Megatron's own buckets do."""
    par = launch.config.parallelism
    # ``validate_args``: Muon takes neither of the overlaps.
    is_muon = "muon" in launch.text("--optimizer")
    return par.dp * par.cp > 1 and not is_fsdp(launch.config) and not is_muon


def _param_gather(launch: StatedLaunch, _: object) -> Remedy | None:
    par = launch.config.parallelism
    is_alone = not par.is_optimizer_distributed or par.overlaps_param_gather
    if is_alone or not _has_replicas(launch):
        return None
    option, both = "--overlap-param-gather", {"overlaps_grad_reduce": True}
    also = () if par.overlaps_grad_reduce else (("--overlap-grad-reduce",),)
    layout = _with_parallelism(**both, overlaps_param_gather=True)(launch)
    return Remedy(what=missing(option), put=((option,), *also), layout=layout)


def _waits_in_tp(launch: StatedLaunch) -> bool:
    par = launch.config.parallelism
    is_open = par.tp > 1 and par.is_sequence_parallel and not par.overlaps_tp
    # User buffers are those of ranks that see each other's memory.
    return is_open and launch.has_engine and par.tp <= (par.ranks_per_node or par.tp)


def _sends_to_all(launch: StatedLaunch) -> bool:
    experts = launch.config.model.experts
    if experts is None or experts.dispatcher is not Dispatcher.ALL_GATHER:
        return False
    return launch.config.parallelism.ep > experts.top_k


def _has_unfused_softmax(launch: StatedLaunch) -> bool:
    config = launch.config
    is_half = config.precision is not Precision.FP32
    return launch.is_on_gpu and is_half and not config.is_attention_fused


def _has_open_loss(launch: StatedLaunch) -> bool:
    is_open = launch.is_on_gpu and not launch.config.is_loss_fused
    return is_open and not launch.says("--deterministic-mode")


def _has_unfused_attention(launch: StatedLaunch) -> bool:
    is_chosen = launch.text("--attention-backend") in ("unfused", "local")
    return is_chosen and launch.has_engine and launch.config.attention is Attention.UNFUSED


def _has_single_experts(launch: StatedLaunch) -> bool:
    config, experts = launch.config, launch.config.model.experts
    if experts is None or experts.is_grouped or not launch.has_engine:
        return False
    return experts.num_experts > config.parallelism.ep and config.precision is not Precision.FP32


def _has_rope(launch: StatedLaunch) -> bool:
    model = launch.config.model
    has_positions = model.position_embedding is PositionEmbedding.ROPE
    is_plain = model.latent_attention is None and not launch.says("--rotary-interleaved")
    return has_positions and is_plain and launch.has_engine


def _unfused(option: str, is_used: Callable[[StatedLaunch], bool]) -> Rule:
    """A switch that puts one fused kernel out of use, where the launch would use it."""
    what = option.removeprefix("--no-").removesuffix("-fusion").replace("-", " ")
    return Rule(
        name=option.removeprefix("--no-"),
        when=f"`{option}` where {what} could be fused",
        why=f"{what} runs as several kernels that each read and write the activations",
        source=_ARGUMENTS,
        unpriced=_UNTIMED,
        drop=option,
        holds=lambda launch: launch.is_on_gpu and is_used(launch),
    )


def _head_size(launch: StatedLaunch, _: object) -> Remedy | None:
    model, size = launch.config.model, launch.config.model.kv_channels
    is_plain = model.latent_attention is None and launch.has_engine and not launch.says(*_LOADS)
    if size % _HEAD_MULTIPLE == 0 or not is_plain:
        return None
    larger = -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    return Remedy(what=f"a head of {size}", put=(("--kv-channels", str(larger)),))


RULES = (
    Rule(
        name="precision",
        when="neither `--bf16` nor `--fp16` on GPUs",
        why="products in fp32 run at a sixteenth to a half of the rate, and activations take twice "
        "the memory",
        source=_ARGUMENTS,
        find=_wide,
    ),
    Rule(
        name="bf16-before-ampere",
        when="`--bf16` on a device before Ampere (V100, T4)",
        why="tensor cores there take fp16 alone, so that products in bf16 run at the rate of fp32 "
        "at best",
        source="NVIDIA A100 Tensor Core GPU Architecture; TransformerEngine: sm80",
        find=_emulated,
    ),
    Rule(
        name="bf16-and-fp16",
        harm=Harm.RISKS,
        when="`--bf16` and `--fp16`",
        why="Megatron takes one of them alone, and ends at both",
        source=_ARGUMENTS,
        unpriced=_REFUSED,
        drop="--fp16",
        what="--bf16 --fp16",
        holds=lambda launch: launch.says("--bf16"),
    ),
    Rule(
        name="param-gather",
        harm=Harm.RISKS,
        when="`--overlap-param-gather` without `--use-distributed-optimizer`",
        why="without shards there is nothing to gather, and Megatron ends",
        source=_ARGUMENTS,
        unpriced=_REFUSED,
        drop="--overlap-param-gather",
        holds=lambda one: not one.says("--use-distributed-optimizer") and not is_fsdp(one.config),
    ),
    Rule(
        name="cross-entropy-fusion-impl",
        harm=Harm.RISKS,
        when="`--cross-entropy-fusion-impl te`",
        why="core 0.19 and later refuse Transformer Engine's loss",
        source=f"{_ARGUMENTS} of core_v0.19.0",
        unpriced=_REFUSED,
        drop="--cross-entropy-fusion-impl",
        holds=lambda launch: launch.text("--cross-entropy-fusion-impl") == "te",
    ),
    Rule(
        name="overlap-grad-reduce",
        when="more than one replica, no `--overlap-grad-reduce`",
        why="gradients are reduced after the backward pass, with nothing beside",
        source=_GUIDE,
        put=(("--overlap-grad-reduce",),),
        holds=lambda one: _has_replicas(one) and not one.config.parallelism.overlaps_grad_reduce,
        then=_with_parallelism(overlaps_grad_reduce=True),
    ),
    Rule(
        name="overlap-param-gather",
        when="a distributed optimizer, no `--overlap-param-gather`",
        why="parameters are gathered before the forward pass, with nothing beside",
        source=_GUIDE,
        find=_param_gather,
    ),
    Rule(
        name="tp-comm-overlap",
        when="sequence parallelism within a node, no `--tp-comm-overlap`",
        why="gathers and scatters of tp run before and after products, not inside them",
        source=_GUIDE,
        put=(("--tp-comm-overlap",),),
        holds=_waits_in_tp,
        then=_with_parallelism(overlaps_tp=True),
    ),
    Rule(
        name="overlap-p2p",
        when="virtual stages and `--no-overlap-p2p-communication`",
        why="stages wait for each message instead of computing meanwhile",
        source="megatron/core/pipeline_parallel/schedules.py",
        drop="--no-overlap-p2p-communication",
        holds=lambda one: one.config.parallelism.vp > 1 and not one.config.parallelism.overlaps_p2p,
        then=_with_parallelism(overlaps_p2p=True),
    ),
    Rule(
        name="moe-dispatcher",
        when="the dispatcher `allgather` with more ranks of experts than experts of a token",
        why="every token goes to all ranks of the experts",
        source=_MOE,
        put=(("--moe-token-dispatcher-type", "alltoall"),),
        holds=_sends_to_all,
        then=_with_experts(dispatcher=Dispatcher.ALL_TO_ALL),
    ),
    Rule(
        name="masked-softmax-fusion",
        when="`--no-masked-softmax-fusion` with unfused attention",
        why="scale, mask and softmax each read and write a matrix of sequence x sequence",
        source=_ARGUMENTS,
        drop="--no-masked-softmax-fusion",
        holds=_has_unfused_softmax,
        then=_with(is_softmax_fused=True),
    ),
    Rule(
        name="gradient-accumulation-fusion",
        when="`--no-gradient-accumulation-fusion` with Transformer Engine",
        why="gradients of weights are written once more, to be added",
        source=_ARGUMENTS,
        drop="--no-gradient-accumulation-fusion",
        # FSDP2 needs it; without Transformer Engine it is an extension of Apex.
        holds=lambda launch: launch.has_engine and not is_fsdp(launch.config),
        then=_with(fuses_gradient_accumulation=True),
    ),
    Rule(
        name="cross-entropy-loss-fusion",
        when="no `--cross-entropy-loss-fusion`",
        why="the loss reads and writes the logits in several kernels",
        source=_MOE,
        put=(("--cross-entropy-loss-fusion",),),
        holds=_has_open_loss,
        then=_with(is_loss_fused=True),
    ),
    Rule(
        name="attention-backend",
        when="`--attention-backend unfused` or `local`",
        why="attention writes a matrix of sequence x sequence, which flash attention never does",
        source=_TRANSFORMER,
        drop="--attention-backend",
        holds=_has_unfused_attention,
        then=_with(attention=Attention.AUTO),
    ),
    Rule(
        name="transformer-impl",
        when="`--transformer-impl local` on GPUs",
        why="layers are PyTorch's, without the fused kernels of Transformer Engine",
        source=_ARGUMENTS,
        unpriced=_UNTIMED,
        drop="--transformer-impl",
        holds=lambda one: one.text("--transformer-impl") == "local" and one.is_on_gpu,
    ),
    _unfused("--no-rope-fusion", _has_rope),
    _unfused("--no-bias-swiglu-fusion", lambda one: one.config.model.is_gated),
    _unfused(
        "--no-bias-gelu-fusion",
        lambda one: one.config.model.has_bias and not one.config.model.is_gated,
    ),
    _unfused("--no-bias-dropout-fusion", lambda one: one.config.hidden_dropout > 0),
    Rule(
        name="moe-grouped-gemm",
        when="several experts on a rank, no `--moe-grouped-gemm`",
        why="every expert has products of its own, each too small for the GPU",
        source=_MOE,
        put=(("--moe-grouped-gemm",),),
        holds=_has_single_experts,
        then=_with_experts(is_grouped=True),
    ),
    Rule(
        name="moe-permute-fusion",
        when="experts, no `--moe-permute-fusion`",
        why="tokens are sorted for their experts by several kernels",
        source=_MOE,
        unpriced=_UNTIMED,
        put=(("--moe-permute-fusion",),),
        holds=lambda launch: (
            launch.config.model.experts is not None
            and launch.has_engine
            and not launch.says("--moe-permute-fusion")
        ),
    ),
    Rule(
        name="head-size",
        harm=Harm.RISKS,
        when="a head that is not a multiple of 8, trained from the start",
        why="flash and fused attention take multiples of 8; any other runs unfused, or not at all",
        source=_TRANSFORMER,
        unpriced="the model takes attention to be fused",
        find=_head_size,
    ),
)
