"""Base times of a run that was sampled while it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..fit import Calibration, Estimates, Estimator
from ..layers import BlockKind, block, launched_frac, stage_operators
from ..timeline import Item
from ..workload import CollectiveCall, Operator, OperatorKind, Phase, RunConfig
from .base_times import Conditions, mean_scores_frac
from .model import HOST_SCATTER_LOG
from .scales import FLOOR, FLOOR_RATIO, floor_s

IN_SITU: Mapping[str, float] = dict.fromkeys(
    ("misaligned", "tp", "dp", "pp", "network", "host_microbatch", "host_step"), 0.0
)
"""Centres of constants whose effect samples of training already include: transfers as they ran
during other work."""


_Constants = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Seconds that a host takes for one pass of a layer."""

    layer_s: float
    sigma_log: float
    """Deviation of log time: the scatter of one run's steps, and the share of operators that were
    not timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTimes:
    """Estimates with their deviations of an estimator that was fitted on the run's own samples."""

    estimator: Estimator
    conditions: Conditions

    def has(self, kind: OperatorKind, phase: Phase) -> bool:
        """Return False: hooks time operators as a layout has them, never under another name."""
        return False

    def estimates(self, items: Sequence[Item]) -> Estimates:
        """See ``BaseTimes``."""
        operators = [i for i, item in enumerate(items) if isinstance(item, Operator)]
        calls = [i for i, item in enumerate(items) if isinstance(item, CollectiveCall)]
        estimator = self.estimator
        return Estimates.of_parts(
            len(items),
            (
                (operators, estimator.operators([items[i] for i in operators])),  # type: ignore[misc]
                (calls, estimator.collectives([items[i] for i in calls])),  # type: ignore[misc]
            ),
        )


def live_times(calibration: Calibration, config: RunConfig) -> LiveTimes:
    """Return the base times of the run that trained in this layout."""
    # Samples from a device that never waited contain no information on the host's launch time.
    open_frac = 0.0 if config.device == "cpu" else 1.0 - calibration.waiting_frac
    centers, sigmas = _launches(calibration, config) if open_frac else ({}, {})
    return LiveTimes(
        estimator=calibration,
        conditions=Conditions(
            launched_frac=open_frac,
            is_attention_fused=config.is_attention_fused,
            bytes_per_s=calibration.ceilings.bytes_per_s,
            scores_frac=mean_scores_frac(config),
            is_in_situ=True,
            fp8=config.fp8,
            has_norms_inside=config.has_norms_inside and _has_live_products(calibration),
            weight_fracs=calibration.weight_fracs,
            log_centers={**IN_SITU, **centers},
            log_sigmas=sigmas,
            network=calibration.transfers.fitted_prior,
        ),
    )


def _launches(calibration: Calibration, config: RunConfig) -> tuple[_Constants, _Constants]:
    """Return log centres and deviations of the host's launch constants, if its time for operators
    was measured; else the bound that a busy device gives."""
    forward = _launch(calibration, config, Phase.FORWARD)
    if forward is None:
        return _floor(calibration, config), {}
    # The floor refers to an x86 host; layouts on another host have a factor on it.
    center = math.log(forward.layer_s / launched_frac(config, BlockKind.LAYER))
    centers, sigmas = {FLOOR: center}, {FLOOR: forward.sigma_log}
    backward = _launch(calibration, config, Phase.BACKWARD)
    if backward is not None:
        centers[FLOOR_RATIO] = math.log(backward.layer_s / forward.layer_s)
        sigmas[FLOOR_RATIO] = backward.sigma_log
    return centers, sigmas


def _launch(calibration: Calibration, config: RunConfig, phase: Phase) -> _Launch | None:
    """Return one pass of a layer without experts; None if no operator of it was timed, or if a
    graph, whose launches have no marks, replays part of it."""
    if config.uses_cuda_graphs or config.model.experts is not None:
        return None
    layer = block(config, BlockKind.LAYER)
    measured_counts = [
        (calibration.measured[operator], count)
        for operator, count in (layer.forward if phase is Phase.FORWARD else layer.backward)
        if operator in calibration.measured
    ]
    known_s = sum(one.host_s * count for one, count in measured_counts)
    if not known_s:
        return None
    spread_log = (
        sum(one.host_s * count * one.host_sigma_log for one, count in measured_counts) / known_s
    )
    known_frac = sum(count for one, count in measured_counts if one.host_s) / sum(
        count for _, count in measured_counts
    )
    return _Launch(
        layer_s=known_s / known_frac,
        sigma_log=math.hypot(spread_log, HOST_SCATTER_LOG, 1.0 - known_frac),
    )


def _floor(calibration: Calibration, config: RunConfig) -> _Constants:
    """Return a lower launch floor, log of seconds, if a layer that did not wait implies one: half
    of the layer's forward pass, since the host may have taken any part of that."""
    usual_s = floor_s(is_attention_fused=config.is_attention_fused)
    counts = [(o, n) for o, n in stage_operators(config, 0).forward if o in calibration.measured]
    if not counts:
        return {}
    estimates = calibration.operators([operator for operator, _ in counts])
    layers = sum(len(config.layers_of(chunk)) for chunk in config.chunks_of(0))
    layer_s = float(estimates.time_s @ [count for _, count in counts]) / max(1, layers)
    return {FLOOR: math.log(layer_s / 2)} if 0.0 < layer_s / 2 < usual_s else {}


def _has_live_products(calibration: Calibration) -> bool:
    """Return True if training itself timed products: probes run them without the norms inside."""
    return any(
        operator.kind.is_linear
        and operator.kind is not OperatorKind.LOGITS
        and not measured.is_probe
        for operator, measured in calibration.measured.items()
    )
