"""Ranks of real megatron.core GPTs with experts, latent attention or further predictions.

One after another, over a backend that sends nothing.  Each line of stdin is a run config and a rank
as JSON; the answer to it is one line of JSON on stdout: what the rank holds, and every operator and
collective that the hooks see in its second step.  The router's choice is overruled so that every
expert gets the same number of tokens of each rank: then all shapes follow from the layout.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import CollectiveRecord, OperatorRecord
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.process_groups import ProcessGroupHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.recipes.stand_in_cuda import install as stand_in

PREFERENCE = 100.0
"""Above any logit, which are cut to one."""


def main() -> None:
    stand_in.install()
    TopKRouter.gating = balanced(TopKRouter.gating)
    for line in sys.stdin:
        settings, rank = json.loads(line)
        config = RunConfig.from_json(settings)
        begin(config, rank)
        print("RESULT" + json.dumps(probe(config)), flush=True)
        end()


def probe(config: RunConfig) -> dict[str, Any]:
    recorder, guard = Recorder(HostStopwatch()), Guard()
    transformer = transformer_config(config)
    transformer.timers = Timers(recorder)
    model, ddp, optimizer = build(config, transformer)
    step(config, ddp, optimizer)
    modules, groups = ModuleHooks([model], recorder, guard), ProcessGroupHooks(recorder, guard)
    modules.install()
    groups.install()
    recorder.open(StepLog(step=0, window=0, sites=modules.sites))
    step(config, ddp, optimizer)
    log = recorder.close()
    groups.remove()
    modules.remove()
    assert log is not None and guard.num_faults == 0
    return {**model_summary(model, ddp), **seen(log)}


def model_summary(model: GPTModel, ddp: DistributedDataParallel) -> dict[str, Any]:
    return {
        "parameters": [weight.numel() for _, weight in model.named_parameters()],
        "buckets": [
            [bucket.grad_data.numel(), is_expert]
            for is_expert, groups in enumerate(
                (ddp.bucket_groups, ddp.expert_parallel_bucket_groups)
            )
            for group in groups
            for bucket in group.buckets
        ],
        "groups": {
            "ep": ranks(parallel_state.get_expert_model_parallel_group()),
            "expert_tp": ranks(parallel_state.get_expert_tensor_parallel_group()),
            "expert_tp_ep": ranks(parallel_state.get_expert_tensor_and_model_parallel_group()),
            "expert_dp": ranks(parallel_state.get_expert_data_parallel_group()),
        },
    }


def ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def seen(log: StepLog) -> dict[str, Any]:
    operators: Counter[tuple[Any, ...]] = Counter()
    calls: Counter[tuple[Any, ...]] = Counter()
    for record in Attribution(log).records():
        if isinstance(record, OperatorRecord):
            key = record.kind.value, record.phase.value, record.shape, record.element_nbytes
            operators[key] += 1
        elif isinstance(record, CollectiveRecord):
            call = record.collective.value, record.role.value, len(record.ranks), record.nbytes
            calls[call] += 1
    return {
        "operators": [[*operator, count] for operator, count in operators.items()],
        "calls": [[*call, count] for call, count in calls.items()],
    }


class Timers:
    """Marks the brackets that Megatron's own timers make."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        return _Timer(self._recorder, name)


