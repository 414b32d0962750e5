"""Build the GPT, its data-parallel wrapper, the optimizer and the schedule from the arguments."""

from __future__ import annotations

import argparse
import re
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

Chunks = list[DistributedDataParallel]


def build(
    args: argparse.Namespace,
) -> tuple[Chunks, MegatronOptimizer, OptimizerParamScheduler, TransformerConfig]:
    """Return the virtual stages of this rank, the optimizer, its schedule, and the shared
    configuration."""
    config = transformer_config(args)
    plain = [_chunk(args, config, stage) for stage in _virtual_stages(args)]
    if args.use_cpu_initialization:
        for chunk in plain:
            draw_weights(chunk, args)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=not args.fake_process_group,
        bucket_size=args.ddp_bucket_size,
    )
    chunks = [
        DistributedDataParallel(
            config=config,
            ddp_config=ddp_config,
            module=Float16Module(config, chunk) if args.bf16 else chunk,
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(plain)
    ]
    optimizer = get_megatron_optimizer(
        _optimizer_config(args), chunks, use_gloo_process_groups=not args.fake_process_group
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return chunks, optimizer, _schedule(args, optimizer), config


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    """Return Megatron's configuration of the model and its parallelism."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not args.disable_bias_linear,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        # As Megatron-LM: batched sends and receives cannot tell the two directions apart at PP 2.
        overlap_p2p_comm=bool(args.virtual_pipeline_model_parallel_size),
        batch_p2p_comm=not args.virtual_pipeline_model_parallel_size,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        use_cpu_initialization=args.use_cpu_initialization,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )


def draw_weights(chunk: GPTModel, args: argparse.Namespace) -> None:
    """Draw each weight from its own seed and full shape, so that every layout trains one model.

    Norms keep ones and biases zeros, as Megatron sets them.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, weight in chunk.named_parameters():
        if weight.dim() < 2:
            continue
        name = _global_name(chunk, name)
        if name == "output_layer.weight" and not args.untie_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        dim = getattr(weight, "partition_dim", -1)
        parts = args.tensor_model_parallel_size if dim >= 0 else 1
        shape = list(weight.shape)
        if parts > 1:
            shape[dim] *= parts
        std = args.init_method_std
        if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= (2.0 * args.num_layers) ** 0.5
        seed = torch.Generator().manual_seed(zlib.crc32(f"{args.seed} {name}".encode()))
        full = torch.empty(shape).normal_(0.0, std, generator=seed)
        if parts > 1 and args.swiglu and name.endswith("linear_fc1.weight"):
            # A rank has its share of the gate followed by its share of the input.
            gate, up = full.chunk(2)
            full = torch.cat([gate.chunk(parts)[rank], up.chunk(parts)[rank]])
        elif parts > 1:
            full = full.chunk(parts, dim)[rank]
        weight.data.copy_(full)


def _global_name(chunk: GPTModel, name: str) -> str:
    """Return the name with the layer's number in the whole model instead of in this virtual
    stage."""
    match = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        return name
    return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.{match[2]}"


def _virtual_stages(args: argparse.Namespace) -> list[int | None]:
    size = args.virtual_pipeline_model_parallel_size
    return list(range(size)) if size else [None]


def _chunk(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> GPTModel:
    where = {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=stage,
    ).cuda()


def _optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )


def _schedule(args: argparse.Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    batch = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=args.lr_decay_iters * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
    )
