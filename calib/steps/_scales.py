"""The few global constants of a machine that only step times identify, with their priors.

A scale multiplies the times of all items that it covers; a constant is a time of its own. Both are
logarithms with a normal prior. Effects are deviations from these constants that layers of some
layouts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..fit.priors import device_prior
from ..fit.rate_priors import generation
from ..network.cluster import host_rates
from ..timeline.items import Floats, Item
from ..workload.collectives import CollectiveCall, GroupRole
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from ..workload.routing import RoutingSource, routing_source
from .base_times import MISALIGNED, MISALIGNED_LOG, Conditions

OPTIMIZERS = frozenset(
    {OperatorKind.OPTIMIZER, OperatorKind.SHARDED_OPTIMIZER, OperatorKind.STATED_OPTIMIZER}
)
OPTIMIZER_NBYTES = 40.0
"""Bytes that fused mixed-precision Adam moves per parameter: fp32 weight and two moments read and
written (24), gradient read for the norm and for the update and zeroed (12), half-precision copy
written, and half of them read back (4)."""
ADAM_NBYTES = 28.0
"""Bytes that Adam moves per parameter on the host: weight, gradient and two moments in fp32 read,
all but the gradient written."""
COPIED_NBYTES = 4.0
"""Bytes each way over the link per parameter: gradients arrive in buffers of the host's fp32 copy
and weights leave it as they are (``HybridDeviceOptimizer`` of megatron.core 0.16.1)."""
HOST_FRAC = 0.5
"""Share of the data sheet's memory rate that Adam reaches on all cores: a billion parameters in
0.22 s on two Xeon 8168 of 256 GB/s (Ren et al. 2021, "ZeRO-Offload", table 4)."""
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
"""Bytes/s of host memory per GPU, by the data sheet of the generation's usual server."""
# Grace (LPDDR5X, 500 GB/s) with one Hopper, or shared by two Blackwell.
_GRACE: Mapping[str, float] = {"gh200": 500e9, "gh-96": 500e9, "gb200": 250e9, "gb300": 250e9}


def host_memory_bytes_per_s(device: str) -> float:
    """Return one GPU's share of its host's memory rate; that of DGX H100 if the server is
    unknown."""
    name = device_prior(device).name
    usual = _SERVERS.get(generation(name).name, _SERVERS["hopper"])
    return _GRACE.get(name, usual)


def optimizer_s(operator: Operator, *, device: str, bytes_per_s: float) -> float:
    """Return the seconds of an optimizer by the bytes it moves, at ``bytes_per_s`` of the device's
    memory.

    The host's share is copied down, updated and copied back, in sequence, or concurrently if copies
    overlap; the device's own share runs meanwhile.

    >>> from ..workload.operators import Phase
    >>> whole = Operator(kind=OperatorKind.OPTIMIZER, phase=Phase.STEP, shape=(10**9,),
    ...     element_nbytes=4)
    >>> optimizer_s(whole, device="NVIDIA H100 80GB HBM3", bytes_per_s=2e12)
    0.02
    """
    if operator.kind is not OperatorKind.STATED_OPTIMIZER:
        return operator.shape[0] * OPTIMIZER_NBYTES / bytes_per_s
    parameters, moved_nbytes, on_host, is_overlapped = operator.shape
    device_s = (parameters - on_host) * moved_nbytes / bytes_per_s
    copies_s = [on_host * COPIED_NBYTES / rate for rate in host_rates(device)]
    update_s = on_host * ADAM_NBYTES / (HOST_FRAC * host_memory_bytes_per_s(device))
    away_s = max(*copies_s, update_s) if is_overlapped else sum(copies_s) + update_s
    return max(device_s, away_s)


