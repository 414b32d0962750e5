"""Model shapes and data-parallel runs from a parsed Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from ..workload import (
    VOCAB_MULTIPLE,
    Arguments,
    Batch,
    Cadence,
    Dispatcher,
    Experts,
    LatentAttention,
    ModelShape,
    Normalization,
    Parallelism,
    PositionEmbedding,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
    at_least_one,
)

_PRECISIONS = {"bfloat16": Precision.BF16, "float16": Precision.FP16}
_FULL = "float32"
_NARROW_STATES = 4
"""Bytes per parameter: two moments in 16 bits and no fp32 copy."""
_CAST_STATES = 10
"""Bytes per parameter: 16 for fp32 weights, gradients and moments, less the 2 + 4 bytes of weights
and gradients in mixed precision."""
_AUTOCAST = "fp32 parameters under autocast"


def from_hugging_face(
    config: Mapping[str, object], *, seq_length: int = 0, vocab_multiple: int = VOCAB_MULTIPLE
) -> ModelShape:
    """Return the model of a ``config.json``, as Megatron would build it.

    ``seq_length`` is the training sequence length (0: the model's maximum); the vocabulary is
    padded to a multiple of ``vocab_multiple``, Megatron's 128 x tp.  Raise ``ConfigError`` if the
    ``model_type`` is unknown or a size is missing.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                    "n_positions": 1024, "vocab_size": 50257}).vocab_size
    50304
    """
    kind = str(config.get("model_type"))
    if kind not in _KINDS:
        raise ConfigError(
            f"model_type {kind!r} of config.json is not known; known are: "
            f"{', '.join(sorted(_KINDS))}"
        )
    given = Arguments(config)
    for name in ("num_attention_heads", "n_head"):
        at_least_one(name, given.number(name, default=1))
    shape = _KINDS[kind](given)
    length = seq_length or shape.max_position_embeddings
    vocab = -(-shape.vocab_size // vocab_multiple) * vocab_multiple
    return replace(shape, seq_length=max(length, 1), vocab_size=vocab)


def in_its_precision(run: RunConfig, config: Mapping[str, object]) -> tuple[RunConfig, str]:
    """Return the run in the 16-bit type that ``config.json`` names, as with Megatron's ``--bf16``
    or ``--fp16``, and a note if the file names none; the note is empty otherwise.

    The type is ``dtype`` (``torch_dtype`` before transformers 5) of the model or of its
    ``text_config``.  It is the type that weights are stored in, so the run's precision stays if it
    is fp32 or missing.
    """
    text = config.get("text_config")
    places = (config, text) if isinstance(text, Mapping) else (config,)
    stated = [place.get(name) for place in places for name in ("dtype", "torch_dtype")]
    dtype = str(next(filter(None, stated), "")).rpartition(".")[2]
    precision = _PRECISIONS.get(dtype)
    if precision is None:
        if dtype == _FULL and run.precision is Precision.FP32:
            return run, ""
        words = f"says {dtype}" if dtype else "names no dtype"
        precision_text = f"{run.precision.value} as in the running layout"
        return run, f"config.json {words}: {precision_text}, unless an option sets another"
    if precision is run.precision:
        return run, ""
    is_narrow = precision is Precision.FP16
    return replace(run, precision=precision, reduces_grads_in_bf16=is_narrow), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings that the host reports for a run, besides its model."""

    micro_batch_size: int
    seq_length: int
    num_microbatches: int = 1
    num_ranks: int = 1
    ranks_per_node: int = 0
    is_sharded: bool = False
    """True if parameters, gradients and optimizer state are sharded over the ranks."""
    num_copies: int = 1
    """Copies of the full set of shards, each on an equal part of the ranks (HSDP)."""
    sharded_update_calls: int = 0
    """Optimizer calls per step if FSDP2 shards its tensors; 0 under FSDP1."""
    element_dtype: str = "float32"
    """torch's name for the type of the parameters."""
    autocast_dtype: str = ""
    """torch's name for the type of matrix products, if it is another one."""
    recomputes: bool = False
    cadence: Cadence = field(default_factory=Cadence)
    device: str = "cpu"
    framework: str = ""


