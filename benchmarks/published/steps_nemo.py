"""Step tables of NVIDIA's recipes: DGX Cloud benchmarks, MLPerf, Megatron's CI."""

from __future__ import annotations

import math
from dataclasses import replace

from forerun.benchmarks.published.model_shapes import model_key, public_shape
from forerun.benchmarks.published.step_records import (
    Record,
    Stack,
    family,
    joined_flags,
    padded_vocab,
    step_row,
)
from forerun.benchmarks.published.steps_bridge import forced, recipe_stack
from forerun.calib.errors import ConfigError
from forerun.calib.records.step_rows import StepRow
from forerun.calib.workload.config import Attention, Recompute
from forerun.calib.workload.model_shape import (
    Dispatcher,
    Experts,
    ModelShape,
    Normalization,
    PositionEmbedding,
)


def read_dgxc(record: Record) -> StepRow:
    """Read DGX Cloud benchmarks of NeMo, several releases of it; shapes by the model's name."""
    label, device = record.text("model"), record.text("gpu")
    if record.text("framework").lower() not in ("", "nemo", "megatron", "megatron-lm"):
        raise ConfigError(f"framework {record.text('framework')} is not Megatron; give NeMo")
    low = label.lower()
    flag = joined_flags(
        ("lora" in low, "LoRA is not modelled"),
        (record.number("fsdp_degree", default=0) > 1, "FSDP is not modelled"),
        ("finetuning" in low or "fine-tuning" in low, "fine-tuning"),
    )
    num_layers = record.whole("layers", default=0)
    return step_row(
        record,
        row_id=f"{record.text('title') or label} x{record.text('gpus')} {record.row_id}",
        model=forced(
            public_shape(label, seq_length=record.whole("seq_len"), num_layers=num_layers)
        ),
        stack=recipe_stack(f"NeMo {record.text('release_tag_first')}".strip(), device),
        device=device,
        precision=record.text("precision"),
        micro_batch_size=record.whole("micro_batch_size", default=0) or _micro(record, flag),
        machine=f"{device} DGXC {record.text('precision')}",
        label=f"{model_key(label)} {record.text('precision')}",
        measured_s=record.number("step_time_s"),
        flag=flag,
    )


def _micro(record: Record, flag: str) -> int:
    """Return the micro-batch, from the accumulation if not stated; ``flag`` is raised first."""
    accumulation = record.number("ga_computed", default=0)
    dp = record.number("dp", default=0)
    if not accumulation or not dp:
        reason = "neither micro-batch nor accumulation is stated; give one"
        raise ConfigError(f"{flag}; {reason}" if flag else reason)
    return max(1, round(record.number("global_batch_size") / (dp * accumulation)))


_MLPERF_MODELS = {
    "gpt3": "GPT-3 175B",
    "llama31_405b": "Llama 3.1 405B",
    "llama31_8b": "Llama 3.1 8B",
    "llama2_70b_lora": "Llama 2 70B",
}


def read_mlperf(record: Record) -> StepRow:
    """Read MLPerf training of language models; rows whose degrees are not certain are flagged.

    A pipeline whose vp is not stated is refused.
    """
    benchmark, accelerator = record.text("benchmark"), record.text("accelerator")
    if benchmark not in _MLPERF_MODELS:
        raise ConfigError(f"benchmark {benchmark!r} is none of {', '.join(_MLPERF_MODELS)}")
    if not accelerator.startswith("NVIDIA"):
        raise ConfigError(f"accelerator {accelerator!r} is not NVIDIA's; only its stack is known")
    device = accelerator.removeprefix("NVIDIA ").strip()
    is_lora = "lora" in benchmark
    needed = ["tp", "pp", "cp", "micro_batch"]
    needed += ["vp"] if record.number("pp", default=1) > 1 else []
    if missing := record.unstated(*needed):
        raise ConfigError(f"{'LoRA is not modelled; ' if is_lora else ''}{missing}")
    fp4, fp8 = record.is_true("cfg_fp4"), record.is_true("cfg_fp8")
    stated = "fp4" if fp4 else "fp8" if fp8 or benchmark != "llama2_70b_lora" else "bf16"
    flag = joined_flags(
        (is_lora, "LoRA is not modelled"),
        (record.text("config_match") != "unique", "degrees are not certain"),
        (record.is_true("cfg_fsdp"), "FSDP is not modelled"),
        (record.is_true("resubmission_of_earlier_round"), "resubmission"),
    )
    model = public_shape(_MLPERF_MODELS[benchmark], seq_length=record.whole("seq_len"))
    return step_row(
        record,
        row_id=" ".join(record.text(c) for c in ("round", "system", "benchmark", "result")).strip(),
        model=model,
        stack=recipe_stack("NeMo", device),
        device=device,
        precision=stated,
        machine=f"{device} MLPerf {record.text('round')} {record.text('submitter')} {stated}",
        label=f"{benchmark} {device}",
        measured_s=record.number("step_time_s_median_over_runs", "step_time_s"),
        flag=flag,
    )


