"""A small decoder that is built and named as Megatron's, without Megatron."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN, SEQ, BATCH, HEADS = 8, 4, 2, 2


class Attention(nn.Module):
    def forward(self, query, key, value, mask=None):
        scores = torch.einsum("sbhd,tbhd->bhst", query, key).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", scores, value).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.core_attention = Attention()
        self.linear_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        q, k, v = self.linear_qkv(hidden).unflatten(-1, (3, HEADS, -1)).unbind(2)
        return self.linear_proj(self.core_attention(q * 2.0, k, v)), None


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.linear_fc2 = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden):
        return self.linear_fc2(torch.relu(self.linear_fc1(hidden))), None


class TransformerLayer(nn.Module):
    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = SelfAttention()
        self.pre_mlp_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, hidden_states):
        hidden = hidden_states + self.self_attention(self.input_layernorm(hidden_states))[0]
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))[0], None


class LanguageModelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(16, HIDDEN)

    def forward(self, input_ids):
        return self.word_embeddings(input_ids).transpose(0, 1).contiguous()


class Model(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = LanguageModelEmbedding()
        self.layers = nn.ModuleList([TransformerLayer(3), TransformerLayer(4)])
        self.final_layernorm = nn.LayerNorm(HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, 16)

    def compute_language_model_loss(self, labels, logits):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids):
        hidden = self.embedding(ids)
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(lambda h, m=layer: m(h)[0], hidden, use_reentrant=True)
            else:
                hidden = layer(hidden_states=hidden)[0]
        logits = self.output_layer(self.final_layernorm(hidden))
        return self.compute_language_model_loss(ids.T, logits)
