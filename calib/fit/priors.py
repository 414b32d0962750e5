"""What is assumed of a machine before it was measured, by the name of its device.

Peaks are 75 % of the data sheet (dense, 2-byte elements), which the best public matrix products
reach; bus bandwidths are those that nccl-tests prints inside a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .laws import Ceilings

_ATTAINABLE_FRAC = 0.75
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrior:
    """One ring step's latency and the bandwidth of the busiest link."""

    step_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrior:
    """Starting values of one device family, and how sure they are."""

    name: str
    ceilings: Ceilings
    network: NetworkPrior
    fp32_frac: float
    """Rate of fp32 products without TF32 over that of 2-byte elements."""
    sigma_log: float
    """Standard deviation of the logarithm of each ceiling."""
    error_sigma_log: float
    """How far an operator of another shape lies from its estimate before any was left out: 8 % on
    public GPU step times; on a CPU, ranks share caches and cores."""

    def ceilings_for(self, element_nbytes: int) -> Ceilings:
        """Ceilings for elements of this size."""
        frac = self.fp32_frac if element_nbytes >= 4 else 1.0
        return Ceilings(
            flop_per_s=self.ceilings.flop_per_s * frac,
            bytes_per_s=self.ceilings.bytes_per_s,
            launch_s=self.ceilings.launch_s,
        )


def device_prior(device: str) -> DevicePrior:
    """The prior of a device by its driver's name; a wide one where the name is not known.

    >>> device_prior("NVIDIA H100 80GB HBM3").name, device_prior("cpu").name
    ('h100', 'cpu')
    >>> device_prior("Accelerator 9").name
    'unknown'
    """
    low = device.lower()
    for name, prior in _PRIORS.items():
        if name in low:
            return prior
    return _UNKNOWN


def _gpu(
    name: str, *, peak_tera: float, fp32_tera: float, memory_tera: float, bus_giga: float
) -> DevicePrior:
    return DevicePrior(
        name=name,
        ceilings=Ceilings(
            flop_per_s=_ATTAINABLE_FRAC * peak_tera * _TERA,
            bytes_per_s=_ATTAINABLE_FRAC * memory_tera * _TERA,
            launch_s=1.5e-6,
        ),
        network=NetworkPrior(step_s=4e-6, bus_bytes_per_s=bus_giga * _GIGA),
        fp32_frac=fp32_tera / peak_tera,
        sigma_log=0.5,
        error_sigma_log=0.08,
    )


# Longer names first: "gh200" holds "h200".
_PRIORS: Mapping[str, DevicePrior] = {
    "gb200": _gpu("gb200", peak_tera=2500, fp32_tera=80, memory_tera=8.0, bus_giga=650),
    "b200": _gpu("b200", peak_tera=2250, fp32_tera=80, memory_tera=8.0, bus_giga=650),
    "gh200": _gpu("gh200", peak_tera=989, fp32_tera=67, memory_tera=4.0, bus_giga=370),
    "h200": _gpu("h200", peak_tera=989, fp32_tera=67, memory_tera=4.8, bus_giga=370),
    "h100": _gpu("h100", peak_tera=989, fp32_tera=67, memory_tera=3.35, bus_giga=370),
    "a100": _gpu("a100", peak_tera=312, fp32_tera=19.5, memory_tera=1.8, bus_giga=230),
    "v100": _gpu("v100", peak_tera=125, fp32_tera=15.7, memory_tera=0.9, bus_giga=130),
    "cpu": DevicePrior(
        name="cpu",
        ceilings=Ceilings(flop_per_s=60 * _GIGA, bytes_per_s=10 * _GIGA, launch_s=12e-6),
        # Gloo in a training step: the threads that transfer have to be woken on busy cores.  Two
        # ranks on two cores, 2026-11: all-reduce of 4 B 1.0 ms, of 128 KiB 1.3 ms, send 0.8 ms.
        network=NetworkPrior(step_s=500e-6, bus_bytes_per_s=1.5 * _GIGA),
        fp32_frac=1.0,
        sigma_log=1.0,
        error_sigma_log=0.2,
    ),
}
_UNKNOWN = DevicePrior(
    name="unknown",
    ceilings=Ceilings(flop_per_s=300 * _TERA, bytes_per_s=2 * _TERA, launch_s=2e-6),
    network=NetworkPrior(step_s=5e-6, bus_bytes_per_s=200 * _GIGA),
    fp32_frac=0.1,
    sigma_log=1.5,
    error_sigma_log=0.15,
)
