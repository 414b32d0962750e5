"""A data-parallel training run of a Hugging Face model, replicated or sharded, as a run config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..workload.argument_values import Arguments
from ..workload.config import Batch, Cadence, Precision, Recompute, RunConfig
from ..workload.parallelism import Parallelism
from .hugging_face import from_hugging_face

_PRECISIONS = {"bfloat16": Precision.BF16, "float16": Precision.FP16}
_SHARDED = "parameters sharded between steps (FSDP)"
_AUTOCAST = "fp32 parameters under autocast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the host says of a run beyond its model."""

    micro_batch_size: int
    seq_length: int
    num_microbatches: int = 1
    num_ranks: int = 1
    ranks_per_node: int = 0
    is_sharded: bool = False
    """Each rank keeps its part of parameters, gradients and optimizer state."""
    element_dtype: str = "float32"
    """torch's name of the type that parameters have."""
    autocast_dtype: str = ""
    """torch's name of the type that products run in, where it is another."""
    recomputes: bool = False
    cadence: Cadence = field(default_factory=Cadence)
    device: str = "cpu"
    framework: str = ""


def from_training(config: Mapping[str, object], training: Training) -> RunConfig:
    """The run of the model that ``config.json`` holds; raises ``ConfigError`` for an unknown kind.

    Data parallelism over all ranks.  Sharded parameters count as Megatron's distributed optimizer:
    the gathers of the backward phase and what they save in memory are listed as not modelled.

    >>> gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128,
    ...         "vocab_size": 512}
    >>> run = from_training(gpt2, Training(micro_batch_size=2, seq_length=32, num_ranks=4))
    >>> run.batch.global_batch_size, run.parallelism.dp, run.model.seq_length
    (8, 4, 32)
    """
    model = from_hugging_face(config, seq_length=training.seq_length, vocab_multiple=1)
    dtype = training.autocast_dtype or training.element_dtype
    unmodelled = [_SHARDED] if training.is_sharded else []
    if training.autocast_dtype and training.autocast_dtype != training.element_dtype:
        unmodelled.append(_AUTOCAST)
    samples = training.micro_batch_size * training.num_microbatches * training.num_ranks
    return RunConfig(
        model=model,
        parallelism=Parallelism(
            dp=training.num_ranks,
            ranks_per_node=training.ranks_per_node,
            is_optimizer_distributed=training.is_sharded,
            # DistributedDataParallel reduces buckets while the backward pass goes on.
            overlaps_grad_reduce=training.num_ranks > 1,
            overlaps_param_gather=training.is_sharded,
        ),
        batch=Batch(micro_batch_size=training.micro_batch_size, global_batch_size=samples),
        precision=_PRECISIONS.get(dtype, Precision.FP32),
        recompute=Recompute.FULL if training.recomputes else Recompute.NONE,
        hidden_dropout=_probability(config, "resid_pdrop", "hidden_dropout"),
        attention_dropout=_probability(config, "attn_pdrop", "attention_dropout"),
        fuses_gradient_accumulation=False,
        cadence=training.cadence,
        device=training.device,
        framework=training.framework,
        unmodelled=tuple(unmodelled),
    )


def _probability(config: Mapping[str, object], *names: str) -> float:
    return Arguments(config).real(*names)
