"""Bytes that autograd keeps of one layer of a real megatron.core GPT, on one rank of several.

The other ranks are made up: collectives of a fake group leave what a real one would fill.

Reads a list of run configs as JSON from the command line; writes a list of numbers to stdout: what
a model of two equal layers keeps beyond one of one layer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import (
    MLATransformerConfig,
    TransformerConfig,
    multi_latent_attention,
)
from megatron.core.transformer.moe import moe_utils
from torch.testing._internal.distributed.fake_pg import FakeStore

from forerun.calib.workload.config import LatentAttention, Recompute, RunConfig
from forerun.recipes.stand_in_cuda import install as stand_in

NUM_RANKS = 4


def main() -> None:
    configs = [RunConfig.from_json(value) for value in json.loads(sys.argv[1])]
    stand_in.install()
    # megatron.core 0.16.1 reads this name even where Transformer Engine is not installed.
    moe_utils.te_general_gemm = None
    multi_latent_attention.TELinear = ()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    torch.manual_seed(1)
    print("RESULT" + json.dumps([layer_nbytes(config) for config in configs]))


def layer_nbytes(config: RunConfig) -> int:
    """Bytes of one layer, on its own tensor-parallel groups."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallelism.tp, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return saved_nbytes(config, 3) - saved_nbytes(config, 2)


def saved_nbytes(config: RunConfig, num_layers: int) -> int:
    """Bytes of all storages that are kept for the backward pass, without parameters."""
    model = build(config, num_layers)
    batch, sequence = config.batch.micro_batch_size, config.model.seq_length
    tokens = torch.randint(config.model.vocab_size, (batch, sequence))
    positions = torch.arange(sequence).expand(batch, -1)
    parameter_storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    result: dict[int, int] = {}
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            result[storage.data_ptr()] = storage.nbytes()
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, positions, None, labels=tokens)
    return sum(result.values())


class FusedAttention(torch.nn.Module):
    """Attention as Transformer Engine would run it: no score is retained."""

    def __init__(self, config: TransformerConfig, **settings: Any) -> None:
        super().__init__()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """From (sequence, batch, head, width) to (sequence, batch, heads x width)."""
        result = functional.scaled_dot_product_attention(
            *(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), is_causal=True
        )
        return result.permute(2, 0, 1, 3).flatten(2)


def build(config: RunConfig, num_layers: int) -> GPTModel:
    shape, experts = config.model, config.model.experts
    is_full = config.recompute is Recompute.FULL
    dtype = torch.bfloat16 if config.precision.nbytes == 2 else torch.float32
    latent = shape.latent_attention
    transformer = (MLATransformerConfig if latent else TransformerConfig)(
        **(latent_sizes(latent) if latent else {}),
        tensor_model_parallel_size=config.parallelism.tp,
        sequence_parallel=config.parallelism.is_sequence_parallel,
        num_layers=num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        normalization=shape.normalization.value,
        gated_linear_unit=shape.is_gated,
        activation_func=functional.silu if shape.is_gated else functional.gelu,
        add_bias_linear=shape.has_bias,
        attention_output_gate=shape.has_attention_gate,
        recompute_granularity=None
        if config.recompute is Recompute.NONE
        else config.recompute.value,
        recompute_method="block" if is_full else None,
        recompute_num_layers=num_layers if is_full else None,
        recompute_modules=list(config.recompute_modules) or None,
        num_moe_experts=experts.num_experts if experts else None,
        moe_router_topk=experts.top_k if experts else 2,
        moe_ffn_hidden_size=experts.ffn_hidden_size if experts else None,
        moe_shared_expert_intermediate_size=(experts.shared_ffn_hidden_size or None)
        if experts
        else None,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts.num_experts if experts else None,
        moe_grouped_gemm=False,
        multi_latent_attention=latent is not None,
        qk_layernorm=shape.has_qk_norm,
        normalization=shape.normalization.value,
    )
    if config.is_attention_fused:
        spec.submodules.self_attention.submodules.core_attention = FusedAttention
    model = GPTModel(
        transformer,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        position_embedding_type=shape.position_embedding.value,
    )
    return model.to(dtype).train()


def latent_sizes(latent: LatentAttention) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_head_dim,
        "qk_pos_emb_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
        "rope_type": "rope",
    }


if __name__ == "__main__":
    main()
