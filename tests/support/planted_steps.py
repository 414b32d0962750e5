"""The step model on a planted estimator, without any measured step unless given, and layouts on
which properties of a step are tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from forerun.calib.steps.base_times import Conditions
from forerun.calib.steps.estimate import StepEstimate
from forerun.calib.steps.known_steps import KnownStep
from forerun.calib.steps.live import IN_SITU, LiveTimes
from forerun.calib.steps.model import FittedSteps, fit_steps
from forerun.calib.timeline.items import Floats
from forerun.calib.workload.config import Recompute, RunConfig

HERE = Conditions(
    is_attention_fused=True,
    bytes_per_s=1e11,
    is_in_situ=True,
    launched_frac=0.0,
    log_centers=IN_SITU,
)
GPU = "NVIDIA H100 80GB HBM3"
OVERLAP = {
    "is_optimizer_distributed": True,
    "overlaps_grad_reduce": True,
    "overlaps_param_gather": True,
}
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(Recompute),
        "device": st.sampled_from(["cpu", GPU]),
        "par": st.sampled_from([{}, OVERLAP, {"is_optimizer_distributed": True}]),
    }
)
"""Arguments of the fixture ``layout``."""


def steps_of(
    estimator: Any,
    config: RunConfig | None = None,
    measured_s: float | None = None,
    sigma_log: float = 1e-6,
) -> FittedSteps:
    """Return the step model, fitted to one layout's measured step if that is given."""
    is_measured = config is not None and measured_s is not None
    known = (
        [KnownStep(config=config, time_s=measured_s, sigma_log=sigma_log)] if is_measured else []
    )
    return fit_steps(LiveTimes(estimator=estimator, conditions=HERE), known)


def estimate_step(config: RunConfig, estimator: Any) -> StepEstimate:
    """Return the estimate of one layout."""
    return steps_of(estimator).estimate(config)


def estimate_many(configs: Sequence[RunConfig], estimator: Any) -> list[StepEstimate]:
    """Return the estimates of several layouts."""
    return steps_of(estimator).estimates(configs)


def median_times(configs: Sequence[RunConfig], estimator: Any) -> Floats:
    """Return median times for a ranking."""
    return steps_of(estimator).median_times(configs)
