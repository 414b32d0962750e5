"""MFU: the share of the device's peak FLOP/s that a step puts into the model."""

from __future__ import annotations

from ..fit.laws import OperatorFamily, family, work
from ..fit.priors import UNKNOWN_DEVICE, device_prior
from ..layers.stage_work import stage_operators
from ..workload.config import Fp8Recipe, RunConfig

_PRODUCTS = (OperatorFamily.LINEAR, OperatorFamily.ATTENTION)


def mfu_frac(config: RunConfig, step_time_s: float) -> float | None:
    """FLOP of products and attention in a step, recomputation left out, over what the data sheet
    allows in that time.

    Attention counts over the full square, causal or not (PaLM, Chowdhery et al. 2022, appendix B).
    None on a CPU, and on a device whose data sheet is not known.
    """
    prior = device_prior(config.device)
    if prior.name in (UNKNOWN_DEVICE, "cpu"):
        return None
    nbytes = 1 if config.fp8 is not Fp8Recipe.NONE else config.precision.nbytes
    num_stages = config.parallelism.pp
    flop = sum(_rank_flop(config, stage) for stage in range(num_stages)) / num_stages
    return flop / (prior.peaks_for(nbytes).flop_per_s * step_time_s)


def _rank_flop(config: RunConfig, stage: int) -> float:
    """Of one rank of a stage, in a step."""
    found = stage_operators(config, stage)
    counts = (one for one in (*found.forward, *found.backward) if family(one[0].kind) in _PRODUCTS)
    return config.num_microbatches * sum(work(operator).flop * n for operator, n in counts)