Kind = OperatorKind
HOST_MICROBATCH, HOST_STEP = "host_microbatch", "host_step"
FLOOR, FLOOR_RATIO = "floor", "floor_backward_over_forward"
EXPERT_LAUNCHES = "expert_launches"
CONTENTION = "contention"
GROWTH = "growth"
BOOST = "boost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One constant: the centre and deviation of its prior."""

    name: str
    log_center: float = 0.0
    log_sigma: float
    weight: Callable[[Item], float] | None = None
    """Power with which it multiplies the time of an item; None for a time of its own."""


def scales(known: Conditions) -> tuple[Scale, ...]:
    """Return every constant of a machine, with the centres and deviations of its base times where
    they have any.

    ``compute`` is common to all passes and the scales after it cover parts of them, since errors of
    a device's rates are correlated. The launch floor is the host time to launch the forward pass of
    one layer: 0.8 ms on an eager stack of 2021, about half with fused kernels. ``network`` is
    common to all transfers between nodes, since all groups share the cards. Centres and deviations
    were chosen with public step times in view (``benchmarks/RESULTS.md``), and are the same for all
    machines.
    """
    return tuple(
        replace(
            scale,
            log_center=known.log_centers.get(scale.name, scale.log_center),
            log_sigma=known.log_sigmas.get(scale.name, scale.log_sigma),
        )
        for scale in (
            *_scales_of_items(known),
            *_constants(floor_s(is_attention_fused=known.is_attention_fused)),
        )
    )


def floor_s(*, is_attention_fused: bool) -> float:
    """Return the host's seconds for the forward launches of a layer, before any is measured."""
    return 0.4e-3 if is_attention_fused else 0.8e-3


def backward_launches(*, is_python: bool) -> tuple[float, float]:
    """Return the host's time for the backward launches of a layer over those of the forward, and
    the deviation of its log.

    Autograd runs in C++, which launches as many kernels in less time (0.7 and 1.0 on an H200, local
    modules of Megatron), or in Python as Transformer Engine's functions do.
    """
    return (1.6, 0.4) if is_python else (0.8, 0.3)


def _scales_of_items(known: Conditions) -> tuple[Scale, ...]:
    """Return scales of work by kind and pass, then of transfers by role."""
    both = (*_FORWARD, *_BACKWARD)
    return (
        # Levels of 37 public calibrations (device, stack, precision) lie 0.10 apart, and their
        # attention relative to that as much.
        Scale(name="compute", log_sigma=0.12, weight=_of(_PASSES, both)),
        Scale(name="backward", log_sigma=0.1, weight=_of(_PASSES, _BACKWARD)),
        *((_TF32,) if known.has_tf32 else ()),
        Scale(name="attention", log_sigma=0.1, weight=_of(_ATTENTION, both)),
        Scale(name="memory", log_sigma=0.3, weight=_of(_MEMORY, both)),
        Scale(name="head", log_sigma=0.3, weight=_of(_HEAD, both)),
        Scale(
            name=MISALIGNED,
            log_center=MISALIGNED_LOG,
            log_sigma=0.5,
            weight=misalignment,
        ),
        Scale(name="optimizer", log_sigma=0.6, weight=_of(OPTIMIZERS, (Phase.STEP,))),
        Scale(name="tp", log_center=0.4, log_sigma=0.3, weight=_role(GroupRole.TP)),
        Scale(
            name="dp",
            log_center=0.2,
            log_sigma=0.3,
            weight=_role(GroupRole.DP, GroupRole.DP_INSTANCES, GroupRole.EXPERT_DP),
        ),
        Scale(name="pp", log_center=0.5, log_sigma=0.7, weight=_role(GroupRole.PP)),
        Scale(name="network", log_center=0.3, log_sigma=0.4, weight=_crosses_nodes),
        Scale(name="cp", log_sigma=0.5, weight=_role(GroupRole.CP)),
        Scale(
            name="ep",
            log_sigma=0.5,
            weight=_role(GroupRole.EP, GroupRole.EXPERT_TP, GroupRole.EXPERT_TP_EP),
        ),
    )