class _Timer:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def start(self, barrier: bool = False) -> None:
        self._recorder.begin_phase(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._recorder.end_phase(self._name)


def balanced(gating: Any) -> Any:
    """Token t prefers experts t x k, t x k + 1, ... of its router, counted modulo their number."""

    def prefer(router: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = gating(router, hidden)
        tokens = logits.numel() // router.num_experts
        chosen = torch.arange(tokens * router.topk).reshape(tokens, -1) % router.num_experts
        wishes = torch.zeros(tokens, router.num_experts).scatter(1, chosen, PREFERENCE)
        # A backend that sends nothing may "receive" NaN.
        small = logits.nan_to_num(0.0, 0.0, 0.0).clamp(-1.0, 1.0)
        return small + wishes.reshape(logits.shape).to(logits.dtype)

    return prefer


def begin(config: RunConfig, rank: int) -> None:
    par = config.parallelism
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=par.num_ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.expert_tp,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def end() -> None:
    """Leaves nothing to the next rank, neither its groups nor what process-wide state kept."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    MTPLossLoggingHelper.tracker.clear()
    sys.excepthook = sys.__excepthook__  # each group of processes adds its rank to every line


def transformer_config(config: RunConfig) -> TransformerConfig:
    shape, par = config.model, config.parallelism
    is_full = config.recompute is Recompute.FULL
    dtype = torch.bfloat16 if config.precision.nbytes == 2 else torch.float32
    settings: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "normalization": shape.normalization.value,
        "gated_linear_unit": shape.is_gated,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": shape.has_bias,
        "qk_layernorm": shape.has_qk_norm,
        "mtp_num_layers": shape.num_prediction_layers or None,
        "tensor_model_parallel_size": par.tp,
        "pipeline_model_parallel_size": par.pp,
        "expert_model_parallel_size": par.ep,
        "expert_tensor_parallel_size": par.expert_tp,
        "sequence_parallel": par.is_sequence_parallel,
        "recompute_granularity": None
        if config.recompute is Recompute.NONE
        else config.recompute.value,
        "recompute_method": "uniform" if is_full else None,
        "recompute_num_layers": 1 if is_full else None,
        "recompute_modules": list(config.recompute_modules) or None,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        **expert_settings(config),
    }
    latent = shape.latent_attention
    if latent is None:
        return TransformerConfig(**settings)
    return MLATransformerConfig(
        **settings,
        multi_latent_attention=True,
        rope_type="rope",
        q_lora_rank=latent.q_lora_rank or None,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_head_dim,
        qk_pos_emb_head_dim=latent.qk_pos_emb_head_dim,
        v_head_dim=latent.v_head_dim,
    )


def expert_settings(config: RunConfig) -> dict[str, Any]:
    experts = config.model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "moe_shared_expert_overlap": experts.overlaps_shared,
        "moe_layer_freq": [int(is_on) for is_on in experts.layer_pattern] or 1,
        "moe_token_dispatcher_type": experts.dispatcher.value,
        "moe_expert_capacity_factor": experts.capacity_factor or None,
        "moe_pad_expert_input_to_capacity": experts.is_padded_to_capacity,
        "moe_router_dtype": "fp32" if experts.has_fp32_router else None,
        "moe_router_load_balancing_type": "none",
    }


class Whole(torch.nn.Linear):
    """In the place of TransformerEngine's linear that every tp rank has whole."""

    def __init__(self, size_in: int, size_out: int, *, config: Any, **_: Any) -> None:
        super().__init__(size_in, size_out, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(hidden), None


class Core(DotProductAttention):
    """Megatron's own does not know that keys and values may have widths of their own."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def with_latent_modules(layers: Any) -> None:
    """Latent attention needs two modules of TransformerEngine; the rest of it is Megatron's."""
    multi_latent_attention.TELinear = Whole
    for layer in layers.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.linear_q_down_proj = parts.linear_kv_down_proj = Whole
        parts.core_attention = Core


def build(
    config: RunConfig, transformer: TransformerConfig
) -> tuple[GPTModel, DistributedDataParallel, Any]:
    shape, par = config.model, config.parallelism
    layers = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=False, normalization=shape.normalization.value
    )
    if shape.latent_attention is not None:
        with_latent_modules(layers)
    predictions = (
        get_gpt_mtp_block_spec(transformer, layers, use_transformer_engine=False)
        if shape.num_prediction_layers
        else None
    )
    model = GPTModel(
        transformer,
        layers,
        shape.vocab_size,
        shape.max_position_embeddings or shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type=shape.position_embedding.value,
        mtp_block_spec=predictions,
    )
    ddp = DistributedDataParallel(
        config=transformer,
        module=Float16Module(transformer, model) if transformer.bf16 else model,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=par.overlaps_grad_reduce,
            overlap_param_gather=par.overlaps_param_gather,
            use_distributed_optimizer=par.is_optimizer_distributed,
            bucket_size=par.bucket_numel or None,
        ),
    )
    is_half = transformer.bf16
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=is_half,
            params_dtype=transformer.params_dtype,
            use_distributed_optimizer=par.is_optimizer_distributed,
            overlap_param_gather=par.overlaps_param_gather,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    transformer.finalize_model_grads_func = finalize_model_grads
    if par.overlaps_grad_reduce:
        transformer.no_sync_func = ddp.no_sync
    return model, ddp, optimizer


def step(config: RunConfig, ddp: DistributedDataParallel, optimizer: Any) -> None:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(lambda: config, None),
        model=ddp,
        num_microbatches=config.num_microbatches,
        seq_length=config.model.seq_length,
        micro_batch_size=config.batch.micro_batch_size,
        forward_only=False,
    )
    optimizer.step()


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    config: RunConfig = next(data)
    shape = (config.batch.micro_batch_size, config.model.seq_length)
    tokens = torch.zeros(shape, dtype=torch.long)
    places = torch.arange(shape[1]).expand(shape)
    mask = torch.ones(1, 1, shape[1], shape[1]).triu(1) > 0
    output = model(tokens, places, mask, labels=tokens)
    return output, lambda losses: (losses.float().mean(), {})


if __name__ == "__main__":
    main()
