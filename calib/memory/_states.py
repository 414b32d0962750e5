"""Weights, gradients and optimizer states: bytes per parameter, and the buffers of FSDP."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..workload.config import Fp8Recipe, Precision, RunConfig
from ..workload.parallelism import Engine

Floats: TypeAlias = "npt.NDArray[np.float64]"
Number: TypeAlias = "float | npt.NDArray[np.float64]"
"""A float, or a float array of shape (layouts,)."""

UNITS_IN_FLIGHT = 2
"""Layers gathered at once: the active one and the next, which is prefetched (Zhao et al. 2023,
section 3.3.2; ``limit_all_gathers`` prevents more)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBytes:
    """Bytes per parameter."""

    weights: Number
    grads: Number
    optimizer: Number
    update: Number
    """Working memory of the optimizer beyond its states, after the passes."""


def state_bytes(config: RunConfig, *, shards: Floats, optimizer: Floats) -> StateBytes:
    """Return the bytes per parameter: 2 + 4 + 12 in mixed precision, 4 + 4 + 8 in fp32.

    Optimizer bytes are divided by the shards; under deeper sharding those of gradients and weights
    are too.  ``optimizer``: its unsharded bytes per parameter (``optimizer_nbytes``).
    """
    par, weights = config.parallelism, _weights_nbytes(config)
    splits_grads = par.shards_grads or (par.shards_weights and not par.keeps_grads_whole)
    return StateBytes(
        weights=weights / shards if par.shards_weights else weights,
        grads=config.grad_nbytes / shards if splits_grads else config.grad_nbytes,
        optimizer=optimizer / shards,
        update=_update_nbytes(config) / shards,
    )


def _weights_nbytes(config: RunConfig) -> float:
    return 4.0 if config.precision is Precision.FP32 else 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes per parameter that FSDP holds temporarily."""

    unit: float
    """Weights of the layers in flight, and their gradients before they are reduced."""
    retained: float
    """Weights of every layer, if gathered weights stay to the end of the backward pass."""
    gathered: float
    """Gathered weights alone: bytes of a unit before any gradient."""
    copied: float
    """Buffer that a gather writes before it is split into weights (FSDP2), in a separate memory
    pool."""

    @staticmethod
    def of(config: RunConfig) -> UnitBytes:
        """Return the bytes of a layout with sharded weights."""
        par, weights = config.parallelism, _weights_nbytes(config)
        # One layer of gradients as computed, and one as reduced.
        grads = 0.0 if par.keeps_grads_whole else weights + config.grad_nbytes
        return UnitBytes(
            unit=UNITS_IN_FLIGHT * weights + grads,
            retained=0.0 if par.regathers_weights else weights,
            gathered=weights,
            copied=weights if par.engine is Engine.TORCH else 0.0,
        )


def optimizer_nbytes(config: RunConfig) -> float:
    """Return the optimizer's bytes per parameter on the device: two moments and, in mixed
    precision, an fp32 copy, less the share offloaded to the host."""
    whole = config.optimizer_state_nbytes or (8 if config.precision is Precision.FP32 else 12)
    return whole * (1 - config.optimizer_offload_frac)


def _update_nbytes(config: RunConfig) -> float:
    """Return the update's working bytes per parameter of a shard: the temporaries of PyTorch's
    ``foreach`` optimizer, or the 16-bit copies of all weights that Transformer Engine makes to cast
    them to 8 bits at once (``cast_master_weights_to_fp8``, which MXFP8 does not run)."""
    if config.keeps_fp8_params and config.fp8 not in (Fp8Recipe.MXFP8, Fp8Recipe.NVFP4):
        return float(config.precision.nbytes)
    is_torch = config.parallelism.engine is Engine.TORCH
    return 4.0 if is_torch and config.device != "cpu" else 0.0


def sharding_key(config: RunConfig) -> tuple[Hashable, ...]:
    """Return the settings of sharding that bytes per parameter depend on besides the shards."""
    par = config.parallelism
    return par.shards_weights, par.shards_grads, par.regathers_weights, par.keeps_grads_whole
