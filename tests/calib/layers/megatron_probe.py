"""Ranks of real megatron.core GPTs, one after another, over a backend that sends nothing.

Reads pairs of a run config and a rank as JSON from stdin; for each writes as JSON to stdout what
the rank holds, the operators that our hooks record in its second step, and the collectives that
it issues there, counted below our hooks.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch._C._distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.marks._attribution import Attribution
from forerun.calib.records.record_kinds import OperatorRecord
from forerun.calib.workload.config import Precision, Recompute, RunConfig
from forerun.hooks.process.guard import Guard
from forerun.hooks.sensors.modules import ModuleHooks
from forerun.hooks.sensors.recorder import Recorder
from forerun.hooks.sensors.step_log import StepLog
from forerun.hooks.sensors.stopwatch import HostStopwatch
from forerun.hooks.sensors.timers import TimerHooks
from forerun.recipes.stand_in_cuda import install as stand_in

REDUCED = {"allreduce": 0, "allreduce_coalesced": 0}
GATHERED = {
    "all_gather_single": 0,
    "_allgather_base": 0,
    "allgather_into_tensor_coalesced": 0,
    "all_gather_single_coalesced": 0,
}
SCATTERED = {
    "reduce_scatter_single": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "reduce_scatter_single_coalesced": 1,
}
MESSAGES = {"send": 0, "recv": 0}
KINDS = {
    **dict.fromkeys(REDUCED, "all_reduce"),
    **dict.fromkeys(GATHERED, "all_gather"),
    **dict.fromkeys(SCATTERED, "reduce_scatter"),
    "send": "send",
    "recv": "recv",
}
WHOLE = {**REDUCED, **GATHERED, **SCATTERED, **MESSAGES}
"""Which argument of a method holds the payload of the whole group."""


def main() -> None:
    stand_in.install()
    name_missing_precision()
    calls: Counter[tuple[str, str, int, int]] = Counter()
    count_calls(calls)
    for settings, rank in json.load(sys.stdin):
        begin(RunConfig.from_json(settings), rank)
        print("RESULT" + json.dumps(probe(RunConfig.from_json(settings), calls)), flush=True)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def name_missing_precision() -> None:
    """Core 0.16.1 asks TransformerEngine about fp8 where a norm is recomputed, installed or not."""
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: nullcontext()
    random.fp8_autocast = lambda **_: nullcontext()


def probe(config: RunConfig, calls: Counter[tuple[str, str, int, int]]) -> dict[str, Any]:
    chunks, optimizer = build(config)
    step(config, chunks, optimizer)
    calls.clear()
    operators = record(config, chunks, lambda: step(config, chunks, optimizer))
    return {
        "parameters": [[p.numel() for p in chunk.module.parameters()] for chunk in chunks],
        "buckets": [
            [bucket.grad_data.numel() for group in chunk.bucket_groups for bucket in group.buckets]
            for chunk in chunks
        ],
        "groups": {
            name: dist.get_process_group_ranks(group) for name, group in known_groups().items()
        },
        "calls": [[*call, count] for call, count in calls.items()],
        "operators": [[*operator, count] for operator, count in operators.items()],
    }


def known_groups() -> dict[str, Any]:
    dp = {"with_context_parallel": True, "partial_data_parallel": True}
    return {
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(**dp),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "model": parallel_state.get_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "expert_tp": parallel_state.get_expert_tensor_parallel_group(),
        "expert_tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group(),
        "expert_dp": parallel_state.get_expert_data_parallel_group(
            partial_expert_data_parallel=True
        ),
    }


def record(
    config: RunConfig, chunks: list[DistributedDataParallel], run: Callable[[], None]
) -> Counter[tuple[str, str, tuple[int, ...], int]]:
    """Operators of what ``run`` does, as our own hooks see them."""
    guard, recorder = Guard(), Recorder(HostStopwatch())
    hooks, timers = ModuleHooks(chunks, recorder, guard), TimerHooks(recorder, guard)
    timers.install([(chunk.config, "timers") for chunk in chunks])
    hooks.install()
    recorder.open(StepLog(step=0, window=0, sites=hooks.sites))
    run()
    log = recorder.close()
    hooks.remove()
    timers.remove()
    assert guard.num_faults == 0 and log is not None and log.num_dropped == 0
    return Counter(
        (record.kind.value, record.phase.value, record.shape, record.element_nbytes)
        for record in Attribution(log).records()
        if isinstance(record, OperatorRecord)
    )


def begin(config: RunConfig, rank: int) -> None:
    par = config.parallelism
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=par.num_ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        virtual_pipeline_model_parallel_size=par.vp if par.vp > 1 else None,
        context_parallel_size=par.cp,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.expert_tp,
        num_distributed_optimizer_instances=par.num_optimizer_instances,
        order="tp-cp-ep-pp-dp" if par.is_pipeline_before_data else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


def build(config: RunConfig) -> tuple[list[DistributedDataParallel], Any]:
    shape, par = config.model, config.parallelism
    transformer = transformer_config(config)
    dtype = transformer.params_dtype
    stages = list(range(par.vp)) if par.vp > 1 else [None]
    chunks = []
    for number, stage in enumerate(stages):
        where = {"ignore_virtual": False, "vp_stage": stage}
        model = GPTModel(
            transformer,
            get_gpt_layer_local_spec(
                normalization=shape.normalization.value, qk_layernorm=shape.has_qk_norm
            ),
            shape.vocab_size,
            shape.max_position_embeddings or shape.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type=shape.position_embedding.value,
            vp_stage=stage,
        )
        chunks.append(
            DistributedDataParallel(
                config=transformer,
                module=model if dtype is torch.float32 else Float16Module(transformer, model),
                ddp_config=ddp_config(config),
                disable_bucketing=number > 0,
            )
        )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            loss_scale=1.0 if dtype is torch.float16 else None,
            params_dtype=dtype,
            use_distributed_optimizer=par.is_optimizer_distributed,
            overlap_param_gather=par.overlaps_param_gather,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    if par.overlaps_grad_reduce:
        functions: list[Any] = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = functions if len(functions) > 1 else functions[0]
    return chunks, optimizer


def ddp_config(config: RunConfig) -> DistributedDataParallelConfig:
    """As ``megatron/training/training.py`` sets it up."""
    par = config.parallelism
    bucket_size = par.bucket_numel or max(40_000_000, 1_000_000 * par.dp * par.cp)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.precision is not Precision.FP16
        and not config.reduces_grads_in_bf16,
        overlap_grad_reduce=par.overlaps_grad_reduce,
        overlap_param_gather=par.overlaps_param_gather,
        use_distributed_optimizer=par.is_optimizer_distributed,
        num_distributed_optimizer_instances=par.num_optimizer_instances,
        bucket_size=bucket_size if par.overlaps_grad_reduce else None,
        pad_buckets_for_high_nccl_busbw=par.pads_buckets,
    )


DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}


def transformer_config(config: RunConfig) -> TransformerConfig:
    shape, par = config.model, config.parallelism
    is_full = config.recompute is Recompute.FULL
    dtype = DTYPES[config.precision]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization=shape.normalization.value,
        gated_linear_unit=shape.is_gated,
        add_bias_linear=shape.has_bias,
        add_qkv_bias=shape.has_qkv_bias,
        qk_layernorm=shape.has_qk_norm,
        attention_output_gate=shape.has_attention_gate,
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        virtual_pipeline_model_parallel_size=par.vp if par.vp > 1 else None,
        pipeline_model_parallel_layout=layer_layout(config),
        microbatch_group_size_per_vp_stage=par.microbatch_group_size or None,
        overlap_p2p_comm=par.vp > 1,
        batch_p2p_comm=par.vp == 1,
        sequence_parallel=par.is_sequence_parallel,
        recompute_granularity=None
        if config.recompute is Recompute.NONE
        else config.recompute.value,
        recompute_method=("block" if config.recompute_num_layers else "uniform")
        if is_full
        else None,
        recompute_num_layers=(config.recompute_num_layers or 1) if is_full else None,
        recompute_modules=list(config.recompute_modules) or None,
        distribute_saved_activations=config.distributes_saved_activations,
        cross_entropy_loss_fusion=config.is_loss_fused,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def layer_layout(config: RunConfig) -> list[list[str]] | None:
    """Chunks in model order, as ``PipelineParallelLayerLayout`` takes them."""
    if not config.parallelism.chunk_layers:
        return None
    chunks = [["decoder"] * number for number in config.chunk_layers]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def step(config: RunConfig, chunks: list[DistributedDataParallel], optimizer: Any) -> None:
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(lambda: config, None)] * len(chunks),
        model=list[torch.nn.Module](chunks),
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


def count_calls(calls: Counter[tuple[str, str, int, int]]) -> None:
    for name, place in WHOLE.items():
        original = getattr(ProcessGroup, name, None)
        if original is not None:
            setattr(ProcessGroup, name, counting(original, name, place, calls))


def counting(original: Any, name: str, place: int, calls: Counter[Any]) -> Any:
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        nbytes = payload_nbytes(args[place])
        calls[KINDS[name], self.group_desc, self.size(), nbytes] += 1
        return original(self, *args, **kwargs)

    return call


def payload_nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all that one call sends together."""
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    main()
