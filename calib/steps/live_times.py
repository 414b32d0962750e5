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
from .base_times import Conditions
from .scales import FLOOR, floor_s

IN_SITU: Mapping[str, float] = dict.fromkeys(
    ("misaligned", "tp", "dp", "pp", "network", "host_microbatch", "host_step"), 0.0
)
"""Centres of what samples of training hold already: transfers as they ran during other work."""


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
    launched_frac = 0.0 if config.device == "cpu" else 1.0 - calibration.waiting_frac
    return LiveTimes(
        estimator=calibration,
        conditions=Conditions(
            launched_frac=launched_frac,
            is_attention_fused=config.is_attention_fused,
            bytes_per_s=calibration.ceilings.bytes_per_s,
            is_in_situ=True,
            fp8=config.fp8,
            has_norms_inside=config.has_norms_inside and _has_live_products(calibration),
            weight_fracs=calibration.weight_fracs,
            log_centers={**IN_SITU, **(_floor(calibration, config) if launched_frac else {})},
            network=calibration.transfers.carrying,
        ),
    )


def _floor(calibration: Calibration, config: RunConfig) -> Mapping[str, float]:
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
