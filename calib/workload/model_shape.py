"""Shape of a model as Megatron builds it: sizes before any split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Integral

from ..errors import ConfigError
from .argument_fields import number, real, switch, words
from .argument_values import QuickEnum

MOST_OTHERS = 10**9
"""Upper limit of a number without an entry in ``MOST``."""
MOST = {
    **dict.fromkeys(("num_layers", "num_prediction_layers", "pp", "vp"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "num_experts", "top_k"), 100_000),
    **dict.fromkeys(("kv_channels", "v_head_dim", "qk_head_dim", "qk_pos_emb_head_dim"), 100_000),
    **dict.fromkeys(("hidden_size", "ffn_hidden_size", "shared_ffn_hidden_size"), 10_000_000),
    **dict.fromkeys(("gpus", "tp", "dp", "cp", "ep", "etp", "ranks_per_node"), 1_000_000),
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), 10_000_000),
    **dict.fromkeys(("num_ranks", "num_microbatches"), 1_000_000),
    "train_iters": 10**12,
    # Megatron's default of some of these, and a common way to say never.
    **dict.fromkeys(("eval_interval", "save_interval", "exit_interval", "bucket_numel"), 2**63),
}
"""Upper limits, far above any real run: a larger number is a mistake and would never finish."""


class Normalization(QuickEnum):
    """Norm of each layer, by Megatron's name."""

    LAYER_NORM = "LayerNorm"
    RMS_NORM = "RMSNorm"


class PositionEmbedding(QuickEnum):
    """Position embedding, by Megatron's name."""

    LEARNED = "learned_absolute"
    ROPE = "rope"
    NONE = "none"


class Dispatcher(QuickEnum):
    """Token dispatcher, by Megatron's name; ``flex`` is DeepEP or HybridEP."""

    ALL_GATHER = "allgather"
    ALL_TO_ALL = "alltoall"
    FLEX = "flex"


