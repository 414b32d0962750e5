"""Weight matrices and parameter counts of a layer and of the ends of a model, on one rank.

Arithmetic for planners, which ask for thousands of layouts; a test holds it against the tensors of
``parameters``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..workload.config import ModelShape, Normalization, PositionEmbedding, RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A weight of a linear product as one rank holds it."""

    rows: int
    columns: int
    count: int = 1
    """How many of this shape the rank holds: its experts, or 1."""
    has_bias: bool = False
    is_expert: bool = False

    @property
    def numel(self) -> int:
        """Parameters of all of them, with bias."""
        return self.count * self.rows * (self.columns + self.has_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numel:
    """Parameters by how their optimizer state is split: with the experts or not."""

    dense: int
    expert: int


def attention_matrices(config: RunConfig) -> tuple[Matrix, ...]:
    """Products of self-attention; the down projections of latent attention are not split by tp."""
    model, tp = config.model, config.parallelism.tp
    hidden, heads = model.hidden_size, model.num_attention_heads // tp
    latent = model.latent_attention
    if latent is None:
        query = heads * model.kv_channels
        qkv = query + 2 * model.num_query_groups * model.kv_channels // tp
        return (
            Matrix(rows=qkv, columns=hidden, has_bias=model.has_bias or model.has_qkv_bias),
            Matrix(rows=hidden, columns=query, has_bias=model.has_bias),
        )
    query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
    rank = latent.q_lora_rank
    queries = (
        (Matrix(rows=rank, columns=hidden), Matrix(rows=query, columns=rank))
        if rank
        else (Matrix(rows=query, columns=hidden),)
    )
    return (
        *queries,
        Matrix(rows=latent.kv_lora_rank + latent.qk_pos_emb_head_dim, columns=hidden),
        Matrix(rows=heads * (latent.qk_head_dim + latent.v_head_dim), columns=latent.kv_lora_rank),
        Matrix(rows=hidden, columns=heads * latent.v_head_dim),
    )


def mlp_matrices(config: RunConfig, *, has_experts: bool) -> tuple[Matrix, ...]:
    """Products of a dense MLP, or of the experts (routed and shared) of a rank."""
    model, par, experts = config.model, config.parallelism, config.model.experts
    if not has_experts or experts is None:
        return _two(model, model.ffn_hidden_size // par.tp)
    routed = _two(
        model,
        experts.ffn_hidden_size // par.expert_tp,
        count=experts.num_experts // par.ep,
        is_expert=True,
    )
    shared = experts.shared_ffn_hidden_size // par.tp
    return (*routed, *_two(model, shared)) if shared else routed


def layer_numel(config: RunConfig, *, has_experts: bool) -> Numel:
    """Parameters of one layer on one rank, norms and router with the dense ones."""
    model, latent = config.model, config.model.latent_attention
    mlp = mlp_matrices(config, has_experts=has_experts)
    norms = 2 * model.hidden_size
    if model.has_qk_norm:
        ranks = (
            2 * model.kv_channels if latent is None else latent.q_lora_rank + latent.kv_lora_rank
        )
        norms += ranks
    experts = model.experts
    router = 0
    if has_experts and experts is not None:
        router = (experts.num_experts + experts.has_shared_gate) * model.hidden_size
    matrices = (*attention_matrices(config), *mlp)
    return Numel(
        dense=sum(m.numel for m in matrices if not m.is_expert)
        + norms * norm_tensors(model)
        + router,
        expert=sum(m.numel for m in mlp if m.is_expert),
    )


def embedding_numel(config: RunConfig) -> int:
    """Parameters of the token embedding and of learned positions."""
    model = config.model
    rows = 0
    if model.position_embedding is PositionEmbedding.LEARNED:
        rows = model.max_position_embeddings or model.seq_length
    return vocabulary_numel(config) + rows * model.hidden_size


def vocabulary_numel(config: RunConfig) -> int:
    """Elements of the embedding of tokens, or of the output product, on one rank."""
    return config.model.vocab_size // config.parallelism.tp * config.model.hidden_size


def prediction_numel(config: RunConfig) -> int:
    """Parameters of one step of multi-token prediction beside its layer: three norms, a product."""
    hidden = config.model.hidden_size
    return 3 * hidden * norm_tensors(config.model) + 2 * hidden * hidden // config.parallelism.tp


def norm_tensors(model: ModelShape) -> int:
    """Tensors of a norm: weight, and bias where it centres."""
    return 2 if model.normalization is Normalization.LAYER_NORM else 1


def _two(
    model: ModelShape, ffn: int, *, count: int = 1, is_expert: bool = False
) -> tuple[Matrix, Matrix]:
    has_bias = model.has_bias
    up = ffn * (2 if model.is_gated else 1)
    hidden = model.hidden_size
    return (
        Matrix(rows=up, columns=hidden, count=count, has_bias=has_bias, is_expert=is_expert),
        Matrix(rows=hidden, columns=ffn, count=count, has_bias=has_bias, is_expert=is_expert),
    )
