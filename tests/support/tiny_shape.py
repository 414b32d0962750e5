"""The smallest model that can be described, and one with something to split."""

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

SMALL = ModelShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    vocab_size=256,
)