USUAL_IMBALANCE = 1.6
"""Assumed tokens on the busiest rank over the mean, if a router chooses and no count exists.  One
layout trained 2.2 times as fast with forced balance (marin issue 7668), workloads lie 1.3 to 3.1
times apart (Megatron-LM issue 6757); experts and exchange are about half of such a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Measured tokens on the busiest of ``num_ranks`` ranks over the mean of all."""

    num_ranks: int
    """Ranks that the experts are spread over."""
    in_pass: float
    """Ratio for the busiest rank of each pass through a layer, mean over passes; it sets the time
    of a step."""
    in_layers: float
    """Ratio for the fullest pass of a rank through all its layers together; it sets the memory."""

    def __post_init__(self) -> None:
        at_least_one("num_ranks", self.num_ranks)
        if min(self.in_pass, self.in_layers) < 1.0:
            raise ConfigError(
                f"a busiest rank has {min(self.in_pass, self.in_layers)} of the mean; give 1 or "
                f"more, tokens of the busiest rank over the mean"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture-of-experts layers of a model."""

    num_experts: int = number("num_experts", "num_moe_experts")
    top_k: int = number("moe_router_topk", default=2, is_stated=True)
    ffn_hidden_size: int = number("moe_ffn_hidden_size", unsaid=0)
    """Width of one routed expert."""
    shared_ffn_hidden_size: int = number("moe_shared_expert_intermediate_size", default=0)
    """Width of all shared experts together; 0 means none."""
    layer_pattern: tuple[bool, ...] = ()
    """Which layers have experts, first to last; empty means all."""
    # Core 0.6 to 0.11 had a second dispatcher with the suffix _seq.
    dispatcher: Dispatcher = field(
        default=Dispatcher.ALL_GATHER,
        metadata=words(
            "moe_token_dispatcher_type",
            Dispatcher.ALL_GATHER,
            spelled={f"{one.value}_seq": one for one in Dispatcher},
        ),
    )
    capacity_factor: float = real("moe_expert_capacity_factor")
    """Most tokens of an expert over the mean; 0 means that none are dropped."""
    is_padded_to_capacity: bool = switch("moe_pad_expert_input_to_capacity")
    is_grouped: bool = switch("moe_grouped_gemm")
    """One grouped product for all experts of a rank instead of one product per expert."""
    overlaps_shared: bool = switch("moe_shared_expert_overlap")
    """The shared experts overlap the exchange of tokens."""
    has_shared_gate: bool = switch("moe_shared_expert_gate")
    """A learned gate scales the output of the shared experts."""
    has_fp32_router: bool = False
    """Weights of routed tokens travel in fp32 (``--moe-router-dtype fp32``)."""
    imbalance: float = 0.0
    """Stated tokens on the busiest rank over the mean of all; 0 if unstated.  Layouts use
    ``routing.imbalance``."""
    measured: tuple[RankLoad, ...] = ()
    """Measured imbalance, by the number of ranks."""
    is_balance_forced: bool = switch("moe_router_force_load_balancing")
    """The router's choice is replaced by an even one, as in benchmarks."""
    overlaps_exchange: bool = switch("overlap_moe_expert_parallel_comm")
    """The exchange overlaps the passes of another micro-batch."""
    delays_weight_gradients: bool = switch("delay_wgrad_compute")
    """Weight gradients are delayed so that they overlap the exchange too."""
    rank_capacity_factor: float = real("moe_expert_rank_capacity_factor")
    """Capacity of a rank's buffers in rows, over even routing, so that the host need not wait for
    counts; 0 if buffers are as large as needed."""
    stash_factor: float = real(
        "moe_paged_stash_buffer_size_factor_cuda", usual=1.1, behind="moe_paged_stash"
    )
    """Capacity of the pages of all layers together in rows, over even routing: activations saved
    for the backward phase are copied there from the large buffers; 0 without."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "ffn_hidden_size"):
            at_least_one(name, getattr(self, name))
        not_negative("shared_ffn_hidden_size", self.shared_ffn_hidden_size)
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}; choose at most "
                f"as many as there are"
            )
        if self.imbalance and self.imbalance < 1.0:
            raise ConfigError(
                f"imbalance {self.imbalance} is below 1; give busiest rank's tokens over mean"
            )
        if self.stash_factor and not self.rank_capacity_factor:
            raise ConfigError(
                "stash_factor needs rank_capacity_factor, but that is 0; give one, such as 1.5"
            )
        if self.is_padded_to_capacity and not self.capacity_factor:
            raise ConfigError(
                "is_padded_to_capacity needs capacity_factor, but that is 0; give one, such as 1.0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-latent attention (DeepSeek-V2): low-rank queries, keys and values."""

    q_lora_rank: int = number("q_lora_rank", default=0)
    """Width of the query latent; 0 means that queries are projected directly."""
    kv_lora_rank: int = number("kv_lora_rank", default=32, is_stated=True)
    qk_head_dim: int = number("qk_head_dim", default=128, is_stated=True)
    qk_pos_emb_head_dim: int = number("qk_pos_emb_head_dim", default=64, is_stated=True)
    v_head_dim: int = number("v_head_dim", default=128, is_stated=True)

    def __post_init__(self) -> None:
        not_negative("q_lora_rank", self.q_lora_rank)
        not_negative("qk_pos_emb_head_dim", self.qk_pos_emb_head_dim)
        for name in ("kv_lora_rank", "qk_head_dim", "v_head_dim"):
            at_least_one(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWindow:
    """Limit on the tokens that a query attends to, in some layers or all."""

    width: int
    """Tokens of the window that ends with the query, or of a chunk."""
    is_chunked: bool = False
    """The sample is split into chunks, and a query attends only within its own."""
    layers: tuple[bool, ...] = ()
    """Which layers have the limit, first to last; empty means all."""

    def __post_init__(self) -> None:
        at_least_one("width", self.width)

    def scores_frac(self, seq_length: int) -> float:
        """Return the scores of a layer with the limit over those of a causal layer without it.

        >>> AttentionWindow(width=2).scores_frac(4), AttentionWindow(width=4).scores_frac(4)
        (0.7, 1.0)
        """
        width = min(self.width, seq_length)
        number = seq_length * width - _triangle(width - 1)
        if self.is_chunked:
            chunks, rest = divmod(seq_length, width)
            number = chunks * _triangle(width) + _triangle(rest)
        return number / _triangle(seq_length)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


ATTENTION_SYMBOLS, MLP_SYMBOL, EXPERTS_SYMBOL = "*+", "-", "E"
OPAQUE_SYMBOLS = "MGDL"
"""Mamba, gated delta net, sparse latent attention, and other linear attention, which Megatron does
not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueLayer:
    """Layer without a law of its time: only runs that have it measure it.

    Sizes are of the whole layer, before any split, without its input norm.
    """

    symbol: str
    """Symbol in ``ModelShape.layer_kinds``."""
    split_numel: int
    """Parameters that tensor parallelism splits, most of them in products."""
    whole_numel: int = 0
    """Parameters that every tensor-parallel rank has."""
    saved_width: int = 0
    """Elements per token that the backward pass needs, split by tensor parallelism."""
    multiply_adds: int = 0
    """Multiplications with additions of one token in the forward pass."""

    def __post_init__(self) -> None:
        if len(self.symbol) != 1 or self.symbol not in OPAQUE_SYMBOLS:
            raise ConfigError(
                f"{_shown(self.symbol)} is not the symbol of an opaque layer; choose from "
                f"{', '.join(OPAQUE_SYMBOLS)}"
            )
        for name in ("split_numel", "whole_numel", "saved_width", "multiply_adds"):
            not_negative(name, getattr(self, name))
        at_least_one("split_numel + whole_numel", self.split_numel + self.whole_numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A GPT or hybrid model as Megatron builds it; sizes of the whole model, before any split."""

    num_layers: int = number("num_layers", "encoder_num_layers")
    """Transformer layers; for a hybrid model, symbols of its pattern."""
    hidden_size: int = number("hidden_size")
    """Width of the residual stream."""
    ffn_hidden_size: int = number("ffn_hidden_size", unsaid=0)
    """Inner width of the MLP; for a gated one, width of each half."""
    num_attention_heads: int = number("num_attention_heads")
    """Query heads."""
    num_query_groups: int = number(
        "num_query_groups", unsaid=1, is_stated=True, behind="group_query_attention"
    )
    """Key and value heads; as many as query heads without grouping."""
    kv_channels: int = number("kv_channels", unsaid=0)
    """Width of a head."""
    seq_length: int = number("seq_length", "encoder_seq_length")
    """Tokens of a sample."""
    vocab_size: int
    """Rows of the embedding after the running layout's padding."""
    is_gated: bool = switch("swiglu", "gated_linear_unit", "quick_geglu")
    """The MLP has a gate, such as SwiGLU."""
    has_bias: bool = switch("add_bias_linear", default=True, option="disable_bias_linear")
    """Linear layers have biases."""
    has_qkv_bias: bool = switch("add_qkv_bias")
    """The query, key and value product has a bias even if ``has_bias`` is off."""
    has_qk_norm: bool = switch("qk_layernorm")
    """Queries and keys are normalised."""
    has_attention_gate: bool = switch("attention_output_gate")
    """Gates as wide as the queries, from the same product, scale the output of attention."""
    is_tied: bool = switch("untie_embeddings_and_output_weights", default=True, is_reversed=True)
    """Embedding and head share their weights."""
    normalization: Normalization = field(
        default=Normalization.LAYER_NORM, metadata=words("normalization", Normalization.LAYER_NORM)
    )
    """Norm of each layer."""
    # Megatron's other kinds (yarn, mrope, relative) have no trained table either.
    position_embedding: PositionEmbedding = field(
        default=PositionEmbedding.LEARNED,
        metadata=words(
            "position_embedding_type", PositionEmbedding.LEARNED, unknown=PositionEmbedding.ROPE
        ),
    )
    """Position embedding."""
    max_position_embeddings: int = number("max_position_embeddings", default=0)
    """Rows of learned positions; 0 means ``seq_length``."""
    experts: Experts | None = None
    """Experts that replace MLPs; None: a dense model."""
    latent_attention: LatentAttention | None = None
    """Latent attention as in DeepSeek-V2; None: heads as above."""
    window: AttentionWindow | None = None
    """Limit on the tokens that attention spans; None: each query attends to all before it."""
    is_residual_parallel: bool = False
    """Attention and MLP both read the input of the layer and are summed together (GPT-NeoX)."""
    num_prediction_layers: int = number("mtp_num_layers", default=0)
    """Layers that predict tokens further ahead (multi-token prediction), after the last one."""
    layer_kinds: str = ""
    """Symbols of a hybrid model's layers, of Megatron's ``--hybrid-layer-pattern``: attention
    (``*``, latent ``+``), MLP (``-``) and experts (``E``) are layers of their own, others opaque;
    empty: each layer has attention, and an MLP or experts."""
    prediction_kinds: str = ""
    """Symbols of the layers inside each prediction layer of a hybrid model."""
    opaque_layers: tuple[OpaqueLayer, ...] = ()
    """Opaque layers of a hybrid model, one for each symbol."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "seq_length",
            "vocab_size",
        ):
            at_least_one(name, getattr(self, name))
        not_negative("num_prediction_layers", self.num_prediction_layers)
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}; choose a divisor of the heads"
            )
        pattern = self.experts.layer_pattern if self.experts else ()
        # An empty pattern means that every layer has experts.
        if pattern and len(pattern) != self.num_layers:
            raise ConfigError(
                f"layer_pattern has {len(pattern)} entries, not num_layers {self.num_layers}; give "
                f"one for each layer"
            )
        limited = self.window.layers if self.window else ()
        if limited and len(limited) != self.num_layers:
            raise ConfigError(
                f"layers of the attention window have {len(limited)} entries, not num_layers "
                f"{self.num_layers}; give one for each layer"
            )
        if self.layer_kinds or self.prediction_kinds:
            self._check_kinds()

    def _check_kinds(self) -> None:
        kinds = self.layer_kinds + self.prediction_kinds
        opaque = "".join(one.symbol for one in self.opaque_layers)
        if len(self.layer_kinds) != self.num_layers:
            raise ConfigError(
                f"layer_kinds has {len(self.layer_kinds)} symbols, not num_layers "
                f"{self.num_layers}; give one for each layer"
            )
        known = ATTENTION_SYMBOLS + MLP_SYMBOL + EXPERTS_SYMBOL + opaque
        if strange := sorted(set(kinds) - set(known)):
            raise ConfigError(
                f"layer pattern {_shown(kinds)} has {' '.join(strange)}, which is not described; "
                f"known are {' '.join(known)}"
            )
        if EXPERTS_SYMBOL in kinds and self.experts is None:
            raise ConfigError("layer pattern has E, but the model no experts; give --num-experts")
        if self.experts is not None and self.experts.layer_pattern:
            raise ConfigError(
                "--moe-layer-freq and a layer pattern are both given; leave the first out, since E "
                "in the pattern places experts"
            )

    @property
    def bare(self) -> ModelShape:
        """The model without sample length, rows of its tables, and settings of how experts run."""
        experts = self.experts
        if experts is not None:
            names = ("num_experts", "top_k", "ffn_hidden_size", "shared_ffn_hidden_size")
            sizes = {name: getattr(experts, name) for name in (*names, "layer_pattern")}
            experts = Experts(**sizes)
        return replace(self, seq_length=1, vocab_size=1, max_position_embeddings=0, experts=experts)

    @property
    def has_dense_mlp(self) -> bool:
        """True if any layer has a dense MLP."""
        if self.layer_kinds:
            return MLP_SYMBOL in self.layer_kinds
        return not all(map(self.has_experts, range(self.num_layers)))

    @property
    def limits(self) -> tuple[float, float]:
        """Layers with an attention window over those with attention, and scores of such a layer
        over those without a window."""
        window = self.window
        if window is None or window.width >= self.seq_length:
            return 0.0, 1.0
        kinds = self.layer_kinds or ATTENTION_SYMBOLS[0] * self.num_layers
        limited = window.layers or (True,) * self.num_layers
        flags = [
            is_limited
            for kind, is_limited in zip(kinds, limited, strict=True)
            if kind in ATTENTION_SYMBOLS
        ]
        return sum(flags) / max(len(flags), 1), window.scores_frac(self.seq_length)

    def has_experts(self, layer: int) -> bool:
        """Return True if the layer (counted from 0) has experts in place of a dense MLP."""
        if self.experts is None:
            return False
        if self.layer_kinds:
            return self.layer_kinds[layer] == EXPERTS_SYMBOL
        return not self.experts.layer_pattern or self.experts.layer_pattern[layer]


def at_least_one(name: str, value: int) -> None:
    """Raise ``ConfigError`` if a size or degree is below one."""
    if not isinstance(value, Integral):
        raise ConfigError(f"{name} {_shown(value)} is not a whole number; give one above 0")
    if value < 1:
        raise ConfigError(f"{name} {_shown(value)} is below 1; give a positive whole number")
    at_most(name, value)


def not_negative(name: str, value: int) -> None:
    """Raise ``ConfigError`` if a size that may be absent is below zero."""
    if not isinstance(value, Integral):
        raise ConfigError(f"{name} {_shown(value)} is not a whole number; give one, or 0 for none")
    if value < 0:
        raise ConfigError(f"{name} {_shown(value)} is below 0; give a whole number, or 0 for none")
    at_most(name, value)


def at_most(name: str, value: int) -> None:
    """Raise ``ConfigError`` if a size is above its limit in ``MOST``."""
    most = MOST.get(name.lstrip("-"), MOST_OTHERS)
    if value > most:
        raise ConfigError(f"{name} {_shown(value)} is above {most:,}; give a smaller number")


def _shown(value: object) -> str:
    if isinstance(value, Integral):
        whole = int(value)
        return str(whole) if abs(whole) < 10**15 else f"{Decimal(whole):.3g}"
    if isinstance(value, str | float):
        return repr(value[:80] if isinstance(value, str) else value)
    return f"({type(value).__name__})"
