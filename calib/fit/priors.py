"""Assumptions on a machine before it is measured, by the name of its device.

Peaks are 75 % of the data sheet (dense, 2-byte elements), which the best public matrix products
reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..network.cluster import with_domains_as_nodes
from ..network.systems import NetworkPrior, network_prior
from .laws import Ceilings

_ATTAINABLE_FRAC = 0.75
"""Share of a data sheet's peak that large products reach; PyTorch's own estimator assumes the
same."""
_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainable:
    """Share of a data sheet's FLOP rate that large products reach."""

    frac: float
    """Share for the best shape, mean over a vendor's cards; a usual large shape is near it."""
    sigma_log: float
    ceiling_frac: float
    """Share for the best card."""


_NVIDIA = Attainable(frac=0.77, sigma_log=0.08, ceiling_frac=0.87)
"""Mean, deviation and best of thirteen entries of A100, H100, GH200, H200, B200, B300 and GB200 in
2 and 1 bytes (Bekman, Machine Learning Engineering, maximum achievable FLOPS). The deviation is
0.07 for the best shapes, the rest is for others. Error from small to large products in 2 and 1
bytes: 8.5 and 11.8 % with each card's own entry, 7.7 and 13.2 with the mean."""
_CDNA3 = Attainable(frac=0.555, sigma_log=0.15, ceiling_frac=0.68)
_CDNA4 = replace(_CDNA3, frac=0.68)
"""MI300X 0.51 and MI325X 0.60, MI355X 0.68 in the same table."""


YEARS_A_STEP = 2.0
"""Usual years between generations; doubt grows with the root of these steps. Another vendor's
device and elements of another size count as one step more."""
_TF32_YEAR = 2020
"""The year of the first generation with TF32 (NVIDIA A100 Tensor Core GPU architecture, 2020)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Devices of one architecture, which run operators at similar shares of their data sheets."""

    name: str
    year: int
    vendor: str = "nvidia"
    has_fp8: bool = False
    """True if products of 1-byte elements are twice as fast as those of 2 bytes."""
    attainable: Attainable | None = None
    """Shares for products of 2 and 1 bytes; None if the best products were never measured."""

    @property
    def has_tf32(self) -> bool:
        """True if products in fp32 may run on tensor cores."""
        return self.vendor == "nvidia" and self.year >= _TF32_YEAR

    def years_to(self, other: Generation) -> float:
        """Return the years between two generations; another vendor counts as two more."""
        apart = 0.0 if self.vendor == other.vendor else YEARS_A_STEP
        return abs(self.year - other.year) + apart


