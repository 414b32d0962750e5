"""Priors of the links between ranks before a transfer was measured, by device name.

Bus bandwidths inside a node are those that nccl-tests prints for rings; between nodes, each rank
has a network card at 90 % of its rate (100, 200 and 400 Gb/s with Volta, Ampere and later).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ..records.cluster import NVL72, GpuInterconnect
from ._topology import Topology
from .nccl_tuner import Architecture, LinkClass, Wire

_GIGA = 1e9
REACHED_FRAC = 0.9
"""Share of a network card's rate that a ring's bus bandwidth reaches."""
_LAUNCHES_S = (8.1e-6, 4.5e-6)
"""Small gathers of 2, 4 and 8 GPUs in aiconfigurator's tables, extrapolated to zero hops: up to
Ampere, and since Hopper."""
LATENCY_SIGMA_LOG = 0.5 * math.log(_LAUNCHES_S[0] / _LAUNCHES_S[1])
"""Deviation of a launch and of a step's latency from the device's prior: that of the two
generations from their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrior:
    """Latency of one ring step and bandwidth of the busiest link."""

    step_s: float
    bus_bytes_per_s: float
    base_s: float = 0.0
    """Seconds of a collective before its first hop."""
    links: LinkClass | None = None
    """The links that NCCL prices transfers by; None if another library carries them."""


def network_prior(device: str) -> NetworkPrior:
    """Return the prior of a device by its driver's name; Hopper's if it is unknown.

    >>> network_prior("NVIDIA A100-SXM4-40GB").bus_bytes_per_s / 1e9
    230.0
    >>> network_prior("cpu").links is None
    True
    >>> network_prior("NVIDIA A100 80GB PCIe").links.topology.joint.value
    'bridge'
    """
    low = device.lower().replace("_", "-").replace(" ", "-")
    prior = next((prior for name, prior in _PRIORS.items() if name in low), _UNKNOWN)
    links = prior.links
    if links is None or links.wire is not Wire.NVLINK:
        return prior
    if any(name in low for name in _CARDS):
        bridged = replace(links.topology, joint=GpuInterconnect.BRIDGE)
        # They have no switch to reduce in; the joint accounts for the links that a bridge lacks.
        links = replace(links, topology=bridged, nvls_bytes_per_s=0.0, may_be_bridged=False)
        return replace(prior, links=links)
    if any(name in low for name in _SWITCHED):
        return replace(prior, links=replace(links, may_be_bridged=False))
    return prior


def _nccl(
    wire: Wire,
    generation: Architecture,
    *,
    num_channels: int,
    bus_giga: float,
    network_giga: float,
    nvls_giga: float = 0.0,
) -> NetworkPrior:
    is_old = generation in (Architecture.VOLTA, Architecture.AMPERE)
    links = LinkClass(
        wire=wire,
        generation=generation,
        num_channels=num_channels,
        node_bytes_per_s=bus_giga * _GIGA,
        network_bytes_per_s=network_giga * _GIGA,
        nvls_bytes_per_s=nvls_giga * _GIGA,
    )
    return NetworkPrior(
        # All-gathers and all-reduces of 2, 4 and 8 in the same tables: 1.0 and 0.7 to 0.8 us.
        step_s=(1e-6 if is_old else 0.75e-6) if wire is Wire.NVLINK else 3e-6,
        bus_bytes_per_s=links.node_bytes_per_s,
        base_s=_LAUNCHES_S[not is_old],
        links=links,
    )


_nvlink = partial(_nccl, Wire.NVLINK)


def _pcie(generation: Architecture, bus_giga: float) -> NetworkPrior:
    return _nccl(
        Wire.PCIE, generation, num_channels=4, bus_giga=bus_giga, network_giga=0.5 * bus_giga
    )


_VOLTA = _nvlink(Architecture.VOLTA, num_channels=12, bus_giga=130, network_giga=11)
_AMPERE = _nvlink(Architecture.AMPERE, num_channels=24, bus_giga=230, network_giga=22)
_HOPPER = _nvlink(
    Architecture.HOPPER, num_channels=16, bus_giga=370, network_giga=45, nvls_giga=480
)
_CUT_HOPPER = _nvlink(
    Architecture.HOPPER, num_channels=8, bus_giga=170, network_giga=45, nvls_giga=200
)
_BLACKWELL = _nvlink(
    Architecture.BLACKWELL, num_channels=32, bus_giga=650, network_giga=45, nvls_giga=637
)
# Seven links of each card, 64 and 76.8 GB/s by AMD's data sheets, at three quarters of that.
_CDNA3 = _nvlink(Architecture.HOPPER, num_channels=16, bus_giga=336, network_giga=45)
_CDNA4 = _nvlink(Architecture.HOPPER, num_channels=16, bus_giga=403, network_giga=45)
_FASTER_CARDS = 90 * _GIGA
"""ConnectX-8 of 800 Gb/s in DGX B300 and GB300 NVL72 (NVIDIA's data sheets), at 90 %."""
_RACK = Topology(num_gpus=4, num_cards=4, domain=NVL72)
"""Hosts of a rack of GB200 or GB300: four GPUs with a card each (the same data sheets)."""


def _on(prior: NetworkPrior, **changed: object) -> NetworkPrior:
    assert prior.links is not None
    return replace(prior, links=replace(prior.links, **changed))  # type: ignore[arg-type]


_UNKNOWN = _HOPPER
_SWITCHED = ("sxm", "hbm3", "h200", "h800", "h20", "b200", "b300")
"""Parts of names of GPUs on a board with all GPUs of their node, not in bridged pairs."""
_CARDS = ("pcie", "h100-nvl")
"""Parts of names of GPUs on separate cards, of which a bridge links at most two."""
# Longer names first: "gh200" contains "h200".
_PRIORS: Mapping[str, NetworkPrior] = {
    "gb200": _on(_BLACKWELL, topology=_RACK),
    "gb300": _on(_BLACKWELL, topology=_RACK, network_bytes_per_s=_FASTER_CARDS),
    "b200": _BLACKWELL,
    "b300": _on(_BLACKWELL, network_bytes_per_s=_FASTER_CARDS),
    "h200": _HOPPER,
    "h100": _HOPPER,
    "h800": _CUT_HOPPER,
    "h20": _HOPPER,
    "a100": _AMPERE,
    "a800": _AMPERE,
    "v100": _VOLTA,
    "mi35": _CDNA4,
    "mi3": _CDNA3,
    "l40": _pcie(Architecture.AMPERE, 20),
    "a40": _pcie(Architecture.AMPERE, 20),
    "a10": _pcie(Architecture.AMPERE, 12),
    "t4": _pcie(Architecture.VOLTA, 6),
    "rtx-pro-6000": _pcie(Architecture.BLACKWELL, 40),
    "rtx": _pcie(Architecture.AMPERE, 10),
    "titan": _pcie(Architecture.VOLTA, 8),
    # Gloo in a training step: its threads have to be woken on busy cores. Two ranks on two cores,
    # 2026-11: all-reduce of 4 B 1.0 ms, of 128 KiB 1.3 ms, send 0.8 ms.
    "cpu": NetworkPrior(step_s=500e-6, bus_bytes_per_s=1.5 * _GIGA),
}
