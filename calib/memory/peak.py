"""Peak device memory of a layout, per stage and part, the verdict on it, and host memory.

Weights and optimizer follow Megatron's ``theoretical_memory_usage.py``; activations are counted
tensor by tensor (``activations.py``), and per schedule (``stage_memory.in_flight``).  Host memory
has the offloaded optimizer states and activations of the host's devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum

import numpy as np

from ..plain_json import JsonObject
from ..workload.config import Precision, RunConfig
from ..workload.config_json import Encoded, encode_fields, encoded
from ..workload.layout_table import LayoutTable
from .pipelines import overhead_nbytes, pipelines

FITS_PROBABILITY = 0.9
"""Least probability at which a layout counts as fitting; below one half it does not fit."""
_LEAST_PROBABILITY = 0.5
RESERVE_FRAC = 0.03
"""Reserved beyond allocated bytes, due to fragmentation: a run with 69 to 70 GB allocated had 72 to
73 GB reserved (Megatron-Bridge's card of GPT-OSS 120B)."""
SIGMA_FRAC = 0.08
"""Standard deviation of allocated bytes: below 0.80 of the device none of 454 published runs ran
out of memory (Fujii et al., 2411.06465), so that 0.80 is 2.5 deviations away."""
SIGMA_FRAC_CALIBRATED = 0.03
"""Standard deviation once a measured peak offsets the estimate: 0.92 in place of 0.80."""
OVERHEAD_SIGMA_FRAC = 0.5
"""Standard deviation of the overhead: a context takes 0.3 to 0.5 GB, the buffers of a communicator
0.2 to 0.8 GB, depending on version and channels."""
_GRAD_NBYTES = 4
"""Host bytes of the gradient of a parameter that the host updates (Megatron's
``hybrid_optimizer.py`` pins them)."""


class Verdict(Enum):
    """How well a layout fits in memory."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate(Encoded):
    """Peak bytes of one rank of a stage, by part."""

    stage: int
    weights_nbytes: int
    grads_nbytes: int
    optimizer_nbytes: int
    activations_nbytes: int
    logits_nbytes: int
    """Logits, loss and gradients of the output product; 0 if the peak is elsewhere."""
    scratch_nbytes: int = 0
    """Placeholders, gather buffers and workspaces that stay for the whole run."""
    overhead_nbytes: int = 0
    """Context and communicators: on the device, outside the allocator."""
    offset_nbytes: int = 0
    """Measured peak of a layout minus its estimate."""
    open_nbytes: int = 0
    """Deviation due to unstated widths of gradients and states, or to an offset that was measured
    in another layout; not a part of the total."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(**encode_fields(self), total_nbytes=self.total_nbytes)

    @property
    def allocated_nbytes(self) -> int:
        """Bytes that the allocator reports (``torch.cuda.max_memory_allocated``)."""
        return (
            self.weights_nbytes
            + self.grads_nbytes
            + self.optimizer_nbytes
            + self.activations_nbytes
            + self.logits_nbytes
            + self.scratch_nbytes
            + self.offset_nbytes
        )

    @property
    def reserved_nbytes(self) -> int:
        """Bytes that the allocator reserves (``torch.cuda.max_memory_reserved``)."""
        return round((1 + RESERVE_FRAC) * self.allocated_nbytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes in use as the driver reports them (``nvidia-smi``)."""
        return self.reserved_nbytes + self.overhead_nbytes

    @property
    def total_nbytes(self) -> int:
        """Sum of all parts."""
        return self.allocated_nbytes + self.overhead_nbytes


def memory(config: RunConfig, *, offset_nbytes: int = 0) -> MemoryEstimate:
    """Return the peak memory of the fullest stage."""
    return max(stage_memories(config, offset_nbytes=offset_nbytes), key=lambda m: m.total_nbytes)


def memory_with_offset(
    config: RunConfig, measured: RunConfig, offset_nbytes: int
) -> MemoryEstimate:
    """Return the peak memory of a layout, with the offset of the one that was measured.

    The offset may be the same in every layout (buffers, workspaces) or grow with what a layout
    allocates; the difference of the two is a deviation. What exceeds the measured layout's own
    estimate (the process on a CPU) is no share of it.
    """
    # A measured peak already reflects the true widths of gradients and states.
    estimate = memory(replace(config, has_open_widths=False), offset_nbytes=offset_nbytes)
    modelled = memory(measured).allocated_nbytes
    growth = estimate.allocated_nbytes - offset_nbytes - modelled
    unlike = min(abs(offset_nbytes) / modelled, 1.0) * growth
    return replace(estimate, open_nbytes=round(math.hypot(unlike, estimate.open_nbytes)))


def stage_memories(config: RunConfig, *, offset_nbytes: int = 0) -> list[MemoryEstimate]:
    """Return the peak memory of one rank of each stage."""
    table = LayoutTable.of([config])
    ((_, pipeline),) = pipelines(table)
    overhead = int(overhead_nbytes(table)[0])
    out = []
    for stage in range(config.parallelism.pp):
        parts = pipeline.stage_bytes(stage)
        numbers = {
            f"{one.name}_nbytes": round(float(np.ravel(getattr(parts, one.name))[0]))
            for one in fields(parts)
        }
        estimate = MemoryEstimate(
            stage=stage, **numbers, overhead_nbytes=overhead, offset_nbytes=offset_nbytes
        )
        out.append(_opened(estimate, config))
    return out


OPEN_GRADS_FRAC, OPEN_STATES_FRAC = 0.35, 0.22
"""Deviations of gradients and of optimizer states of unstated width from Megatron's defaults: half
of NVIDIA's recipes reduce in 2 bytes of 4, a fifth stores 6 bytes of 12."""


OPEN_FRAC = math.log(2) / 1.645
"""Deviation of what is allocated if a setting that moves memory is not modelled: a factor of 2 is
the 90 % interval, as it is for a step."""


def _opened(estimate: MemoryEstimate, config: RunConfig) -> MemoryEstimate:
    grads, states = estimate.grads_nbytes, estimate.optimizer_nbytes
    deviation = 0.0
    if config.has_open_widths:
        deviation = math.hypot(OPEN_GRADS_FRAC * grads, OPEN_STATES_FRAC * states)
    if config.has_open_memory:
        deviation = math.hypot(deviation, OPEN_FRAC * estimate.allocated_nbytes)
    return replace(estimate, open_nbytes=round(deviation))


def memory_offset(config: RunConfig, measured_peak_nbytes: int) -> int:
    """Return the bytes to add to estimates of other layouts: measured peak minus this estimate.

    The peak is the allocator's, which includes neither context nor communicators.
    """
    return measured_peak_nbytes - memory(config).allocated_nbytes


def fit_probability(
    estimate: MemoryEstimate, capacity_nbytes: int, *, is_calibrated: bool = False
) -> float:
    """Return the probability that the layout runs on a device of that capacity, in 0..1.

    Allocated bytes with the allocator's reserve, and the overhead outside it, have independent
    normal errors.

    >>> estimate = MemoryEstimate(stage=0, weights_nbytes=80, grads_nbytes=0, optimizer_nbytes=0,
    ...                           activations_nbytes=0, logits_nbytes=0)
    >>> [round(fit_probability(estimate, capacity), 3) for capacity in (100, 90, 80)]
    [0.997, 0.882, 0.354]
    """
    allocated, overhead = estimate.allocated_nbytes, estimate.overhead_nbytes
    spread = SIGMA_FRAC_CALIBRATED if is_calibrated else SIGMA_FRAC
    sigma = math.hypot(spread * allocated, OVERHEAD_SIGMA_FRAC * overhead, estimate.open_nbytes)
    headroom_nbytes = capacity_nbytes - (1 + RESERVE_FRAC) * allocated - overhead
    if not sigma:
        return float(headroom_nbytes >= 0)
    return 0.5 * math.erfc(-headroom_nbytes / (sigma * math.sqrt(2)))


def verdict(
    estimate: MemoryEstimate, capacity_nbytes: int | None, *, is_calibrated: bool = False
) -> Verdict:
    """Return the verdict on an estimate; ``UNKNOWN`` without a capacity.

    ``FITS`` from a probability of 0.9 on, ``DOES_NOT_FIT`` below 0.5, ``TIGHT`` between.
    """
    if not capacity_nbytes:
        return Verdict.UNKNOWN
    probability = fit_probability(estimate, capacity_nbytes, is_calibrated=is_calibrated)
    if probability < _LEAST_PROBABILITY:
        return Verdict.DOES_NOT_FIT
    return Verdict.FITS if probability >= FITS_PROBABILITY else Verdict.TIGHT


def host_nbytes(config: RunConfig) -> int:
    """Return the host bytes per node of the fullest stage's ranks; 0 if nothing is offloaded.

    These are the bytes that offloading saves on the devices, plus gradients of parameters that
    hosts update.
    """
    if not (config.optimizer_offload_frac or config.offload_modules):
        return 0
    whole = stage_memories(replace(config, optimizer_offload_frac=0.0, offload_modules=()))
    width = config.optimizer_state_nbytes or (8 if config.precision is Precision.FP32 else 12)
    ranks, par = [], config.parallelism
    for plain, offloaded in zip(whole, stage_memories(config), strict=True):
        states = plain.optimizer_nbytes - offloaded.optimizer_nbytes
        away = max(plain.activations_nbytes - offloaded.activations_nbytes, 0)
        ranks.append(states * (width + _GRAD_NBYTES) // width + away)
    return max(ranks) * min(par.ranks_per_node or par.num_ranks, par.num_ranks)
