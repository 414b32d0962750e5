"""H6: the time of a norm that runs inside a product is counted once, whoever timed what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planted_steps import GPU, HERE

from forerun.calib.steps.base_times import prior_times
from forerun.calib.steps.live import LiveTimes, live_times
from forerun.calib.steps.model import fit_steps
from forerun.calib.workload.config import Normalization, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

QKV, FC1, NORM = OperatorKind.LINEAR_QKV, OperatorKind.LINEAR_FC1, OperatorKind.NORM
PRODUCT_S, NORM_S = 2e-3, 1e-3
Layout = Callable[..., RunConfig]


def step_s(estimator: Any, config: RunConfig, *, has_norms_inside: bool) -> float:
    conditions = replace(HERE, has_norms_inside=has_norms_inside)
    steps = fit_steps(LiveTimes(estimator=estimator, conditions=conditions))
    return float(steps.median_times([config])[0])


def test_h6_products_that_were_timed_with_norms_hold_them(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """The same step by Transformer Engine and by Megatron's own layers: hooks see products that
    take as much longer as there are norms of their own fewer."""
    alone = planted(kinds={QKV: PRODUCT_S, FC1: PRODUCT_S, NORM: NORM_S}, sigma_log=0.0)
    whole = PRODUCT_S + NORM_S
    joined = planted(kinds={QKV: whole, FC1: whole, NORM: NORM_S}, sigma_log=0.0)
    apart = layout(dp=1, device=GPU)
    fused = replace(apart, fuses_norms=True)
    expected_s = step_s(alone, apart, has_norms_inside=False)
    assert step_s(joined, fused, has_norms_inside=True) == pytest.approx(expected_s, rel=1e-4)
    # Estimators that timed products alone add the norms to them.
    assert step_s(alone, fused, has_norms_inside=False) == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize("normalization", Normalization)
def test_h6_priors_cost_the_same_step_either_way(
    layout: Layout, normalization: Normalization
) -> None:
    """Public tables and data sheets have products without norms."""
    apart = layout(dp=1, device=GPU, model={"normalization": normalization})
    steps = fit_steps(prior_times(GPU, is_attention_fused=True))
    before_s, after_s = steps.median_times([apart, replace(apart, fuses_norms=True)])
    assert after_s == pytest.approx(before_s, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "is_probe", "is_inside"),
    [(QKV, False, True), (QKV, True, False), (OperatorKind.LOGITS, False, False)],
)
def test_h6_only_training_times_products_with_their_norms(
    layout: Layout, kind: OperatorKind, is_probe: bool, is_inside: bool
) -> None:
    """Probes and sweeps run a product alone, and no norm runs inside that of the logits."""
    product = Operator(kind=kind, phase=Phase.FORWARD, shape=(64, 64, 192), element_nbytes=2)
    calibration: Any = SimpleNamespace(
        measured={product: SimpleNamespace(is_probe=is_probe)},
        ceilings=SimpleNamespace(bytes_per_s=1e12),
        transfers=SimpleNamespace(fitted_prior=None),
        weight_fracs={},
        waiting_frac=1.0,
    )
    fused = layout(dp=1, device=GPU, fuses_norms=True)
    assert live_times(calibration, fused).conditions.has_norms_inside is is_inside
    apart = replace(fused, fuses_norms=False)
    assert not live_times(calibration, apart).conditions.has_norms_inside
