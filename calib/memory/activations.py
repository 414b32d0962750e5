"""Bytes that a layer saves in the forward pass of one micro-batch for its backward pass.

Tensors are counted one by one, as autograd saves them in Megatron with Transformer Engine: the
input of each product (16 bit, or 8 bit under fp8), the input of each norm, and the tensors that the
backward passes of attention, activation and router read.  Views count once.  With two-byte
elements, dropout and ffn = 4 h, a dense layer matches Korthikanti et al. (arXiv:2205.05198,
Table 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..layers.blocks import EXPERT_KINDS, BlockKind, opaque_of
from ..workload.config import Fp8Recipe, Recompute, RunConfig
from ..workload.model_shape import Normalization, PositionEmbedding
from ..workload.parallelism import ContextComm, Engine
from ..workload.routing import imbalance, imbalance_over_layers

OFFLOADED_MODULES = frozenset(
    {
        *("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        *("expert_fc1", "moe_act", "fused_group_mlp"),
    }
)
"""Valid names in ``offload_modules``; the inputs of whole recomputed layers are not modelled."""
_GATE_NBYTES = 4
"""Bytes of an element of the gates' sigmoid."""
_FUSED = {"fused_group_mlp": {"expert_fc1", "moe_act"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One tensor saved for the backward pass."""

    name: str
    nbytes: float
    part: str = "attention"
    """``attention`` or ``mlp``: the backward pass frees those of ``mlp`` first."""
    modules: tuple[str, ...] = ()
    """Names in ``recompute_modules`` that drop it."""
    offload: str = ""
    """Name in ``offload_modules`` that moves it to host memory."""
    is_routed: bool = False
    """Its size follows from the tokens that are routed to the experts of a rank."""


def offloaded_nbytes(
    config: RunConfig, tensors: Iterable[SavedTensor], recomputed_modules: frozenset[str]
) -> float:
    """Return the bytes of these tensors of a layer that are in host memory between the passes."""
    return sum(saved.nbytes for saved in tensors if is_offloaded(config, saved, recomputed_modules))


def is_offloaded(config: RunConfig, saved: SavedTensor, recomputed_modules: frozenset[str]) -> bool:
    """Return True if a tensor is in host memory between the passes.

    These are the inputs of the modules in ``offload_modules`` (fine-grained activation offloading
    of Megatron-LM main, 2026).  Recomputed tensors are not copied, and none is under full
    recompute.  Tensors below Megatron's minimum size and those of the last layer, which stay on the
    device, are counted as offloaded too.
    """
    if config.recompute is Recompute.FULL or config.device == "cpu" or not config.offload_modules:
        return False
    names = set(config.offload_modules)
    names = names.union(*(_FUSED.get(name, ()) for name in names))
    return saved.offload in names and recomputed_modules.isdisjoint(saved.modules)


def stashed_nbytes(
    config: RunConfig, tensors: Iterable[SavedTensor], recomputed_modules: frozenset[str]
) -> float:
    """Return the bytes of these tensors of an expert layer that are stashed in pages."""
    return sum(saved.nbytes for saved in tensors if is_stashed(config, saved, recomputed_modules))


def is_stashed(config: RunConfig, saved: SavedTensor, recomputed_modules: frozenset[str]) -> bool:
    """Return True if a tensor is stashed in pages; never without paged stash."""
    experts = config.model.experts
    if experts is None or not experts.stash_factor or config.recompute is Recompute.FULL:
        return False
    return saved.name.startswith("expert") and recomputed_modules.isdisjoint(saved.modules)


ROUTER_NBYTES = 21
"""Router bytes per token and expert: scores, their copy for the balancing loss and probabilities in
fp32, a mask, and the two int32 rows of the permutation map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens and element sizes from which all tensor sizes of a rank follow."""

    tokens: float
    """Tokens of a micro-batch on a rank, before sequence parallelism."""
    split_tokens: float
    """Tokens of a micro-batch on a rank, after sequence parallelism."""
    nbytes: int
    product_nbytes: float
    """Bytes per element of a product's saved input."""

    @property
    def is_gathered(self) -> bool:
        """True if tokens are gathered before a product and scattered after it."""
        return self.split_tokens < self.tokens


def sizes(config: RunConfig) -> Sizes:
    """Return the tokens and element sizes of a layout."""
    par, nbytes = config.parallelism, config.precision.nbytes
    tokens = config.batch.micro_batch_size * config.local_seq_length
    share = par.tp if par.is_sequence_parallel else 1
    # Each element includes its share of a block's scale: 8 bits + 8 per 32 elements (MXFP8) or 32
    # per 128 (``Float8BlockQuantizer``, 1 x 128), 4 bits + 8 per 16 elements (NVFP4); the other
    # recipes have one scale for a whole tensor.
    element_nbytes = {
        Fp8Recipe.NONE: float(nbytes),
        Fp8Recipe.NVFP4: 0.5625,
        Fp8Recipe.MXFP8: 1.03125,
        Fp8Recipe.BLOCKWISE: 1.03125,
    }
    return Sizes(
        tokens=tokens,
        split_tokens=tokens / share,
        nbytes=nbytes,
        product_nbytes=element_nbytes.get(config.fp8, 1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """What a layer saves and works with before recompute drops any tensor: the part that follows
    from the tokens routed to a rank, or the rest."""

    tensors: tuple[SavedTensor, ...]
    in_mlp: float = 0.0
    """Working bytes of the MLP's backward pass."""
    in_attention: float = 0.0
    """Working bytes of attention's backward pass."""
    picked_nbytes: float = 0.0
    """Bytes that PyTorch's operator checkpoints retain, if these are used."""


def layer_part(config: RunConfig, kind: BlockKind) -> LayerPart:
    """Return a layer without what is routed."""
    tensors = tuple(saved for saved in layer_tensors(config, kind) if not saved.is_routed)
    in_mlp, in_attention = 0.0, 0.0
    if kind in _WITH_MLP - EXPERT_KINDS:
        in_mlp = mlp_working_nbytes(config, has_experts=False)
    if kind in _WITH_ATTENTION:
        in_attention = attention_working_nbytes(config)
    elif kind not in _WITH_MLP:
        in_attention = _opaque_working_nbytes(config, kind)
    picked = tensors[0].nbytes + operators_nbytes(config) if picks_operators(config) else 0.0
    return LayerPart(
        tensors=tensors, in_mlp=in_mlp, in_attention=in_attention, picked_nbytes=picked
    )


def routed_part(config: RunConfig) -> LayerPart:
    """Return what is routed in a layer with experts, with the gradients alive in its MLP."""
    in_mlp = mlp_working_nbytes(config, has_experts=True)
    return LayerPart(tensors=routed_tensors(config), in_mlp=in_mlp)


def picks_operators(config: RunConfig) -> bool:
    """Return True if selective checkpointing is PyTorch's, which picks operators, not modules."""
    return config.parallelism.engine is Engine.TORCH and config.model.experts is None


def operators_nbytes(config: RunConfig) -> float:
    """Return the bytes besides its input that a layer saves under PyTorch's operator checkpoints.

    These are the outputs of attention, of reduce-scatters and of every second ``mm``, which a
    product with a bias is not (``_save_list`` of torchtitan's ``parallelize_llama.py``), in 16 bits
    under fp8 too.  Only an eager layer retains the last product, which no later operator reads.
    """
    model, size, tp = config.model, sizes(config), config.parallelism.tp
    query = model.num_attention_heads * model.kv_channels / tp
    key = model.num_query_groups * model.kv_channels / tp
    wide = model.ffn_hidden_size / tp
    products = [query, key, key, model.hidden_size, wide, model.hidden_size]
    if model.is_gated:
        products.insert(4, wide)
    each = products[: -1 if config.is_compiled else None : 2]
    saved = query + (0.0 if model.has_bias else sum(each))
    scattered = 2 * size.split_tokens * model.hidden_size if size.is_gathered else 0.0
    lse = 4 * size.tokens * model.num_attention_heads / tp
    return (saved * size.tokens + scattered) * size.nbytes + lse


_WITH_MLP = frozenset({BlockKind.LAYER, BlockKind.MLP, *EXPERT_KINDS})
_WITH_ATTENTION = frozenset({BlockKind.LAYER, BlockKind.EXPERT_LAYER, BlockKind.ATTENTION})


def layer_tensors(config: RunConfig, kind: BlockKind) -> tuple[SavedTensor, ...]:
    """Return every tensor that one layer saves without recompute; the first is its input."""
    tensors: tuple[SavedTensor, ...] = ()
    if kind in _WITH_ATTENTION:
        tensors += _attention_tensors(config)
    elif kind not in _WITH_MLP:
        tensors += _opaque_tensors(config, kind)
    if kind in _WITH_MLP:
        tensors += _feed_forward_tensors(config, has_experts=kind in EXPERT_KINDS)
    return tensors


def _attention_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return the tensors of a layer's attention, with its norm."""
    is_latent = config.model.latent_attention is not None
    is_norm_apart = is_latent or config.device == "cpu"
    return (
        *_mixer_input(config, ("layernorm",) if is_norm_apart else ()),
        *(latent_tensors(config) if is_latent else qkv_tensors(config)),
        *core_attention_tensors(config),
        SavedTensor(name="attention dropout mask", nbytes=_mask_nbytes(config)),
    )


def _mixer_input(config: RunConfig, norm_modules: tuple[str, ...]) -> tuple[SavedTensor, ...]:
    size = sizes(config)
    hidden = size.split_tokens * config.model.hidden_size
    return (
        SavedTensor(name="input", nbytes=hidden * size.nbytes, offload="attn_norm"),
        SavedTensor(name="input norm", nbytes=_norm_nbytes(config, size.split_tokens)),
        SavedTensor(
            name="input norm output",
            nbytes=hidden * size.product_nbytes,
            modules=norm_modules,
            offload="qkv_linear",
        ),
    )


def _mask_nbytes(config: RunConfig) -> float:
    hidden = sizes(config).split_tokens * config.model.hidden_size
    return hidden if config.hidden_dropout else 0


def _feed_forward_tensors(config: RunConfig, *, has_experts: bool) -> tuple[SavedTensor, ...]:
    """Return the tensors of a layer's MLP or experts, with their norm."""
    size = sizes(config)
    hidden = size.split_tokens * config.model.hidden_size
    is_apart = has_experts or config.device == "cpu"
    return (
        SavedTensor(name="mlp input", nbytes=hidden * size.nbytes, part="mlp", offload="mlp_norm"),
        SavedTensor(name="mlp norm", nbytes=_norm_nbytes(config, size.split_tokens), part="mlp"),
        SavedTensor(
            name="mlp norm output",
            nbytes=hidden * (size.nbytes if has_experts else size.product_nbytes),
            part="mlp",
            # A norm inside the first product is recomputed with the MLP.
            modules=("layernorm",) if is_apart else ("mlp",),
        ),
        *(expert_tensors(config) if has_experts else mlp_tensors(config)),
        SavedTensor(name="mlp dropout mask", nbytes=_mask_nbytes(config), part="mlp"),
    )


def _opaque_tensors(config: RunConfig, kind: BlockKind) -> tuple[SavedTensor, ...]:
    width = opaque_of(config.model, kind).saved_width / config.parallelism.tp
    size = sizes(config)
    return (
        *_mixer_input(config, ()),
        SavedTensor(name="mixer", nbytes=size.tokens * width * size.nbytes),
        SavedTensor(name="mixer dropout mask", nbytes=_mask_nbytes(config)),
    )


def _opaque_working_nbytes(config: RunConfig, kind: BlockKind) -> float:
    """Return the bytes of live gradients in an opaque layer: as many as it saves, and its output's.

    Its kernels are not known, so that this is the order of magnitude.
    """
    size, model = sizes(config), config.model
    width = opaque_of(model, kind).saved_width / config.parallelism.tp
    return (size.tokens * width + size.split_tokens * model.hidden_size) * size.nbytes


def qkv_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return queries, keys and values, and, with QK norm, queries and keys before it."""
    model, size = config.model, sizes(config)
    each = size.tokens / config.parallelism.tp
    query = each * model.num_attention_heads * model.kv_channels
    key = each * model.num_query_groups * model.kv_channels
    norms = 0.0
    if model.has_qk_norm:
        heads = each * (model.num_attention_heads + model.num_query_groups)
        norms = (query + key) * size.nbytes + _norm_nbytes(config, heads)
    qkv = query + 2 * key
    if not config.is_attention_fused and model.num_query_groups < model.num_attention_heads:
        # Unfused attention repeats keys and values for every head.
        qkv = 3 * query
    elif not config.is_attention_fused and model.position_embedding is PositionEmbedding.ROPE:
        # Values are a view of the product's output, so that stays along with the rotated copies.
        qkv += query + key
    return (
        SavedTensor(name="query and key before norm", nbytes=norms),
        SavedTensor(name="query, key, value", nbytes=qkv * size.nbytes, offload="core_attn"),
        *_gate_tensors(config, query),
    )


def _gate_tensors(config: RunConfig, query: float) -> tuple[SavedTensor, ...]:
    """Return the gates, which stay with the values, their sigmoid in fp32, and the product of it
    with attention's output; ``query``: elements of the output."""
    if not config.model.has_attention_gate:
        return ()
    nbytes = query * (_GATE_NBYTES + 2 * sizes(config).nbytes)
    return (SavedTensor(name="attention gate", nbytes=nbytes),)


def latent_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return latents with their norms, and the full queries, keys and values (DeepSeek-V2)."""
    model, size = config.model, sizes(config)
    latent = model.latent_attention
    assert latent is not None
    ranks = latent.q_lora_rank + latent.kv_lora_rank
    num_norms = 2 if latent.q_lora_rank else 1
    heads = size.tokens * model.num_attention_heads / config.parallelism.tp
    widths = 2 * (latent.qk_head_dim + latent.qk_pos_emb_head_dim) + latent.v_head_dim
    up = ("mla_up_proj",)
    return (
        SavedTensor(name="latents", nbytes=size.split_tokens * ranks * size.nbytes),
        SavedTensor(
            name="latent norms", nbytes=num_norms * _norm_nbytes(config, size.split_tokens)
        ),
        SavedTensor(
            name="latent norm outputs",
            nbytes=size.split_tokens * ranks * size.product_nbytes,
            modules=up,
        ),
        SavedTensor(
            name="query, key, value",
            nbytes=heads * widths * size.nbytes,
            modules=up,
            offload="core_attn",
        ),
    )


def core_attention_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return the tensors of core attention besides queries, keys and values, and its output, which
    is the input of the projection."""
    model, par, size = config.model, config.parallelism, sizes(config)
    heads = model.num_attention_heads / par.tp
    latent = model.latent_attention
    width = latent.v_head_dim if latent else model.kv_channels
    output = size.tokens * (model.num_attention_heads * width / par.tp)
    copies = 1
    if par.cp > 1 and par.context_comm is not ContextComm.P2P:
        # The exchange writes a new tensor, and attention retains its own.
        copies = 2
    out_nbytes = copies * output * size.nbytes
    if config.fp8 is not Fp8Recipe.NONE:
        out_nbytes += output * size.product_nbytes
    out = SavedTensor(name="attention output", nbytes=out_nbytes, offload="attn_proj")
    core = ("core_attn",)
    if config.is_attention_fused:
        lse = 4 * size.tokens * heads
        return (SavedTensor(name="log-sum-exp", nbytes=lse, modules=core), out)
    scores = size.tokens * model.seq_length * heads
    # Autograd saves an fp32 softmax output and its cast copy.
    each = size.nbytes + (4 if config.softmax_nbytes > size.nbytes else 0)
    # Dropout adds its output, which the next product saves, and a mask of one byte.
    dropout = size.nbytes + 1 if config.attention_dropout else 0
    softmax = scores * (each + dropout)
    if config.device == "cpu":
        # The fused softmax kernel needs no causal mask; the CPU does.
        softmax += config.local_seq_length * model.seq_length
    return (SavedTensor(name="softmax", nbytes=softmax, modules=core), out)


def mlp_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return the tensors of a dense MLP: input and output of its activation."""
    model, size = config.model, sizes(config)
    wide = size.tokens * model.ffn_hidden_size / config.parallelism.tp
    mlp = ("mlp",)
    up = wide * (2 if model.is_gated else 1) * size.nbytes
    out = wide * size.product_nbytes
    return (
        SavedTensor(name="activation input", nbytes=up, part="mlp", modules=mlp),
        SavedTensor(name="activation output", nbytes=out, part="mlp", modules=mlp),
    )


def expert_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return the tensors of router, dispatched tokens, routed experts and shared experts."""
    model, size = config.model, sizes(config)
    experts = model.experts
    assert experts is not None
    shared = size.tokens * experts.shared_ffn_hidden_size / config.parallelism.tp
    gates = 2 if model.is_gated else 1
    return (
        *routed_tensors(config),
        _in_moe("shared activation input", shared * gates * size.nbytes, "shared_experts"),
        _in_moe("shared activation output", shared * size.product_nbytes, "shared_experts"),
    )


def routed_tensors(config: RunConfig) -> tuple[SavedTensor, ...]:
    """Return the tensors of router, dispatched tokens and routed experts."""
    model, size = config.model, sizes(config)
    experts = model.experts
    assert experts is not None
    routed = _saved_rows(config)
    wide = routed * experts.ffn_hidden_size / config.parallelism.expert_tp
    gates = 2 if model.is_gated else 1
    return (
        _in_moe("router", ROUTER_NBYTES * size.split_tokens * experts.num_experts),
        _in_moe("expert input", routed * model.hidden_size * size.product_nbytes),
        _in_moe("expert probabilities", 4 * routed),
        _in_moe("expert activation input", wide * gates * size.nbytes),
        _in_moe("expert activation output", wide * size.product_nbytes, "moe_act"),
    )


def _in_moe(name: str, nbytes: float, *modules: str) -> SavedTensor:
    return SavedTensor(
        name=name,
        nbytes=nbytes,
        part="mlp",
        modules=("moe", *modules),
        offload=_OFFLOADED.get(name, ""),
        is_routed="shared_experts" not in modules,
    )


_OFFLOADED = {"expert input": "expert_fc1", "expert activation input": "moe_act"}
"""Offloadable expert module for each tensor that is its input."""


def _saved_rows(config: RunConfig) -> float:
    """Return the expert rows saved for the backward phase: those received, a rank's whole buffers,
    or the pages that they are copied to."""
    experts = config.model.experts
    assert experts is not None
    buffer_factor = experts.stash_factor or experts.rank_capacity_factor
    return buffer_factor * even_rows(config) if buffer_factor else saved_tokens(config)


def even_rows(config: RunConfig) -> float:
    """Return the rows that the experts of a rank receive under even routing."""
    experts = config.model.experts
    assert experts is not None
    return sizes(config).split_tokens * experts.top_k * config.parallelism.expert_tp


def routed_tokens(config: RunConfig) -> float:
    """Return the token copies that the experts of the busiest rank receive in one layer.

    Each rank of ep x expert tp sends top_k copies of its tokens and receives as many on average;
    the busiest receives ``imbalance`` times that.  With padding to the capacity each expert
    receives ceil(tokens x top_k / experts x factor) from every rank.
    """
    experts, ep = config.model.experts, config.parallelism.ep
    assert experts is not None
    return _capped_tokens(config, imbalance(experts, ep))


def saved_tokens(config: RunConfig) -> float:
    """Return the mean of ``routed_tokens`` over all layers that a rank retains until the backward
    pass; under full recompute only one layer is present at a time.

    With pp stages, pp micro-batches are in flight in the first one, so that it retains as many
    layers as the model has, whatever pp is.
    """
    experts, model = config.model.experts, config.model
    assert experts is not None
    if config.recompute is Recompute.FULL:
        return routed_tokens(config)
    num_layers = sum(map(model.has_experts, range(model.num_layers)))
    return _capped_tokens(config, imbalance_over_layers(experts, config.parallelism.ep, num_layers))


def _capped_tokens(config: RunConfig, busiest: float) -> float:
    experts = config.model.experts
    assert experts is not None
    tokens = sizes(config).split_tokens
    copies = tokens * experts.top_k * busiest
    if experts.capacity_factor:
        each = math.ceil(tokens * experts.top_k / experts.num_experts * experts.capacity_factor)
        padded = each * experts.num_experts
        copies = padded if experts.is_padded_to_capacity else min(copies, padded)
    return copies * config.parallelism.expert_tp


def mlp_working_nbytes(config: RunConfig, *, has_experts: bool) -> float:
    """Return the bytes of live gradients in the MLP's backward pass, less the bytes that it has
    freed by then; buffers from which pages are filled are excluded."""
    model, par, size = config.model, config.parallelism, sizes(config)
    width = model.hidden_size
    residual = size.split_tokens * width
    gates = 2 if model.is_gated else 1
    if has_experts and model.experts is not None:
        routed = routed_tokens(config)
        wide = routed * model.experts.ffn_hidden_size / par.expert_tp
        # The peak is the largest of: rows before and after sorting, rows and the second product's
        # input, the first product's output.
        moment = max(2 * routed * width, routed * width + wide, gates * wide)
        return (residual + moment) * size.nbytes
    wide = size.tokens * model.ffn_hidden_size / par.tp
    gathered = size.tokens * width if size.is_gathered else 0.0
    return (residual + max(gathered + wide, gates * wide)) * size.nbytes


def attention_working_nbytes(config: RunConfig) -> float:
    """Return the bytes of live gradients in attention's backward pass: output, queries, keys and
    values.

    Context parallelism adds a second copy of these for its transfers.
    """
    model, par, size = config.model, config.parallelism, sizes(config)
    latent = model.latent_attention
    heads = model.num_attention_heads / par.tp
    if latent is not None:
        wide = heads * 2 * (latent.qk_head_dim + latent.qk_pos_emb_head_dim + latent.v_head_dim)
    else:
        wide = (2 * heads + 2 * model.num_query_groups / par.tp) * model.kv_channels
    copies = 2 if par.cp > 1 else 1
    scores_nbytes = 0.0
    if not config.is_attention_fused:
        scores_nbytes = 2 * config.softmax_nbytes * size.tokens * model.seq_length * heads
    residual = size.split_tokens * model.hidden_size
    return (residual + copies * wide * size.tokens) * size.nbytes + scores_nbytes


def _norm_nbytes(config: RunConfig, rows: float) -> float:
    """Return the fp32 statistics of a norm: deviation, and for LayerNorm the mean."""
    return rows * (8 if config.model.normalization is Normalization.LAYER_NORM else 4)