def _constants(usual_s: float) -> tuple[Scale, ...]:
    """Return the constants of overlap, nodes and pipelines, then of the host."""
    return (
        # Slowdown of overlapping work and transfer; Galvatron's 1.3 to start with.
        Scale(name=CONTENTION, log_center=math.log(0.3), log_sigma=0.4),
        # Growth of the step with each doubling of nodes: jitter, congestion, stragglers.  Series of
        # one layout in public tables: 3.4 % (InternEvo, 8 to 1,024 A100), 0 to 2.7 % elsewhere.
        Scale(name=GROWTH, log_center=math.log(0.005), log_sigma=1.2),
        # Speedup of passes per share of the step that a stage waits: a device that waits draws less
        # power and clocks higher afterwards.
        Scale(name=BOOST, log_center=math.log(0.1), log_sigma=0.7),
        Scale(
            name=HOST_MICROBATCH,
            log_center=math.log(0.3e-3),
            log_sigma=1.0,
            weight=_of({Kind.HOST_MICROBATCH}, tuple(Phase)),
        ),
        Scale(
            name=HOST_STEP,
            log_center=math.log(3e-3),
            log_sigma=1.5,
            weight=_of({Kind.HOST_STEP}, tuple(Phase)),
        ),
        # Router, sort, permutes and quantisation of every expert, relative to a dense layer on the
        # same host: three times as much on a usual one. A host that is slow for reasons of its own
        # (deterministic mode, timers) is not proportionally slower here. If the host waits for the
        # device, ``launched_frac`` has more of them.
        Scale(name=EXPERT_LAUNCHES, log_center=math.log(3.0 * usual_s), log_sigma=0.5),
        # Range between hosts and stacks: 0.3 ms for a layer on one public cluster, 2 on others.
        Scale(name=FLOOR, log_center=math.log(usual_s), log_sigma=0.6),
        Scale(name=FLOOR_RATIO, log_center=math.log(1.6), log_sigma=0.15),
    )


def _in_fp32(item: Item) -> float:
    if not isinstance(item, Operator) or item.kind not in _LINEARS | {Kind.LOGITS}:
        return 0.0
    return float(item.element_nbytes == 4)


def weights(items: Sequence[Item], chosen: Sequence[Scale]) -> Floats:
    """Return the powers of the scales in the time of each item, shape (items, scales)."""
    out = np.zeros((len(items), len(chosen)))
    for column, scale in enumerate(chosen):
        if scale.weight is not None:
            out[:, column] = [scale.weight(item) for item in items]
    return out


def misalignment(item: Item) -> float:
    """Return how far the rows of a product are from a multiple of 8: 0 for a multiple, 1 for odd
    rows.

    Tensor cores need rows of 16 bytes; a vocabulary that is not a multiple of 8 costs up to four
    times the time of logits and loss.
    """
    if not isinstance(item, Operator) or item.kind not in (Kind.LOGITS, Kind.LOSS):
        return 0.0
    return sum(item.shape[-1] % divisor != 0 for divisor in (2, 4, 8)) / 3


_LINEARS = frozenset(kind for kind in Kind if kind.is_linear and kind is not Kind.LOGITS) | {
    Kind.GROUPED_LINEAR,
    Kind.ROUTER,
    Kind.EXPERTS,
}
_ATTENTION = frozenset({Kind.CORE_ATTENTION, Kind.FLASH_ATTENTION})
_HEAD = frozenset({Kind.LOGITS, Kind.LOSS})
_HOSTS = frozenset({Kind.HOST_MICROBATCH, Kind.HOST_STEP, Kind.SHARD_UNIT})
_APART = OPTIMIZERS | _HOSTS
_MEMORY = frozenset(Kind) - _LINEARS - _ATTENTION - _HEAD - _APART
_PASSES = frozenset(Kind) - _APART
_TF32 = Scale(name="tf32", log_sigma=0.5 * math.log(8.0), weight=_in_fp32)
"""Public tables time fp32 without TF32, PyTorch's default; with TF32 the data sheets of A100 and
H100 promise 8 and 7 times the FLOP rate."""
_FORWARD = (Phase.FORWARD, Phase.RECOMPUTE)
_BACKWARD = (Phase.BACKWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT)


