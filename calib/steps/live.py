"""Base times of a run that was sampled while it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..fit.calibration import Calibration
from ..fit.estimates import Estimates, Estimator
from ..layers.stage_work import stage_operators
from ..timeline.items import Item
from ..workload.collectives import CollectiveCall
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from ._scales import FLOOR, FLOOR_RATIO, backward_launches, floor_s
from .base_times import Conditions, mean_scores_frac
from .known_steps import KnownStep
from .launches import launch_times, layer_launches

IN_SITU: Mapping[str, float] = dict.fromkeys(
    ("misaligned", "tp", "dp", "pp", "network", "host_microbatch", "host_step"), 0.0
)
"""Centres of constants whose effect samples of training already include: transfers as they ran
during other work."""


_Constants = Mapping[str, float]
_UNSEEN_HOST_LOG = 0.8
"""Deviation of the launches of a layer on a host that a run did not show: 0.3 ms on one public
cluster, 2 on others, 3.3 on the virtual machine of an H200 (``benchmarks/RESULTS.md``)."""


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


def live_times(
    calibration: Calibration, config: RunConfig, known: Sequence[KnownStep] = ()
) -> LiveTimes:
    """Return the base times of the run that trained in this layout.

    ``known`` are steps of its machine's other runs, whose launch times count where this run's
    device was too busy to show its host's.
    """
    # Samples from a device that never waited contain no information on the host's launch time.
    open_frac = 0.0 if config.device == "cpu" else 1.0 - calibration.waiting_frac
    centers, sigmas = _launches(calibration, config, known) if open_frac else ({}, {})
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
            log_centers={**IN_SITU, **centers},
            log_sigmas=sigmas,
            network=calibration.transfers.fitted_prior,
        ),
    )


def _launches(
    calibration: Calibration, config: RunConfig, known: Sequence[KnownStep]
) -> tuple[_Constants, _Constants]:
    """Return log centres and deviations of the host's launch constants, if its time for operators
    was measured here or in another run; else the bound that a busy device gives."""
    run_times = launch_times(calibration.measured)
    alike = [one for one in known if one.config.framework == config.framework] or known
    passes = layer_launches(config, run_times, [one.launches for one in alike])
    forward, backward = (passes.get(phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    ratio, ratio_sigma_log = backward_launches(is_python=config.has_norms_inside)
    centers, sigmas = {FLOOR_RATIO: math.log(ratio)}, {FLOOR_RATIO: ratio_sigma_log}
    if forward is None:
        return {**centers, **_floor(calibration, config)}, {**sigmas, FLOOR: _UNSEEN_HOST_LOG}
    if backward is not None:
        centers[FLOOR_RATIO] = math.log(backward.median / forward.median)
        sigmas[FLOOR_RATIO] = backward.sigma_log
    return {**centers, FLOOR: math.log(forward.median)}, {**sigmas, FLOOR: forward.sigma_log}


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
