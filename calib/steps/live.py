"""Base times of a run that was sampled while it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..fit import Calibration, Estimates, Estimator
from ..layers import BlockKind, block, launched_frac, stage_operators
from ..timeline import Item
from ..workload import CollectiveCall, Operator, OperatorKind, Phase, RunConfig
from .base_times import Conditions
from .model import HOST_SCATTER_LOG
from .scales import FLOOR, FLOOR_RATIO, floor_s

IN_SITU: Mapping[str, float] = dict.fromkeys(
    ("misaligned", "tp", "dp", "pp", "network", "host_microbatch", "host_step"), 0.0
)
"""Centres of what samples of training hold already: transfers as they ran during other work."""


_Constants = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Seconds that a host takes for one pass of a layer."""

    layer_s: float
    sigma_log: float
    """Steps of one run lie as far apart, and operators that were not timed may take anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTimes:
    """What an estimator that was fitted on a run's own samples says, with its deviations."""

    estimator: Estimator
    conditions: Conditions

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Hooks time operators as a layout has them: nothing is known under another name."""
        return False

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``."""
        operators = [i for i, item in enumerate(items) if isinstance(item, Operator)]
        calls = [i for i, item in enumerate(items) if isinstance(item, CollectiveCall)]
        asked = self.estimator
        return Estimates.of_parts(
            len(items),
            (
                (operators, asked.operators([items[i] for i in operators])),  # type: ignore[misc]
                (calls, asked.collectives([items[i] for i in calls])),  # type: ignore[misc]
            ),
        )


def live_times(calibration: Calibration, config: RunConfig) -> LiveTimes:
    """Those of the run that trained in this layout."""
    # On a device that had work to do the samples say nothing of what its host takes.
    open_frac = 0.0 if config.device == "cpu" else 1.0 - calibration.waiting_frac
    centers, sigmas = _launches(calibration, config) if open_frac else ({}, {})
    return LiveTimes(
        estimator=calibration,
        conditions=Conditions(
            launched_frac=open_frac,
            is_attention_fused=config.is_attention_fused,
            bytes_per_s=calibration.ceilings.bytes_per_s,
            is_in_situ=True,
            fp8=config.fp8,
            has_norms_inside=config.has_norms_inside and _has_live_products(calibration),
            weight_fracs=calibration.weight_fracs,
            log_centers={**IN_SITU, **centers},
            log_sigmas=sigmas,
            network=calibration.transfers.carrying,
        ),
    )


def _launches(calibration: Calibration, config: RunConfig) -> tuple[_Constants, _Constants]:
    """Centres and deviations of what the host takes to launch a layer, in logs, where its time for
    operators was measured; else the bound that a busy device gives."""
    forward = _launch(calibration, config, Phase.FORWARD)
    if forward is None:
        return _floor(calibration, config), {}
    # The floor is that of an x86 host, and layouts on another have a factor of it.
    center = math.log(forward.layer_s / launched_frac(config, BlockKind.LAYER))
    centers, sigmas = {FLOOR: center}, {FLOOR: forward.sigma_log}
    backward = _launch(calibration, config, Phase.BACKWARD)
    if backward is not None:
        centers[FLOOR_RATIO] = math.log(backward.layer_s / forward.layer_s)
        sigmas[FLOOR_RATIO] = backward.sigma_log
    return centers, sigmas


def _launch(calibration: Calibration, config: RunConfig, phase: Phase) -> _Launch | None:
    """One pass of a layer without experts; None where no operator of it was timed, or where a graph
    replays part of it, whose launches have no marks."""
    if config.uses_cuda_graphs or config.model.experts is not None:
        return None
    layer = block(config, BlockKind.LAYER)
    found = [
        (calibration.measured[operator], count)
        for operator, count in (layer.forward if phase is Phase.FORWARD else layer.backward)
        if operator in calibration.measured
    ]
    known_s = sum(one.host_s * count for one, count in found)
    if not known_s:
        return None
    spread_log = sum(one.host_s * count * one.host_sigma_log for one, count in found) / known_s
    known_frac = sum(count for one, count in found if one.host_s) / sum(count for _, count in found)
    return _Launch(
        layer_s=known_s / known_frac,
        sigma_log=math.hypot(spread_log, HOST_SCATTER_LOG, 1.0 - known_frac),
    )


def _floor(calibration: Calibration, config: RunConfig) -> _Constants:
    """The launch floor where a layer that did not wait shows that it lies lower, log of seconds:
    half of the layer's forward pass, since the host took any part of that."""
    usual_s = floor_s(is_attention_fused=config.is_attention_fused)
    counts = [(o, n) for o, n in stage_operators(config, 0).forward if o in calibration.measured]
    if not counts:
        return {}
    estimates = calibration.operators([operator for operator, _ in counts])
    layers = sum(len(config.layers_of(chunk)) for chunk in config.chunks_of(0))
    layer_s = float(estimates.time_s @ [count for _, count in counts]) / max(1, layers)
    return {FLOOR: math.log(layer_s / 2)} if 0.0 < layer_s / 2 < usual_s else {}


def _has_live_products(calibration: Calibration) -> bool:
    """True where training itself timed products: probes run them without the norms inside."""
    return any(
        operator.kind.is_linear and operator.kind is not OperatorKind.LOGITS and not found.is_probe
        for operator, found in calibration.measured.items()
    )
