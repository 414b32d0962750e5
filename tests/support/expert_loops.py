"""A loop of its own over a mixture of experts of transformers, under DDP or FSDP2 on CPU ranks.

torchrun --nproc-per-node 2 expert_loops.py ddp|fsdp2 --calibrate --calibrate-total-steps=24
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_STEPS = 24


def experts() -> Qwen3MoeForCausalLM:
    """Return two layers of four experts each, two of them for each token."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=256,
            max_position_embeddings=64,
        )
    )


def main(kind: str) -> None:
    distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model: Any = experts()
    if kind == "fsdp2":
        mesh = distributed.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        tokens = torch.randint(0, 256, (4, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
