"""Rules on options that waste or risk steps: precision, exposed transfers, and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..arguments.megatron_args import apply_options
from ..arguments.megatron_rules import is_fsdp
from ..workload.config import Attention, Precision, RunConfig
from ..workload.model_shape import Dispatcher, PositionEmbedding
from .rule import Find, Remedy, StatedLaunch, missing, rules_of

_LOADS = ("--load", "--finetune", "--pretrained-checkpoint", "--use-checkpoint-args")
"""Options that load a model, which fixes its sizes."""
_HEAD_MULTIPLE = 8
"""Flash and fused attention take heads whose size is a multiple of this."""

_Then = Callable[[StatedLaunch], RunConfig]


def _with(**fields: object) -> _Then:
    """Return a function that replaces fields of the configuration."""
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
    """Return True if gradients are reduced in Megatron's own buckets."""
    par = launch.config.parallelism
    # ``validate_args``: Muon supports neither overlap.
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
    # User buffers need ranks that can access each other's memory.
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


def _head_size(launch: StatedLaunch, _: object) -> Remedy | None:
    model, size = launch.config.model, launch.config.model.kv_channels
    is_plain = model.latent_attention is None and launch.has_engine and not launch.says(*_LOADS)
    if size % _HEAD_MULTIPLE == 0 or not is_plain:
        return None
    larger = -(-size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
    return Remedy(what=f"a head of {size}", put=(("--kv-channels", str(larger)),))


_HOLDS: Mapping[str, Callable[[StatedLaunch], bool]] = {
    "bf16-and-fp16": lambda one: one.says("--bf16"),
    "param-gather": lambda one: (
        not one.says("--use-distributed-optimizer") and not is_fsdp(one.config)
    ),
    "cross-entropy-fusion-impl": lambda one: one.text("--cross-entropy-fusion-impl") == "te",
    "overlap-grad-reduce": lambda one: (
        _has_replicas(one) and not one.config.parallelism.overlaps_grad_reduce
    ),
    "tp-comm-overlap": _waits_in_tp,
    "overlap-p2p": lambda one: (
        one.config.parallelism.vp > 1 and not one.config.parallelism.overlaps_p2p
    ),
    "moe-dispatcher": _sends_to_all,
    "masked-softmax-fusion": _has_unfused_softmax,
    # FSDP2 needs it; without Transformer Engine it is an extension of Apex.
    "gradient-accumulation-fusion": lambda one: one.has_engine and not is_fsdp(one.config),
    "cross-entropy-loss-fusion": _has_open_loss,
    "attention-backend": _has_unfused_attention,
    "transformer-impl": lambda one: one.is_on_gpu and one.text("--transformer-impl") == "local",
    "rope-fusion": _has_rope,
    "bias-swiglu-fusion": lambda one: one.is_on_gpu and one.config.model.is_gated,
    "bias-gelu-fusion": lambda one: (
        one.is_on_gpu and one.config.model.has_bias and not one.config.model.is_gated
    ),
    "bias-dropout-fusion": lambda one: one.is_on_gpu and one.config.hidden_dropout > 0,
    "moe-grouped-gemm": _has_single_experts,
    "moe-permute-fusion": lambda one: (
        one.config.model.experts is not None
        and one.has_engine
        and not one.says("--moe-permute-fusion")
    ),
}
_THEN: Mapping[str, _Then] = {
    "overlap-grad-reduce": _with_parallelism(overlaps_grad_reduce=True),
    "tp-comm-overlap": _with_parallelism(overlaps_tp=True),
    "overlap-p2p": _with_parallelism(overlaps_p2p=True),
    "moe-dispatcher": _with_experts(dispatcher=Dispatcher.ALL_TO_ALL),
    "masked-softmax-fusion": _with(is_softmax_fused=True),
    "gradient-accumulation-fusion": _with(fuses_gradient_accumulation=True),
    "cross-entropy-loss-fusion": _with(is_loss_fused=True),
    "attention-backend": _with(attention=Attention.AUTO),
    "moe-grouped-gemm": _with_experts(is_grouped=True),
}
_FIND: Mapping[str, Find] = {
    "precision": _wide,
    "bf16-before-ampere": _emulated,
    "overlap-param-gather": _param_gather,
    "head-size": _head_size,
}
RULES = rules_of("options", holds=_HOLDS, then=_THEN, find=_FIND)