def read_ci(record: Record) -> StepRow:
    """Read golden step times of Megatron-LM's functional tests (GPT and mixtures of experts).

    These are deterministic and small: they time the host.  If a test leaves the tokenizer to the
    data, the vocabulary is GPT-2's.
    """
    family = record.text("model_family")
    if family not in ("gpt", "moe", "mixtral"):
        raise ConfigError(f"model_family {family!r} is no GPT; give gpt, moe or mixtral")
    degrees = _ci_degrees(record)
    model = _ci_shape(record)
    flag = joined_flags(
        (record.is_true("resumed_run"), "resumed run"),
        (record.is_true("identical_series_elsewhere"), "copy of another series"),
        (record.is_true("use_megatron_fsdp"), "FSDP is not modelled"),
    )
    is_full = record.text("recompute_granularity") == "full"
    return step_row(
        record.only({**degrees, **_batch(record), **_ci_sharding(record)}),
        row_id=f"{record.text('test_case')} {record.row_id}",
        model=replace(model, vocab_size=padded_vocab(model.vocab_size, degrees["tp"])),
        stack=_ci_stack(record),
        device=record.text("gpu"),
        precision="fp16" if record.is_true("fp16") else "bf16",
        recompute=Recompute.FULL if is_full else Recompute.NONE,
        machine=f"{record.text('gpu')} CI {record.text('platform')} {record.text('env')}",
        label=f"h{model.hidden_size} L{model.num_layers}",
        measured_s=record.number("median_iter_time_s"),
        flag=flag,
    )


def _ci_stack(record: Record) -> Stack:
    return Stack(
        framework=f"Megatron-LM CI {record.text('env')}",
        attention=_ci_attention(record),
        is_sequence_parallel=record.is_true("sequence_parallel"),
        is_optimizer_distributed=record.is_true("use_distributed_optimizer"),
        overlaps=record.is_true("overlap_grad_reduce"),
    )


def _ci_sharding(record: Record) -> dict[str, str]:
    strategy = record.text("data_parallel_sharding_strategy")
    return {"fsdp": strategy} if record.is_true("use_megatron_fsdp") else {}


def _batch(record: Record) -> dict[str, int]:
    return {name: record.whole(name) for name in ("micro_batch_size", "global_batch_size")}


def _ci_degrees(record: Record) -> dict[str, int]:
    pp = record.whole("pipeline_model_parallel_size", default=1)
    vp = record.whole("num_virtual_stages_per_pipeline_rank", default=0)
    if not vp and record.text("num_layers_per_virtual_pipeline_stage"):
        each = record.whole("num_layers_per_virtual_pipeline_stage")
        vp = record.whole("num_layers") // (pp * each)
    return {
        "gpus": record.whole("gpus", default=8),
        "tp": record.whole("tensor_model_parallel_size", default=1),
        "pp": pp,
        "vp": max(vp, 1),
        "cp": record.whole("context_parallel_size", default=1),
        "ep": record.whole("expert_model_parallel_size", default=1),
        "etp": record.whole("expert_tensor_parallel_size", default=0),
    }


def _ci_attention(record: Record) -> Attention:
    is_unfused = record.text("attention_backend") in ("unfused", "local")
    is_local = record.text("transformer_impl") == "local"
    return Attention.UNFUSED if is_unfused or is_local else Attention.FUSED


def _ci_shape(record: Record) -> ModelShape:
    hidden, heads = record.whole("hidden_size"), record.whole("num_attention_heads")
    is_gated = record.is_true("swiglu")
    ffn = record.whole("ffn_hidden_size", default=0) or (
        math.floor(4 * hidden * 2 / 3 / 64) * 64 if is_gated else 4 * hidden
    )
    if record.is_true("multi_latent_attention"):
        raise ConfigError("the ranks of latent attention are not stated; give them")
    experts = None
    if record.text("num_experts"):
        kind = record.text("moe_token_dispatcher_type") or "allgather"
        experts = Experts(
            num_experts=record.whole("num_experts"),
            top_k=record.whole("moe_router_topk", default=2),
            ffn_hidden_size=record.whole("moe_ffn_hidden_size", default=ffn),
            shared_ffn_hidden_size=record.whole("moe_shared_expert_intermediate_size", default=0),
            dispatcher=Dispatcher(kind),
            is_grouped=record.is_true("moe_grouped_gemm"),
        )
    return ModelShape(
        num_layers=record.whole("num_layers"),
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=record.whole("num_query_groups", default=heads),
        kv_channels=record.whole("kv_channels", default=hidden // heads),
        seq_length=record.whole("seq_length"),
        vocab_size=record.whole("vocab_size", default=50257),
        is_gated=is_gated,
        is_tied=not record.is_true("untie_embeddings_and_output_weights"),
        normalization=Normalization.LAYER_NORM,
        position_embedding=PositionEmbedding.LEARNED,
        experts=experts,
    )


FAMILIES = (
    family("DGX Cloud benchmarks", "model framework gpu gpus tokens_per_s scaling", read_dgxc),
    family("MLPerf", "round benchmark accelerator config_match gpus tp", read_mlperf),
    family("Megatron-LM CI", "model_family test_case median_iter_time_s hidden_size", read_ci),
)
