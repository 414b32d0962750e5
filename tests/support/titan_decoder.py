"""A decoder that is built and named as torchtitan's, with a dense layer and one of experts.

The names of parts, the shapes that they pass on and what is inside of what are torchtitan's (0.2);
its classes say that they were defined there.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BATCH, SEQ, HIDDEN, HEADS, GROUPS, VOCAB = 2, 6, 8, 4, 2, 32
FFN, EXPERTS, TOP_K = 12, 4, 2
CHANNELS = HIDDEN // HEADS


class ScaledDotProductAttentionWrapper(nn.Module):
    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = HEADS, GROUPS
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, GROUPS * CHANNELS, bias=False)
        self.wv = nn.Linear(HIDDEN, GROUPS * CHANNELS, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x):
        parts = [w(x).view(*x.shape[:2], -1, CHANNELS) for w in (self.wq, self.wk, self.wv)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        return self.wo(self.inner_attention(q * 1.0, k * 1.0, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN))

    def forward(self, x, num_rows):
        rows = torch.split(x, num_rows.tolist())
        return torch.cat(
            [
                functional.silu(part @ w1.T) * (part @ w3.T) @ w2.T
                for part, w1, w2, w3 in zip(rows, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.top_k = TOP_K

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).topk(TOP_K, -1)
        return scores, chosen, torch.bincount(chosen.flatten(), minlength=EXPERTS)


class TokenReorderer(nn.Module):
    def forward(self, scores, chosen):
        order = torch.argsort(chosen.flatten(), stable=True)
        return scores.flatten()[order], order


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.router = GroupedExperts(), TokenChoiceTopKRouter()
        self.reorderer, self.shared_experts = TokenReorderer(), FeedForward()

    def forward(self, x):
        rows = x.view(-1, HIDDEN)
        scores, chosen, num_rows = self.router(rows)
        sorted_scores, order = self.reorderer(scores, chosen)
        at_experts = rows[order // TOP_K] * sorted_scores.unsqueeze(-1)
        back = torch.zeros_like(rows).index_add(
            0, order // TOP_K, self.experts(at_experts, num_rows)
        )
        return self.shared_experts(rows).add(back).view_as(x)


class TransformerBlock(nn.Module):
    def __init__(self, is_sparse: bool) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention, self.is_sparse = Attention(), is_sparse
        if is_sparse:
            self.moe = MoE()
        else:
            self.feed_forward = FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + (self.moe if self.is_sparse else self.feed_forward)(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({"0": TransformerBlock(False), "1": TransformerBlock(True)})
        self.norm, self.output = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)).logsumexp(-1).mean()


for _kind in (Attention, FeedForward, MoE, GroupedExperts, TransformerBlock, Transformer):
    _kind.__module__ = "torchtitan.models.llama3.model"
