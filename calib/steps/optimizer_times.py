"""Optimizers by bytes, where nobody measured them: the device's share, and what a host does."""

from __future__ import annotations

from collections.abc import Mapping

from ..fit.priors import device_prior
from ..fit.rate_priors import generation
from ..network.host_link import host_rates
from ..workload.operators import Operator, OperatorKind

OPTIMIZERS = frozenset(
    {OperatorKind.OPTIMIZER, OperatorKind.SHARDED_OPTIMIZER, OperatorKind.STATED_OPTIMIZER}
)
OPTIMIZER_NBYTES = 40.0
"""Traffic of fused mixed-precision Adam for one parameter: fp32 weight and two moments read and
written (24), gradient read for the norm and for the update and zeroed (12), half-precision copy
written, and half of them read back (4)."""
ADAM_NBYTES = 28.0
"""Of Adam on the host: weight, gradient and two moments in fp32 read, all but the gradient
written."""
COPIED_NBYTES = 4.0
"""Each way over the link, for one parameter: gradients arrive in buffers of the host's fp32 copy
and weights leave it as they are (``HybridDeviceOptimizer`` of megatron.core 0.16.1)."""
HOST_FRAC = 0.5
"""Of the sheet's memory rate that Adam reaches on all cores: a billion parameters in 0.22 s on two
Xeon 8168 of 256 GB/s (Ren et al. 2021, "ZeRO-Offload", table 4)."""
_SERVERS: Mapping[str, float] = {
    # Two Xeon 8168 (6 channels of DDR4-2666 each) for 8 GPUs.
    "volta": 256e9 / 8,
    # DGX A100: two EPYC 7742 (8 channels of DDR4-3200) for 8.
    "ampere": 409.6e9 / 8,
    # DGX H100: two Xeon 8480C (8 channels of DDR5-4800) for 8.
    "hopper": 614.4e9 / 8,
    # DGX B200: two Xeon 8570 (8 channels of DDR5-5600) for 8.
    "blackwell": 716.8e9 / 8,
    # Two EPYC 9654 (12 channels of DDR5-4800) for 8.
    "cdna3": 921.6e9 / 8,
}
"""Bytes/s of the host's memory by the data sheets of a generation's usual server, for one GPU."""
# Grace (LPDDR5X, 500 GB/s) beside one Hopper, or beside two Blackwell.
_GRACE: Mapping[str, float] = {"gh200": 500e9, "gh-96": 500e9, "gb200": 250e9, "gb300": 250e9}


def host_memory_bytes_per_s(device: str) -> float:
    """One GPU's share of its host's memory rate; of DGX H100's where the server is not known."""
    name = device_prior(device).name
    usual = _SERVERS.get(generation(name).name, _SERVERS["hopper"])
    return _GRACE.get(name, usual)


def optimizer_s(operator: Operator, *, device: str, bytes_per_s: float) -> float:
    """Seconds of an optimizer by what it moves, at ``bytes_per_s`` of the device's memory.

    What the host updates goes down, is updated and comes back, one after the other, or beside each
    other where copies overlap; the device's own share runs meanwhile.

    >>> from ..workload.operators import Phase
    >>> whole = Operator(kind=OperatorKind.OPTIMIZER, phase=Phase.STEP, shape=(10**9,),
    ...     element_nbytes=4)
    >>> optimizer_s(whole, device="NVIDIA H100 80GB HBM3", bytes_per_s=2e12)
    0.02
    """
    if operator.kind is not OperatorKind.STATED_OPTIMIZER:
        return operator.shape[0] * OPTIMIZER_NBYTES / bytes_per_s
    parameters, moved_nbytes, on_host, is_overlapped = operator.shape
    own_s = (parameters - on_host) * moved_nbytes / bytes_per_s
    copies_s = [on_host * COPIED_NBYTES / rate for rate in host_rates(device)]
    update_s = on_host * ADAM_NBYTES / (HOST_FRAC * host_memory_bytes_per_s(device))
    away_s = max(*copies_s, update_s) if is_overlapped else sum(copies_s) + update_s
    return max(own_s, away_s)
