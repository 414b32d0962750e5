"""One rank of a real megatron.core GPT, alone in its process, over a backend that sends nothing.

Reads a run config and a rank as JSON from the command line; writes what the rank holds and every
collective that it issues in its second step as JSON to stdout.
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
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch._C._distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.workload.config import Recompute, RunConfig
from forerun.launch import stand_in

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
    config, rank = RunConfig.from_json(json.loads(sys.argv[1])), int(sys.argv[2])
    stand_in.install()
    begin(config, rank)
    calls: Counter[tuple[str, str, int, int]] = Counter()
    model, ddp, optimizer = build(config)
    step(config, ddp, optimizer)
    count_calls(calls)
    step(config, ddp, optimizer)
    groups = ddp.bucket_groups
    print(
        "RESULT"
        + json.dumps(
            {
                "parameters": [weight.numel() for _, weight in model.named_parameters()],
                "buckets": [
                    bucket.grad_data.numel() for group in groups for bucket in group.buckets
                ],
                "groups": {
                    "tp": dist.get_process_group_ranks(
                        parallel_state.get_tensor_model_parallel_group()
                    ),
                    "dp": dist.get_process_group_ranks(parallel_state.get_data_parallel_group()),
                    "pp": dist.get_process_group_ranks(
                        parallel_state.get_pipeline_model_parallel_group()
                    ),
                    "model": dist.get_process_group_ranks(
                        parallel_state.get_model_parallel_group()
                    ),
                },
                "calls": [[*call, count] for call, count in calls.items()],
            }
        )
    )


def begin(config: RunConfig, rank: int) -> None:
    par = config.parallelism
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=par.num_ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        create_gloo_process_groups=False,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build(config: RunConfig) -> tuple[GPTModel, DistributedDataParallel, Any]:
    shape, par = config.model, config.parallelism
    is_full = config.recompute is Recompute.FULL
    dtype = torch.bfloat16 if config.precision.nbytes == 2 else torch.float32
    transformer = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization=shape.normalization.value,
        gated_linear_unit=shape.is_gated,
        add_bias_linear=shape.has_bias,
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        sequence_parallel=par.is_sequence_parallel,
        recompute_granularity=None
        if config.recompute is Recompute.NONE
        else config.recompute.value,
        recompute_method="block" if is_full else None,
        recompute_num_layers=(config.recompute_num_layers or config.layers_per_stage)
        if is_full
        else None,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        transformer,
        get_gpt_layer_local_spec(normalization=shape.normalization.value),
        shape.vocab_size,
        shape.max_position_embeddings or shape.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type=shape.position_embedding.value,
    )
    ddp = DistributedDataParallel(
        config=transformer,
        module=Float16Module(transformer, model) if dtype is torch.bfloat16 else model,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=par.overlaps_grad_reduce,
            overlap_param_gather=par.overlaps_param_gather,
            use_distributed_optimizer=par.is_optimizer_distributed,
        ),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
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


def count_calls(calls: Counter[tuple[str, str, int, int]]) -> None:
    for name, place in WHOLE.items():
        original = getattr(ProcessGroup, name, None)
        if original is not None:
            setattr(ProcessGroup, name, counting(original, name, place, calls))


def counting(original: Any, name: str, place: int, calls: Counter[Any]) -> Any:
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for nbytes in payloads(args[place]):
            calls[KINDS[name], self.group_desc, self.size(), nbytes] += 1
        return original(self, *args, **kwargs)

    return call


def payloads(value: Any) -> list[int]:
    tensors = [value] if isinstance(value, torch.Tensor) else value
    return [tensor.numel() * tensor.element_size() for tensor in tensors]


if __name__ == "__main__":
    main()