def from_training(config: Mapping[str, object], training: Training) -> RunConfig:
    """Return the run of a ``config.json``'s model; raise ``ConfigError`` for an unknown type.

    It is data-parallel over all ranks, either replicated or fully sharded (FSDP, by layers).

    >>> gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128,
    ...         "vocab_size": 512}
    >>> run = from_training(gpt2, Training(micro_batch_size=2, seq_length=32, num_ranks=4))
    >>> run.batch.global_batch_size, run.parallelism.dp, run.model.seq_length
    (8, 4, 32)
    """
    model = from_hugging_face(config, seq_length=training.seq_length, vocab_multiple=1)
    given, dtype = Arguments(config), training.autocast_dtype or training.element_dtype
    unmodelled: tuple[str, ...] = ()
    is_cast = bool(training.autocast_dtype and training.autocast_dtype != training.element_dtype)
    if is_cast:
        unmodelled = (_AUTOCAST,)
    is_narrow = training.element_dtype in _PRECISIONS and not is_cast
    samples = training.micro_batch_size * training.num_microbatches * training.num_ranks
    return RunConfig(
        model=model,
        parallelism=Parallelism(
            dp=training.num_ranks,
            num_optimizer_instances=training.num_copies,
            ranks_per_node=training.ranks_per_node,
            is_optimizer_distributed=training.is_sharded,
            sharding=Sharding.WEIGHTS if training.is_sharded else Sharding.OPTIMIZER,
            # DistributedDataParallel reduces buckets during the backward pass.
            overlaps_grad_reduce=training.num_ranks > 1,
            overlaps_param_gather=training.is_sharded,
        ),
        batch=Batch(micro_batch_size=training.micro_batch_size, global_batch_size=samples),
        precision=_PRECISIONS.get(dtype, Precision.FP32),
        recompute=Recompute.FULL if training.recomputes else Recompute.NONE,
        hidden_dropout=given.real("resid_pdrop", "hidden_dropout"),
        attention_dropout=given.real("attn_pdrop", "attention_dropout"),
        fuses_gradient_accumulation=False,
        # PyTorch stores and reduces gradients in the type of the weights; moments have it too.
        reduces_grads_in_bf16=is_narrow,
        optimizer_state_nbytes=_NARROW_STATES if is_narrow else _CAST_STATES if is_cast else 0,
        sharded_update_calls=training.sharded_update_calls,
        cadence=training.cadence,
        device=training.device,
        framework=training.framework,
        unmodelled=unmodelled,
    )


