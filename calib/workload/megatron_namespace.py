"""A Megatron args namespace as ``RunConfig``, with what the model leaves out named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .config import (
    Batch,
    Cadence,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unmodelled:
    """A setting that the model leaves out, and when it is in use."""

    name: str
    is_used: Callable[[Any], bool]


def _above(limit: float) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and value > limit


def _is_other(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


_UNMODELLED = tuple(
    _Unmodelled(name=name, is_used=test)
    for test, names in (
        (
            _above(1),
            (
                "context_parallel_size",
                "expert_model_parallel_size",
                "num_distributed_optimizer_instances",
                "tensor_parallel_num_weight_shards",
                "virtual_pipeline_model_parallel_size",
            ),
        ),
        (_above(0), ("num_experts", "mtp_num_layers", "cpu_offloading_num_layers")),
        (
            bool,
            (
                "multi_latent_attention",
                "use_megatron_fsdp",
                "use_torch_fsdp2",
                "tp_comm_overlap",
                "qk_layernorm",
                "delay_wgrad_compute",
                "defer_embedding_wgrad_compute",
                "optimizer_cpu_offload",
                "overlap_param_gather_with_optimizer_step",
                "overlap_p2p_comm_warmup_flush",
                "distribute_saved_activations",
                "fine_grained_activation_offloading",
                "cross_entropy_loss_fusion",
                "grad_reduce_in_bf16",
                "use_tp_pp_dp_mapping",
                "account_for_embedding_in_pipeline_split",
                "account_for_loss_in_pipeline_split",
                "ddp_pad_buckets_for_high_nccl_busbw",
                "external_cuda_graph",
                "enable_cuda_graph",
            ),
        ),
        (
            _is_other("none", ""),
            (
                "fp8",
                "fp8_format",
                "fp4",
                "fp4_format",
                "window_size",
                "rampup_batch_size",
                "step_batch_size_schedule",
                "hybrid_layer_pattern",
                "hybrid_override_pattern",
                "decoder_first_pipeline_num_layers",
                "decoder_last_pipeline_num_layers",
                "pipeline_model_parallel_layout",
                "ddp_bucket_size",
                "ddp_num_buckets",
                "cuda_graph_impl",
                "heterogeneous_layers_config_path",
            ),
        ),
        (_is_other([], ["core_attn"]), ("recompute_modules",)),
    )
    for name in names
)


def from_namespace(args: Any) -> RunConfig:
    """The config of a run, from Megatron's parsed arguments (any object with their names).

    What the model leaves out (experts, context parallelism, fp8, ...) is listed by name in
    ``unmodelled``.  Raises ``ConfigError`` where a size that nothing can replace is missing.
    """
    model = _model_from(args)
    parallelism = _parallelism_from(args, model)
    micro = int(_required(args, "micro_batch_size"))
    granularity = getattr(args, "recompute_granularity", None)
    recompute = Recompute(granularity) if granularity else Recompute.NONE
    is_block = getattr(args, "recompute_method", None) == "block"
    num_layers = _number(args, "recompute_num_layers") if is_block else 0
    return RunConfig(
        model=model,
        parallelism=parallelism,
        precision=_precision_from(args),
        recompute=recompute,
        recompute_num_layers=num_layers if recompute is Recompute.FULL else 0,
        batch=Batch(
            micro_batch_size=micro,
            global_batch_size=_number(args, "global_batch_size") or micro * parallelism.dp,
        ),
        cadence=Cadence(**{name: _number(args, name) for name in Cadence.__dataclass_fields__}),
        unmodelled=tuple(u.name for u in _UNMODELLED if u.is_used(getattr(args, u.name, None))),
    )


def _model_from(args: Any) -> ModelShape:
    hidden, heads = int(_required(args, "hidden_size")), int(_required(args, "num_attention_heads"))
    is_grouped = bool(getattr(args, "group_query_attention", False))
    groups = _number(args, "num_query_groups") if is_grouped else heads
    vocab = _number(args, "padded_vocab_size") or int(_required(args, "vocab_size"))
    position = str(getattr(args, "position_embedding_type", None) or "learned_absolute")
    known = [p.value for p in PositionEmbedding]
    return ModelShape(
        num_layers=int(_required(args, "num_layers")),
        hidden_size=hidden,
        ffn_hidden_size=_number(args, "ffn_hidden_size") or 4 * hidden,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        kv_channels=_number(args, "kv_channels") or hidden // heads,
        seq_length=int(_required(args, "seq_length")),
        vocab_size=vocab,
        is_gated=bool(getattr(args, "swiglu", False)),
        has_bias=bool(getattr(args, "add_bias_linear", True)),
        is_tied=not getattr(args, "untie_embeddings_and_output_weights", False),
        normalization=Normalization(getattr(args, "normalization", None) or "LayerNorm"),
        # Megatron's other kinds (yarn, mrope, relative) hold no table that is trained.
        position_embedding=PositionEmbedding(position if position in known else "rope"),
        max_position_embeddings=_number(args, "max_position_embeddings"),
    )


def _parallelism_from(args: Any, model: ModelShape) -> Parallelism:
    tp = _number(args, "tensor_model_parallel_size") or 1
    pp = _number(args, "pipeline_model_parallel_size") or 1
    vp = _number(args, "virtual_pipeline_model_parallel_size")
    per_virtual = _number(args, "num_layers_per_virtual_pipeline_stage")
    if not vp and per_virtual:
        vp = model.num_layers // (pp * per_virtual)
    context = _number(args, "context_parallel_size") or 1
    world = _number(args, "world_size")
    dp = _number(args, "data_parallel_size") or world // (tp * pp * context)
    return Parallelism(
        tp=tp,
        pp=pp,
        vp=vp or 1,
        dp=dp or 1,
        is_sequence_parallel=bool(getattr(args, "sequence_parallel", False)) and tp > 1,
        is_optimizer_distributed=bool(getattr(args, "use_distributed_optimizer", False)),
        overlaps_grad_reduce=bool(getattr(args, "overlap_grad_reduce", False)),
        overlaps_param_gather=bool(getattr(args, "overlap_param_gather", False)),
    )


def _precision_from(args: Any) -> Precision:
    if getattr(args, "bf16", False):
        return Precision.BF16
    return Precision.FP16 if getattr(args, "fp16", False) else Precision.FP32


def _required(args: Any, name: str) -> Any:
    value = getattr(args, name, None)
    if value is None:
        option = "--" + name.replace("_", "-")
        raise ConfigError(f"{name} is missing from the arguments of the run; give {option}")
    return value


def _number(args: Any, name: str) -> int:
    return int(getattr(args, name, None) or 0)