def _of(kinds: frozenset[Kind] | set[Kind], phases: tuple[Phase, ...]) -> Callable[[Item], float]:
    def weight(item: Item) -> float:
        is_covered = isinstance(item, Operator) and item.kind in kinds and item.phase in phases
        return float(is_covered)

    return weight


def _crosses_nodes(item: Item) -> float:
    return float(isinstance(item, CollectiveCall) and item.num_nodes > 1)


def _role(*roles: GroupRole) -> Callable[[Item], float]:
    def weight(item: Item) -> float:
        return float(isinstance(item, CollectiveCall) and item.role in roles)

    return weight


ROUTING = "routing"
Effect = tuple[str, int, int, int, int]
"""Identity of an effect that layers share: its name, hidden size, sequence length, tp and
micro-batch."""
EFFECT_SIGMA_LOG: Mapping[str, float] = {
    "width": 0.08,
    "tp": 0.05,
    "micro_batch": 0.03,
    "cell": 0.04,
    ROUTING: 0.15,
}
"""Deviations of layers from the global constants, in logs: by hidden size and sequence, by tp, by
micro-batch and by all of them. Chosen on the public tables; the same for all. Unmeasured routing
has its own: 1.3 to 3.1 times the time of even routing between workloads (Megatron-LM issue
6757)."""


def effects_of(config: RunConfig) -> tuple[Effect, ...]:
    """Return the effects on a layout's layers; layers of another width have other effects."""
    model, tp = config.model, config.parallelism.tp
    micro = config.batch.micro_batch_size
    width = (model.hidden_size, model.seq_length)
    routing = ((ROUTING, *width, 0, 0),) if is_routing_open(config) else ()
    return (
        *routing,
        ("width", *width, 0, 0),
        ("tp", *width, tp, 0),
        ("micro_batch", *width, 0, micro),
        ("cell", *width, tp, micro),
    )


def is_routing_open(config: RunConfig) -> bool:
    """Return True if a router chooses the experts and its balance was not measured."""
    experts = config.model.experts
    if experts is None:
        return False
    return routing_source(experts, config.parallelism.ep) is RoutingSource.ASSUMED


Release = tuple[str, str]
"""A kind of effect on the whole step, and the release or the settings that have it."""
RELEASE, UNMODELLED, STACK = "release", "unmodelled", "stack"
RELEASE_SIGMA_LOG: Mapping[str, float] = {
    RELEASE: 0.03,
    UNMODELLED: 0.13,
    STACK: 0.15,
}
"""Deviation of the level of one release from that of all, in logs. One configuration in two
releases differs by 3.9 % (median of 71, Megatron-Bridge) and 1.5 % (of 79, DGX Cloud), which is
0.03 for each of the two. Unmodelled settings: of 490 recipes of Megatron-Bridge with equal degrees
in consecutive releases 49 differ in a switch, which is worth up to a factor of 1.5,
``sqrt(0.1) log(1.5)``. Eager stacks of PyTorch: torchtitan's own table gains 1.16 times by
``torch.compile`` (Llama 3.1 8B on 8 and 128 H100, December 2024), and how much of that a run has
fused otherwise is open; MPT under FSDP is 2 % off without any (llm-foundry, left out)."""


def releases_of(config: RunConfig) -> tuple[Release, ...]:
    """Return the effects of a layout's release, if stated, of an eager stack, and of unmodelled
    settings, which may be of any size but are the same for layouts that share them."""
    releases: list[Release] = []
    if config.framework:
        releases.append((RELEASE, config.framework))
    if config.is_eager_torch:
        releases.append((STACK, config.framework))
    if config.unmodelled:
        releases.append((UNMODELLED, "; ".join(sorted(config.unmodelled))))
    return tuple(releases)
