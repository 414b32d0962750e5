"""Model shapes and data-parallel runs from a parsed Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from ..workload.argument_values import Arguments
from ..workload.config import VOCAB_MULTIPLE, Batch, Cadence, Precision, Recompute, RunConfig
from ..workload.model_shape import ModelShape, at_least_one
from ..workload.parallelism import Parallelism, Sharding
from .hugging_face_shape import shape_of_keys, text_keys

_PRECISIONS = {"bfloat16": Precision.BF16, "float16": Precision.FP16}
_FULL = "float32"
_NARROW_STATES = 4
"""Bytes per parameter: two moments in 16 bits and no fp32 copy."""
_CAST_STATES = 10
"""Bytes per parameter: 16 for fp32 weights, gradients and moments, less the 2 + 4 bytes of weights
and gradients in mixed precision."""
_RECORDED = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gpt2"),
        *("deepseek_v2", "deepseek_v3", "kimi_k2", "gpt_neox"),
    }
)
"""Families whose modules a running loop records as operators, by their names."""
_AUTOCAST = "fp32 parameters under autocast"


def from_hugging_face(
    config: Mapping[str, object], *, seq_length: int = 0, vocab_multiple: int = VOCAB_MULTIPLE
) -> ModelShape:
    """Return the model of a ``config.json``, as Megatron would build it.

    ``seq_length`` is the training sequence length (0: the model's maximum); the vocabulary is
    padded to a multiple of ``vocab_multiple``, Megatron's 128 x tp.  The language model of a
    ``text_config`` counts alone.  Raise ``ConfigError`` if a size is missing, or if the keys of an
    unknown ``model_type`` leave its layers open.

    >>> from_hugging_face({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
    ...                    "n_positions": 1024, "vocab_size": 50257}).vocab_size
    50304
    """
    keys = text_keys(config)
    given = Arguments(keys)
    for name in ("num_attention_heads", "n_head"):
        at_least_one(name, given.number(name, default=1))
    shape = shape_of_keys(keys)
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
    fuses_head: bool = False
    """True if the output product and the loss run in pieces (Liger)."""
    cadence: Cadence = field(default_factory=Cadence)
    device: str = "cpu"
    framework: str = ""


def from_training(config: Mapping[str, object], training: Training) -> RunConfig:
    """Return the run of a ``config.json``'s model; raise ``ConfigError`` for a type whose modules
    are not recorded.

    It is data-parallel over all ranks, either replicated or fully sharded (FSDP, by layers).

    >>> gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128,
    ...         "vocab_size": 512}
    >>> run = from_training(gpt2, Training(micro_batch_size=2, seq_length=32, num_ranks=4))
    >>> run.batch.global_batch_size, run.parallelism.dp, run.model.seq_length
    (8, 4, 32)
    """
    keys = text_keys(config)
    if keys.get("model_type") not in _RECORDED:
        raise ConfigError(
            f"modules of model_type {keys.get('model_type')!r} are not recorded; recorded are "
            f"{', '.join(sorted(_RECORDED))}"
        )
    model = from_hugging_face(config, seq_length=training.seq_length, vocab_multiple=1)
    given, dtype = Arguments(keys), training.autocast_dtype or training.element_dtype
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
        fuses_head=training.fuses_head,
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
