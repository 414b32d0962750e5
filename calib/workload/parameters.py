"""Parameter tensors of one rank, in Megatron's order, and the buckets that gradients travel in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .config import ModelShape, Normalization, PositionEmbedding, Precision, RunConfig

_START_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
_MIN_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """One parameter of one rank: its elements, and how its gradient is treated."""

    name: str
    numel: int
    is_sequence_parallel: bool = False
    """Replicated over tp, but with a gradient of a part of the sequence only."""
    is_shared_embedding: bool = False
    """Held by the first and the last stage, whose gradients are summed."""


def parameter_tensors(config: RunConfig, stage: int) -> tuple[ParameterTensor, ...]:
    """The tensors of one rank of ``stage`` in the order of ``named_parameters()``.

    Checked against ``megatron.core`` 0.16.1's ``GPTModel`` with the local layer specification.
    """
    check_stage(config, stage)
    model, par = config.model, config.parallelism
    is_first, is_last = stage == 0, stage == par.pp - 1
    vocab = model.vocab_size // par.tp * model.hidden_size
    is_shared = model.is_tied and par.pp > 1
    out: list[ParameterTensor] = []
    if is_first:
        out.append(
            ParameterTensor(name="embedding.word", numel=vocab, is_shared_embedding=is_shared)
        )
        if model.position_embedding is PositionEmbedding.LEARNED:
            rows = model.max_position_embeddings or model.seq_length
            out.append(ParameterTensor(name="embedding.position", numel=rows * model.hidden_size))
    layer = _layer_tensors(model, par.tp)
    out.extend(layer * config.layers_per_stage)
    if is_last:
        out.extend(_norm_tensors(model, "final_norm"))
        if not model.is_tied or par.pp > 1:
            out.append(ParameterTensor(name="output", numel=vocab, is_shared_embedding=is_shared))
    return tuple(out)


@lru_cache(maxsize=4096)
def parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` holds."""
    return sum(t.numel for t in parameter_tensors(config, stage))


def updated_parameters(config: RunConfig, stage: int) -> int:
    """Parameters that one rank of ``stage`` updates: a share when the optimizer is distributed."""
    held = parameters(config, stage)
    par = config.parallelism
    return -(-held // par.dp) if par.is_optimizer_distributed else held


def buckets(config: RunConfig, stage: int) -> tuple[int, ...]:
    """Elements of each gradient bucket, in the order in which the backward phase fills them.

    Without overlap, and on every stage but the first, there is one bucket; with it a bucket closes
    at max(40 M, 1 M x dp) elements.  The distributed optimizer pads starts to 64 and ends to
    lcm(dp, 128), and gives a shared embedding a bucket of its own (``_ParamAndGradBuffer``).
    """
    par = config.parallelism
    is_padded = par.is_optimizer_distributed
    limit = max(_MIN_BUCKET, _BUCKET_PER_RANK * par.dp)
    if not par.overlaps_grad_reduce or stage > 0:
        limit = 0
    divisor = math.lcm(par.dp, _BUCKET_ALIGNMENT) if is_padded else 1
    sizes: list[int] = []
    start = end = 0
    for tensor in reversed(parameter_tensors(config, stage)):
        begin = _pad(end, _START_ALIGNMENT) if is_padded else end
        is_alone = is_padded and tensor.is_shared_embedding
        if is_alone and end > start:
            begin = _pad(begin, divisor)
            sizes.append(begin - start)
            start = begin
        end = begin + tensor.numel
        if is_alone or (limit and end - start >= limit):
            end = _pad(end, divisor)
            sizes.append(end - start)
            start = end
    if end > start:
        sizes.append(_pad(end, divisor) - start)
    return tuple(sizes)


def grad_nbytes(config: RunConfig) -> int:
    """Bytes of a gradient element in the reduction: fp32, but fp16 runs reduce in fp16."""
    return 2 if config.precision is Precision.FP16 else 4


def sequence_parallel_numel(config: RunConfig, stage: int) -> int:
    """Elements whose gradients are all-reduced over tp because of sequence parallelism."""
    return sum(t.numel for t in parameter_tensors(config, stage) if t.is_sequence_parallel)


def check_stage(config: RunConfig, stage: int) -> None:
    """Raise ``ConfigError`` where the layout has no such stage."""
    if not 0 <= stage < config.parallelism.pp:
        raise ConfigError(
            f"stage {stage} is not in pp {config.parallelism.pp}; "
            f"choose from 0 to {config.parallelism.pp - 1}"
        )


def _layer_tensors(model: ModelShape, tp: int) -> tuple[ParameterTensor, ...]:
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels // tp
    qkv = query + 2 * model.num_query_groups * model.kv_channels // tp
    ffn = model.ffn_hidden_size // tp
    fc1 = ffn * (2 if model.is_gated else 1)
    return (
        *_norm_tensors(model, "input_norm"),
        *_linear("proj", query, hidden, has_bias=model.has_bias, is_row=True),
        *_linear("qkv", hidden, qkv, has_bias=model.has_bias),
        *_norm_tensors(model, "mlp_norm"),
        *_linear("fc1", hidden, fc1, has_bias=model.has_bias),
        *_linear("fc2", ffn, hidden, has_bias=model.has_bias, is_row=True),
    )


def _linear(
    name: str, num_in: int, num_out: int, *, has_bias: bool, is_row: bool = False
) -> tuple[ParameterTensor, ...]:
    weight = ParameterTensor(name=f"{name}.weight", numel=num_in * num_out)
    if not has_bias:
        return (weight,)
    return weight, ParameterTensor(name=f"{name}.bias", numel=num_out, is_sequence_parallel=is_row)


def _norm_tensors(model: ModelShape, name: str) -> tuple[ParameterTensor, ...]:
    parts = ("weight", "bias") if model.normalization is Normalization.LAYER_NORM else ("weight",)
    return tuple(
        ParameterTensor(name=f"{name}.{part}", numel=model.hidden_size, is_sequence_parallel=True)
        for part in parts
    )


def _pad(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
