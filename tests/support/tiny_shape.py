"""The smallest model that can be described."""

from __future__ import annotations

from forerun.calib.workload.config import ModelShape

TINY = ModelShape(
    num_layers=1,
    hidden_size=4,
    ffn_hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=2,
    seq_length=2,
    vocab_size=8,
)