def _llama(given: Arguments) -> ModelShape:
    """Return a model with grouped queries, rotary positions, RMSNorm, a gated MLP and no bias."""
    hidden, heads = given.required("hidden_size"), given.required("num_attention_heads")
    return ModelShape(
        num_layers=given.required("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=given.required("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=given.number("num_key_value_heads", default=heads),
        kv_channels=given.number("head_dim", default=hidden // heads),
        seq_length=1,
        vocab_size=given.required("vocab_size"),
        is_gated=True,
        has_bias=given.is_on("mlp_bias"),
        has_qkv_bias=given.is_on("attention_bias") and not given.is_on("mlp_bias"),
        is_tied=given.is_on("tie_word_embeddings"),
        normalization=Normalization.RMS_NORM,
        position_embedding=PositionEmbedding.ROPE,
        max_position_embeddings=given.number("max_position_embeddings"),
    )


def _qwen2(given: Arguments) -> ModelShape:
    return replace(_llama(given), has_qkv_bias=True)


def _qwen3(given: Arguments) -> ModelShape:
    return replace(_llama(given), has_qk_norm=True)


def _mixtral(given: Arguments) -> ModelShape:
    shape = _llama(given)
    experts = _experts(given, "num_local_experts", shape.ffn_hidden_size)
    return replace(shape, experts=experts)


def _qwen2_moe(given: Arguments) -> ModelShape:
    shape = _sparse(_qwen2(given), given, "num_experts")
    shared = given.number("shared_expert_intermediate_size")
    if shape.experts is None:
        return shape
    experts = replace(shape.experts, shared_ffn_hidden_size=shared, has_shared_gate=shared > 0)
    return replace(shape, experts=experts)


def _qwen3_moe(given: Arguments) -> ModelShape:
    # transformers 5 writes the second name, contrary to the model's documentation.
    name = "num_experts" if given.number("num_experts") else "num_local_experts"
    return _sparse(_qwen3(given), given, name)


def _sparse(shape: ModelShape, given: Arguments, name: str) -> ModelShape:
    """Add experts to every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
    if not given.number(name):
        return shape
    step, dense = given.number("decoder_sparse_step", default=1), given.words("mlp_only_layers")
    pattern = tuple(
        (layer + 1) % step == 0 and str(layer) not in dense for layer in range(shape.num_layers)
    )
    experts = _experts(given, name, given.required("moe_intermediate_size"))
    return replace(shape, experts=replace(experts, layer_pattern=_unless_all(pattern)))


def _deepseek(given: Arguments) -> ModelShape:
    """Return a model with latent attention; layers before ``first_k_dense_replace`` are dense."""
    shape = _llama(given)
    width = given.number("moe_intermediate_size", default=shape.ffn_hidden_size)
    experts = None
    if given.number("n_routed_experts"):
        step = given.number("moe_layer_freq", default=1)
        first = given.number("first_k_dense_replace")
        pattern = tuple(layer >= first and layer % step == 0 for layer in range(shape.num_layers))
        experts = replace(
            _experts(given, "n_routed_experts", width),
            shared_ffn_hidden_size=width * given.number("n_shared_experts"),
            layer_pattern=_unless_all(pattern),
        )
    return replace(
        shape,
        num_query_groups=shape.num_attention_heads,
        experts=experts,
        # Megatron calls the norms of the latent vectors query-key norms.
        has_qk_norm=True,
        num_prediction_layers=given.number("num_nextn_predict_layers"),
        latent_attention=LatentAttention(
            q_lora_rank=given.number("q_lora_rank"),
            kv_lora_rank=given.required("kv_lora_rank"),
            qk_head_dim=given.required("qk_nope_head_dim"),
            qk_pos_emb_head_dim=given.required("qk_rope_head_dim"),
            v_head_dim=given.required("v_head_dim"),
        ),
    )


def _gpt2(given: Arguments) -> ModelShape:
    hidden, heads = given.required("n_embd"), given.required("n_head")
    return ModelShape(
        num_layers=given.required("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=given.number("n_inner", default=4 * hidden),
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        seq_length=1,
        vocab_size=given.required("vocab_size"),
        is_tied=given.is_on("tie_word_embeddings", default=True),
        max_position_embeddings=given.number("n_positions", "n_ctx"),
    )


def _gpt_neox(given: Arguments) -> ModelShape:
    shape = _llama(given)
    return replace(
        shape,
        is_gated=False,
        has_bias=True,
        has_qkv_bias=False,
        normalization=Normalization.LAYER_NORM,
        is_residual_parallel=given.is_on("use_parallel_residual", default=True),
    )


def _experts(given: Arguments, name: str, width: int) -> Experts:
    return Experts(
        num_experts=given.required(name),
        top_k=given.number("num_experts_per_tok", default=2),
        ffn_hidden_size=width,
        dispatcher=Dispatcher.ALL_TO_ALL,
        is_grouped=True,
    )


def _unless_all(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    return () if all(pattern) else pattern


_KINDS: dict[str, Callable[[Arguments], ModelShape]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
