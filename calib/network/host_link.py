"""What copies between a device's memory and its host's take, by the name of the device."""

from __future__ import annotations

from collections.abc import Mapping

from ..workload import Operator, Phase

LINK_SIGMA_LOG = 0.3
"""Of a host's rate from that of the sheet: hosts with one socket for eight devices, pages that are
not pinned; 45 to 56 GB/s where the sheet says 64."""
_GIGA = 1e9
SLOT_BYTES_PER_S: Mapping[int, float] = {
    generation: 16 * transfers_per_s * 128 / 130 / 8
    for generation, transfers_per_s in ((3, 8e9), (4, 16e9), (5, 32e9))
}
"""Sixteen lanes of PCIe 3, 4 and 5 in one direction, by generation: 8, 16 and 32 GT/s, of whose 130
bits 128 are data (PCI-SIG's base specifications)."""
_WHOLE_PACKET_FRAC = 0.86
"""Of a slot's rate: headers of packets of 256 bytes, and the answers to them."""
_COPY_S = 10e-6
"""What one copy takes before its first byte."""
_C2C = (297 * _GIGA, 375 * _GIGA)
"""To the host and back over NVLink-C2C of a GH200, of 450 (Schieffer et al. 2024,
arXiv:2407.07850)."""
_SHARED_C2C = (243 * _GIGA, 243 * _GIGA)
"""Two devices of a GB200 share a Grace, whose memory gives 486 GB/s (STREAM, the same source)."""
_GEN3, _GEN4, _GEN5 = (
    (_WHOLE_PACKET_FRAC * rate, _WHOLE_PACKET_FRAC * rate) for rate in SLOT_BYTES_PER_S.values()
)
_RATES: tuple[tuple[str, tuple[float, float]], ...] = (
    *(("gb300", _SHARED_C2C), ("gb200", _SHARED_C2C), ("gh200", _C2C), ("gh-96", _C2C)),
    *((name, _GEN5) for name in ("b200", "b300", "h100", "h200", "h800", "h20")),
    *((name, _GEN3) for name in ("v100", "t4", "titan")),
)
"""Longer names first; sixteen lanes of the PCIe of their year."""


def host_rates(device: str) -> tuple[float, float]:
    """Bytes/s of large copies to the host's memory, and out of it.

    Devices that are not known have the fourth generation of PCIe.

    >>> [rate / 1e9 for rate in host_rates("NVIDIA GH200 96GB")]
    [297.0, 375.0]
    """
    low = device.lower()
    return next((rates for name, rates in _RATES if name in low), _GEN4)


def host_copy_s(operator: Operator, device: str) -> float:
    """Seconds of one copy: forwards to the host's memory, backwards out of it.

    >>> from ..workload import OperatorKind
    >>> copy = Operator(kind=OperatorKind.HOST_COPY, phase=Phase.FORWARD, shape=(10**9,),
    ...     element_nbytes=1)
    >>> [round(1e3 * host_copy_s(copy, name), 1) for name in ("NVIDIA H100", "NVIDIA GH200")]
    [18.5, 3.4]
    """
    return _COPY_S + operator.shape[0] / host_rates(device)[operator.phase is Phase.BACKWARD]
