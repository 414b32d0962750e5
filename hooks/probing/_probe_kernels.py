"""Computations of Megatron's modules as plain functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight)


def embed(*values: Tensor) -> Tensor:
    table, *positions, ids = values
    embedded = functional.embedding(ids, table)
    return embedded + positions[0] if positions else embedded


def split_heads(
    x: Tensor, groups: int, channels: int, angles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, the first two with rotary embedding if ``angles`` is
    given."""
    sequence, batch, _ = x.shape
    parts = x.view(sequence, batch, groups, -1)
    sizes = [parts.shape[-1] - 2 * channels, channels, channels]
    queries, keys, values = torch.split(parts, sizes, dim=-1)
    queries = queries.reshape(sequence, batch, -1, channels)
    if angles is not None:
        queries, keys = rotate(queries, angles), rotate(keys, angles)
    return queries, keys, values


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return fused causal attention; grouped keys and values are passed to the kernel
    unrepeated."""
    query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    attend = functional.scaled_dot_product_attention
    if query.shape[1] > key.shape[1]:  # torch 2.5 and later
        attended = attend(query, key, value, is_causal=True, enable_gqa=True)
    else:
        attended = attend(query, key, value, is_causal=True)
    return attended.permute(2, 0, 1, 3).contiguous()


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: Dropout
) -> Tensor:
    """Return attention by scores, mask, softmax and weighted sum, as core's
    ``DotProductAttention``."""
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
    sequence, batch, heads, channels = query.shape
    q, k, v = (t.reshape(sequence, batch * heads, channels) for t in (query, key, value))
    empty = torch.empty(batch * heads, sequence, sequence, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(
        empty, q.transpose(0, 1), k.permute(1, 2, 0), beta=0.0, alpha=channels**-0.5
    )
    shaped = scores.view(batch, heads, sequence, sequence).masked_fill(mask, -10000.0)
    weights = dropout(shaped.softmax(dim=-1)).view(batch * heads, sequence, sequence)
    context = torch.bmm(weights, v.transpose(0, 1)).view(batch, heads, sequence, channels)
    return context.permute(2, 0, 1, 3).contiguous().view(sequence, batch, heads * channels)


class Dropout:
    """Dropout with a private random generator."""

    def __init__(self, rate: float, device: torch.device) -> None:
        self._rate = rate
        self._generator = torch.Generator(device).manual_seed(0) if rate else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._generator is None:
            return x
        keep_mask = torch.empty_like(x).bernoulli_(1.0 - self._rate, generator=self._generator)
        return x * keep_mask.div_(1.0 - self._rate)


def add_residuals(
    x: Tensor, residual: Tensor, biases: tuple[Tensor, ...], dropout: Dropout
) -> Tensor:
    """Apply both bias-dropout-adds of a layer."""
    for bias in biases or (None, None):
        residual = residual + dropout(x if bias is None else x + bias)
    return residual


def gelu(x: Tensor, *bias: Tensor) -> Tensor:
    return functional.gelu(x + bias[0] if bias else x)


def gated(x: Tensor, *bias: Tensor) -> Tensor:
    gate, up = (x + bias[0] if bias else x).chunk(2, dim=-1)
    return functional.silu(gate) * up


def route(x: Tensor, weight: Tensor, top: int) -> Tensor:
    chosen, _ = torch.topk(torch.matmul(x, weight.t()), top, dim=-1)
    return chosen.softmax(dim=-1, dtype=torch.float32)


def grouped(x: Tensor, weights: Tensor) -> Tensor:
    rows = x.shape[0] // len(weights)
    parts = x.split([rows] * (len(weights) - 1) + [x.shape[0] - rows * (len(weights) - 1)])
    return torch.cat([torch.matmul(part, w.t()) for part, w in zip(parts, weights, strict=True)])


class VocabularyLoss(torch.autograd.Function):
    """One rank's share of Megatron's vocabulary-parallel cross-entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float()
        logits = logits - logits.max(dim=-1)[0].unsqueeze(-1)
        is_elsewhere = (targets < 0) | (targets >= logits.shape[-1])
        here = targets.clone()
        here[is_elsewhere] = 0
        rows = torch.arange(here.numel(), device=here.device)
        predicted = logits.view(-1, logits.shape[-1])[rows, here.view(-1)].clone()
        predicted = predicted.view_as(targets)
        predicted[is_elsewhere] = 0.0
        exponentials = torch.exp(logits, out=logits)
        sums = exponentials.sum(dim=-1)
        exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(exponentials, here)
        return sums.log() - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        softmax, targets = ctx.saved_tensors
        softmax.view(-1, softmax.shape[-1])[
            torch.arange(targets.numel(), device=targets.device), targets.view(-1)
        ] -= 1.0
        return softmax.mul_(gradients[0].unsqueeze(-1)), None
