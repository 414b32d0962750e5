"""A Llama of two layers and its data, for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama() -> LlamaForCausalLM:
    """Return the model, with weights drawn from the current random state."""
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=32,
        )
    )


def tiny_data() -> Any:
    """Return 64 rows of 16 tokens."""
    tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]
