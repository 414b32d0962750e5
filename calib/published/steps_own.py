"""Our own format of step tables: Megatron's argument names as columns, and what was measured.

``recipes/published/FORMAT.md`` describes it for people.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from ..arguments.megatron_namespace import from_namespace
from ..errors import ConfigError
from ..records.step_rows import StepKind, StepRow, Trait
from ..workload.config import (
    Attention,
    ContextComm,
    Engine,
    Experts,
    Fp8Recipe,
    Parallelism,
    Precision,
    Recompute,
    RunConfig,
)
from ..workload.pipeline_layout import write_layout
from .step_families import StepFamily
from .step_records import Record

TIME = "step_time_s"
MEMORY = "peak_memory_nbytes"
REQUIRED = frozenset({TIME, "num_layers", "hidden_size", "micro_batch_size", "global_batch_size"})
OWN_COLUMNS = (
    *("row_id", "device", "machine", "model", "framework", "kind", "traits", "flag"),
    *(TIME, MEMORY),
)
"""Columns that are no arguments of Megatron."""


def read_own(record: Record, row_id: str, table: str) -> StepRow:
    """A row of a table in our own format; cells that are empty count as not given."""
    arguments = [name for name in record.names if name not in OWN_COLUMNS]
    given = {column: _value(record.text(column)) for column in arguments}
    found = from_namespace({column: v for column, v in given.items() if v is not None})
    device, framework = record.text("device") or "unknown", record.text("framework")
    traits = frozenset(_choice(Trait, t) for t in record.text("traits").split())
    config = replace(
        found,
        model=replace(found.model, is_residual_parallel=Trait.PARALLEL_RESIDUAL in traits),
        parallelism=replace(found.parallelism, engine=_ENGINES.get(framework, Engine.MEGATRON)),
        device=device,
        framework=framework,
    )
    measured_s = record.number(TIME, default=math.nan)
    flags = [record.text("flag"), "" if measured_s > 0 else "no step time"]
    batch = config.batch.global_batch_size
    return StepRow(
        table=table,
        row_id=row_id,
        config=config,
        measured_s=measured_s,
        measured_memory_nbytes=record.number(MEMORY, default=0) or None,
        machine=record.text("machine") or f"{device} {config.precision.value}",
        group=f"{_label(record, config)} x{config.parallelism.num_ranks} batch {batch}",
        kind=_choice(StepKind, record.text("kind") or StepKind.MEASURED.value),
        traits=traits,
        flag="; ".join(text for text in flags if text),
    )


def own_frame(rows: list[StepRow]) -> pd.DataFrame:
    """Rows in our own format; columns that no row needs are left out."""
    frame = pd.DataFrame([own_cells(row) for row in rows])
    return frame.loc[:, [c for c in frame.columns if frame[c].notna().any()]]


def own_cells(row: StepRow) -> dict[str, Any]:
    """One row in our own format; ``read_own`` gives an equal config back."""
    config = row.config
    model, par = config.model, config.parallelism
    own: dict[str, Any] = {
        "row_id": row.row_id,
        "device": config.device,
        "machine": row.machine,
        "model": row.group.rpartition(f" x{par.num_ranks} batch ")[0],
        "framework": config.framework or None,
        "kind": row.kind.value,
        "traits": " ".join(sorted(t.value for t in row.traits)) or None,
        "flag": row.flag or None,
        TIME: row.measured_s,
        MEMORY: row.measured_memory_nbytes,
    }
    sizes = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": _set(model.num_query_groups != model.num_attention_heads),
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "seq_length": model.seq_length,
        "padded_vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings or None,
        "swiglu": _set(model.is_gated),
        "add_bias_linear": model.has_bias,
        "add_qkv_bias": _set(model.has_qkv_bias and not model.has_bias),
        "qk_layernorm": _set(model.has_qk_norm),
        "untie_embeddings_and_output_weights": _set(not model.is_tied),
        "normalization": model.normalization.value,
        "position_embedding_type": model.position_embedding.value,
        "mtp_num_layers": model.num_prediction_layers or None,
    }
    parts = (_latent(config), _experts(model.experts), _layout(config, par), _run(config))
    return {name: value for part in (own, sizes, *parts) for name, value in part.items()}


def _latent(config: RunConfig) -> dict[str, Any]:
    found = config.model.latent_attention
    if found is None:
        return {}
    names = found.__dataclass_fields__
    return {"multi_latent_attention": True} | {name: getattr(found, name) for name in names}


def _experts(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    pattern = [int(has) for has in experts.layer_pattern]
    return {
        "num_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_layer_freq": str(pattern) if pattern else None,
        "moe_token_dispatcher_type": experts.dispatcher.value,
        "moe_expert_capacity_factor": experts.capacity_factor or None,
        "moe_pad_expert_input_to_capacity": _set(experts.is_padded_to_capacity),
        "moe_grouped_gemm": _set(experts.is_grouped),
        "moe_shared_expert_overlap": _set(experts.overlaps_shared),
    }


def _layout(config: RunConfig, par: Parallelism) -> dict[str, Any]:
    layout = None
    if par.chunk_layers:
        layout = write_layout(par.chunk_layers, config.model.num_prediction_layers)
    comm, copies = par.context_comm, par.num_optimizer_instances
    return {
        "world_size": par.num_ranks,
        "ranks_per_node": par.ranks_per_node or None,
        "tensor_model_parallel_size": par.tp,
        "pipeline_model_parallel_size": par.pp,
        "virtual_pipeline_model_parallel_size": par.vp if par.vp > 1 and not layout else None,
        "pipeline_model_parallel_layout": layout,
        "context_parallel_size": par.cp,
        "cp_comm_type": comm.value if comm is not ContextComm.P2P else None,
        "expert_model_parallel_size": par.ep if config.model.experts else None,
        "expert_tensor_parallel_size": par.etp or None,
        "sequence_parallel": _set(par.is_sequence_parallel),
        "use_distributed_optimizer": _set(par.is_optimizer_distributed),
        "num_distributed_optimizer_instances": copies if copies > 1 else None,
        "overlap_grad_reduce": _set(par.overlaps_grad_reduce),
        "overlap_param_gather": _set(par.overlaps_param_gather),
        "tp_comm_overlap": _set(par.overlaps_tp),
    }


def _run(config: RunConfig) -> dict[str, Any]:
    is_nvfp4 = config.fp8 is Fp8Recipe.NVFP4
    is_fp8 = config.fp8 is not Fp8Recipe.NONE and not is_nvfp4
    is_16 = config.precision is not Precision.FP32
    attention = {Attention.FUSED: "flash", Attention.UNFUSED: "unfused", Attention.AUTO: None}
    return {
        "micro_batch_size": config.batch.micro_batch_size,
        "global_batch_size": config.batch.global_batch_size,
        "bf16": _set(config.precision is Precision.BF16),
        "fp16": _set(config.precision is Precision.FP16),
        "fp8": "hybrid" if is_fp8 else None,
        "fp8_recipe": config.fp8.value if is_fp8 else None,
        "fp4": "e2m1" if is_nvfp4 else None,
        "fp8_param_gather": _set(config.keeps_fp8_params and is_fp8),
        "fp4_param": _set(config.keeps_fp8_params and is_nvfp4),
        "attention_backend": attention[config.attention],
        "recompute_granularity": (
            None if config.recompute is Recompute.NONE else config.recompute.value
        ),
        "grad_reduce_in_fp32": not config.reduces_grads_in_bf16 if is_16 else None,
        "masked_softmax_fusion": None if config.is_softmax_fused else False,
        "cross_entropy_loss_fusion": _set(config.is_loss_fused),
        "cross_entropy_fusion_impl": "" if config.keeps_fp32_logits else "te",
    }


def _set(is_on: bool) -> bool | None:
    return True if is_on else None


def _value(text: str) -> Any:
    """A cell as Megatron's argument parser would leave it; None where it is empty."""
    if not text:
        return None
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


_ENGINES = {"GPT-NeoX": Engine.DEEPSPEED}


def _label(record: Record, config: RunConfig) -> str:
    return record.text("model") or f"h{config.model.hidden_size} L{config.model.num_layers}"


def _choice(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError as err:
        known = ", ".join(choice.value for choice in kind)
        raise ConfigError(f"{text!r} is none of {known}; choose one") from err


FAMILIES = (StepFamily(name="own", columns=REQUIRED, read=read_own),)