_GENERATIONS = {
    one.name: one
    for one in (
        Generation(name="gp100", year=2016),
        Generation(name="gp104", year=2016),
        Generation(name="volta", year=2017),
        Generation(name="turing", year=2018),
        Generation(name="ampere", year=2020, attainable=_NVIDIA),
        Generation(name="ga10x", year=2020),
        Generation(name="cdna", year=2020, vendor="amd"),
        Generation(name="cdna2", year=2021, vendor="amd"),
        Generation(name="hopper", year=2022, has_fp8=True, attainable=_NVIDIA),
        Generation(name="ada", year=2023, has_fp8=True),
        Generation(name="cdna3", year=2023, vendor="amd", has_fp8=True, attainable=_CDNA3),
        Generation(name="blackwell", year=2024, has_fp8=True, attainable=_NVIDIA),
        Generation(name="gb20x", year=2025, has_fp8=True),
        Generation(name="cdna4", year=2025, vendor="amd", has_fp8=True, attainable=_CDNA4),
    )
}
_OTHER = Generation(name="unknown", year=2022, vendor="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrior:
    """Prior of one device family: starting values and their deviations."""

    name: str
    generation: Generation
    ceilings: Ceilings
    network: NetworkPrior
    num_units: int | None
    """Multiprocessors that a kernel's blocks are distributed to; 0 for a CPU, None if unknown."""
    fp32_frac: float
    """Rate of fp32 products without TF32 over that of 2-byte elements."""
    fp8_frac: float
    """Rate of 1-byte products over that of 2-byte elements."""
    sigma_log: float
    """Standard deviation of the logarithm of each ceiling."""
    error_sigma_log: float
    """Deviation of an operator of another shape from its estimate before any residual was held out:
    8 % on public GPU step times; more on a CPU, where ranks share caches and cores."""

    def ceilings_for(self, element_nbytes: int) -> Ceilings:
        """Return the ceilings for elements of this size."""
        frac = {1: self.fp8_frac, 2: 1.0}.get(element_nbytes, self.fp32_frac)
        return Ceilings(
            flop_per_s=self.ceilings.flop_per_s * frac,
            bytes_per_s=self.ceilings.bytes_per_s,
            launch_s=self.ceilings.launch_s,
        )

    def attainable(self, element_nbytes: int) -> Attainable | None:
        """Return the share that large products of such elements reach; None if the best were never
        measured.

        >>> device_prior("NVIDIA A100-SXM4-80GB").attainable(2).ceiling_frac
        0.87
        """
        is_measured = element_nbytes <= 2 and self.name != _NEVER_AT_ITS_BEST
        return self.generation.attainable if is_measured else None

    def peaks_for(self, element_nbytes: int) -> Ceilings:
        """Return the rates of a GPU's data sheet, which nothing exceeds."""
        ceilings = self.ceilings_for(element_nbytes)
        return Ceilings(
            flop_per_s=ceilings.flop_per_s / _ATTAINABLE_FRAC,
            bytes_per_s=ceilings.bytes_per_s / _ATTAINABLE_FRAC,
            launch_s=0.0,
        )


def device_prior(device: str) -> DevicePrior:
    """Return the prior of a device by its driver's name; a wide one if the name is unknown.

    >>> device_prior("NVIDIA H100 80GB HBM3").name, device_prior("cpu").name
    ('h100', 'cpu')
    >>> device_prior("Accelerator 9").name
    'unknown'
    """
    low = device.lower().replace("_", "-").replace(" ", "-")
    for name, prior in _PRIORS.items():
        if name in low:
            return prior
    return _UNKNOWN


def is_processor(device: str) -> bool:
    """Return True for a CPU.

    Times do not transfer between a CPU and an accelerator: caches, kernels and their bounds differ,
    so that no ratio of data sheets relates them.

    >>> is_processor("cpu"), is_processor("NVIDIA L4"), is_processor("Accelerator 9")
    (True, False, False)
    """
    return device_prior(device).name == _CPU.name


def _gpu(
    name: str,
    generation: str,
    peak_tera: float,
    fp32_tera: float,
    memory_tera: float,
    num_units: int,
) -> DevicePrior:
    """Build a prior from the data sheet: dense products of 2-byte elements, true fp32, memory."""
    return DevicePrior(
        name=name,
        generation=_GENERATIONS[generation],
        ceilings=Ceilings(
            flop_per_s=_ATTAINABLE_FRAC * peak_tera * _TERA,
            bytes_per_s=_ATTAINABLE_FRAC * memory_tera * _TERA,
            launch_s=1.5e-6,
        ),
        network=with_domains_as_nodes(network_prior(name)),
        num_units=num_units,
        fp32_frac=fp32_tera / peak_tera,
        fp8_frac=2.0 if _GENERATIONS[generation].has_fp8 else 1.0,
        sigma_log=0.5,
        error_sigma_log=0.08,
    )


_NEVER_AT_ITS_BEST = "h20"
"""Its compute units are cut, its memory is not: the share that large products reach was never
measured."""
# Data sheets of NVIDIA and AMD, dense rates without sparsity: HGX B200 and B300, GB200 and GB300
# NVL72, H100, H200 and A100 Tensor Core GPU, L40S and L40 (362 and 181 TFLOP/s), RTX PRO 6000
# Blackwell (GPU architecture paper: 504 with fp32 sums), Instinct MI300X, MI325X, MI350X, MI355X;
# for H20, which has no public one, press reports of its launch. Longer names come first: "gh200"
# contains "h200".
_GPUS = (
    _gpu("gb300", "blackwell", 2500, 80, 8.0, 148),
    _gpu("gb200", "blackwell", 2500, 80, 8.0, 148),
    _gpu("b300", "blackwell", 2250, 80, 8.0, 148),
    _gpu("b200", "blackwell", 2250, 80, 8.0, 148),
    _gpu("gh200", "hopper", 989, 67, 4.0, 132),
    _gpu("gh-96", "hopper", 989, 67, 4.0, 132),
    _gpu("h200", "hopper", 989, 67, 4.8, 132),
    _gpu("h100-pcie", "hopper", 756, 51, 2.0, 114),
    _gpu("h100", "hopper", 989, 67, 3.35, 132),
    _gpu("h800", "hopper", 989, 67, 3.35, 132),
    _gpu("h20", "hopper", 148, 44, 4.0, 78),
    _gpu("a100-pcie-40", "ampere", 312, 19.5, 1.555, 108),
    _gpu("a100-40", "ampere", 312, 19.5, 1.555, 108),
    _gpu("a100", "ampere", 312, 19.5, 2.0, 108),
    _gpu("a800", "ampere", 312, 19.5, 2.0, 108),
    _gpu("a40", "ga10x", 150, 37.4, 0.696, 84),
    _gpu("a10", "ga10x", 125, 31.2, 0.6, 72),
    _gpu("rtx-pro-6000", "gb20x", 504, 125, 1.792, 188),
    _gpu("l40s", "ada", 362, 91.6, 0.864, 142),
    _gpu("l40", "ada", 181, 90.5, 0.864, 142),
    _gpu("l4", "ada", 121, 30.3, 0.3, 58),
    _gpu("v100", "volta", 125, 15.7, 0.9, 80),
    _gpu("p100", "gp100", 21.2, 10.6, 0.732, 56),
    _gpu("p4", "gp104", 5.5, 5.5, 0.192, 20),
    _gpu("t4", "turing", 65, 8.1, 0.32, 40),
    _gpu("mi355", "cdna4", 2517, 157, 8.0, 256),
    _gpu("mi350", "cdna4", 2307, 144, 8.0, 256),
    _gpu("mi325", "cdna3", 1307, 163, 6.0, 304),
    _gpu("mi300", "cdna3", 1307, 163, 5.3, 304),
    _gpu("mi250", "cdna2", 362, 45, 3.2, 208),
    _gpu("mi210", "cdna2", 181, 22.6, 1.6, 104),
    _gpu("mi100", "cdna", 185, 23.1, 1.23, 120),
    _gpu("3090", "ga10x", 71, 35.6, 0.936, 82),
    _gpu("2080", "turing", 54, 13.4, 0.616, 68),
    _gpu("titan", "turing", 65, 16.3, 0.672, 72),
)
_CPU = DevicePrior(
    name="cpu",
    generation=_OTHER,
    ceilings=Ceilings(flop_per_s=60 * _GIGA, bytes_per_s=10 * _GIGA, launch_s=12e-6),
    network=network_prior("cpu"),
    num_units=0,
    fp32_frac=1.0,
    fp8_frac=1.0,
    sigma_log=0.5,
    error_sigma_log=0.2,
)
_PRIORS: Mapping[str, DevicePrior] = {prior.name: prior for prior in (*_GPUS, _CPU)}
UNKNOWN_DEVICE = "unknown"
_UNKNOWN = DevicePrior(
    name=UNKNOWN_DEVICE,
    generation=_OTHER,
    ceilings=Ceilings(flop_per_s=300 * _TERA, bytes_per_s=2 * _TERA, launch_s=2e-6),
    network=network_prior("unknown"),
    num_units=None,
    fp32_frac=0.1,
    fp8_frac=1.0,
    sigma_log=1.5,
    error_sigma_log=0.15,
)
