"""Peak device memory of a layout, per stage and part, and whether it fits.

Weights and optimizer follow Megatron's ``theoretical_memory_usage.py``; activations Korthikanti et
al. (arXiv:2205.05198, Table 2), per tensor, so that grouped queries, gated units and fp32 are
covered.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .config import Precision, Recompute, RunConfig
from .blocks import recomputed_layers
from .parameters import check_stage, parameters

FITS_FRAC = 0.80
"""Below this share of the device, 454 published runs never ran out (Fujii et al., 2411.06465)."""
FITS_FRAC_CALIBRATED = 0.92
"""The same once the estimate is offset by a measured peak."""


class Verdict(Enum):
    """Whether a layout fits in memory."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes of the fullest stage, by part."""

    stage: int
    weights_nbytes: int
    grads_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    logits_nbytes: int
    offset_nbytes: int = 0
    """What a measured peak had beyond the estimate of its own layout."""

    @property
    def total_nbytes(self) -> int:
        """All parts together."""
        return (
            self.weights_nbytes
            + self.grads_nbytes
            + self.optimizer_nbytes
            + self.activations_nbytes
            + self.logits_nbytes
            + self.offset_nbytes
        )

    def to_json(self) -> dict[str, int]:
        """A JSON object with every part and the total."""
        out = {name: int(getattr(self, name)) for name in self.__dataclass_fields__}
        return out | {"total_nbytes": int(self.total_nbytes)}


def memory(
    config: RunConfig, *, offset_nbytes: int = 0, is_attention_fused: bool | None = None
) -> MemoryEstimate:
    """Peak memory of the stage that needs most.

    ``is_attention_fused`` says that no seq x seq matrix is kept (flash or fused kernels); left out,
    it is assumed everywhere but on the CPU.
    """
    stages = range(config.parallelism.pp)
    found = [
        stage_memory(config, s, offset_nbytes=offset_nbytes, is_attention_fused=is_attention_fused)
        for s in stages
    ]
    return max(found, key=lambda m: m.total_nbytes)


def stage_memory(
    config: RunConfig,
    stage: int,
    *,
    offset_nbytes: int = 0,
    is_attention_fused: bool | None = None,
) -> MemoryEstimate:
    """Peak memory of one rank of ``stage``: all in-flight micro-batches held at once."""
    check_stage(config, stage)
    if is_attention_fused is None:
        is_attention_fused = config.device != "cpu"
    held = parameters(config, stage)
    weights, grads, optimizer = _state_nbytes(config)
    return MemoryEstimate(
        stage=stage,
        weights_nbytes=held * weights,
        grads_nbytes=held * grads,
        optimizer_nbytes=round(held * optimizer),
        activations_nbytes=round(_activations_nbytes(config, stage, is_attention_fused)),
        logits_nbytes=_logits_nbytes(config, stage),
        offset_nbytes=offset_nbytes,
    )


def in_flight_microbatches(config: RunConfig, stage: int) -> int:
    """Micro-batches whose activations a stage holds at once under 1F1B."""
    return min(config.num_microbatches, config.parallelism.pp - stage)


def memory_offset(
    config: RunConfig, measured_peak_nbytes: int, *, is_attention_fused: bool | None = None
) -> int:
    """Bytes to add to estimates of other layouts: measured peak minus estimate of this one."""
    estimate = memory(config, is_attention_fused=is_attention_fused)
    return measured_peak_nbytes - estimate.total_nbytes


def verdict(
    estimate: MemoryEstimate, capacity_nbytes: int | None, *, is_calibrated: bool = False
) -> Verdict:
    """Whether the estimate fits; ``UNKNOWN`` without a capacity.

    ``TIGHT`` lies between the share that has proven safe and the whole device.
    """
    if not capacity_nbytes:
        return Verdict.UNKNOWN
    share = estimate.total_nbytes / capacity_nbytes
    if share > 1:
        return Verdict.DOES_NOT_FIT
    safe = FITS_FRAC_CALIBRATED if is_calibrated else FITS_FRAC
    return Verdict.FITS if share <= safe else Verdict.TIGHT


def _state_nbytes(config: RunConfig) -> tuple[int, int, float]:
    """Bytes per parameter of weights, gradients and optimizer.

    Mixed precision: 2 + 4 + 12 (fp32 copy and two moments); fp32: 4 + 4 + 8.
    """
    par = config.parallelism
    shards = par.dp if par.is_optimizer_distributed else 1
    if config.precision is Precision.FP32:
        return 4, 4, 8 / shards
    return 2, 4, 12 / shards


def _activations_nbytes(config: RunConfig, stage: int, is_attention_fused: bool) -> float:
    """In-flight activations of layers and embedding, plus one layer that is being recomputed."""
    covered = recomputed_layers(config)
    layer = _layer_nbytes(config, is_attention_fused)
    kept = _replicated_nbytes(config, config.precision.nbytes)
    each = covered * kept + (config.layers_per_stage - covered) * layer
    if stage == 0:
        tokens = config.batch.micro_batch_size * config.model.seq_length
        each += 8 * tokens + _replicated_nbytes(config, 1)
    working = layer if covered else 0.0
    return in_flight_microbatches(config, stage) * each + working


def _layer_nbytes(config: RunConfig, is_attention_fused: bool) -> float:
    """Activations of one layer: replicated part 10 sbh, split part 24 sbh / t, scores 5 abs^2 / t.

    The factors are those of two-byte elements and ffn = 4 h.
    """
    model, tp = config.model, config.parallelism.tp
    nbytes, batch = config.precision.nbytes, config.batch.micro_batch_size
    tokens = batch * model.seq_length
    replicated = _replicated_nbytes(config, 4 * nbytes + 2)
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    ffn = model.ffn_hidden_size * (3 if model.is_gated else 2)
    split = nbytes * tokens * (2 * query + key_value + ffn) / tp
    if is_attention_fused or config.recompute is Recompute.SELECTIVE:
        return replicated + split
    scores = batch * model.num_attention_heads * model.seq_length**2
    return replicated + split + (2 * nbytes + 1) * scores / tp


def _replicated_nbytes(config: RunConfig, element_nbytes: int) -> float:
    """Bytes of (tokens, hidden): split over tp only under sequence parallelism."""
    tokens = config.batch.micro_batch_size * config.model.seq_length
    par = config.parallelism
    share = par.tp if par.is_sequence_parallel else 1
    return element_nbytes * tokens * config.model.hidden_size / share


def _logits_nbytes(config: RunConfig, stage: int) -> int:
    """Final norm, input of the head, and logits with their fp32 copy, of one micro-batch."""
    par = config.parallelism
    if stage != par.pp - 1:
        return 0
    nbytes = config.precision.nbytes
    tokens = config.batch.micro_batch_size * config.model.seq_length
    per_logit = 4 if config.precision is Precision.FP32 else 4 + nbytes
    logits = per_logit * tokens * config.model.vocab_size // par.tp
    return round(_replicated_nbytes(config, 2 * nbytes)) + logits
