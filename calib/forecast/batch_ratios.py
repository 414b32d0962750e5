"""Ratios of step times at other global batch sizes to those at the running one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import check_ascending
from ..regressors.estimate import Estimate
from ..steps.estimate import StepEstimate
from ..steps.model import FittedSteps
from ..workload.config import RunConfig

RATIO_SIGMA_LOG = 0.01
"""Error of the schedule in a ratio of two steps of one layout, per factor of 2 in size."""
# A standard error needs some steps; with fewer the modelled ratio is better.
_FEW_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRatio(Estimate):
    """Step time at one global batch size over that at another."""

    provenance: str = "modelled"

    def over(self, base: BatchRatio) -> BatchRatio:
        """Return the ratio of two sizes from ratios to a third with fully correlated errors."""
        return BatchRatio(
            median=self.median / base.median,
            unshared_sigma_log=abs(self.sigma_log - base.sigma_log) or base.sigma_log,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The next single step with its 90 % interval, seconds."""

    time_s: float
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        check_ascending("seconds of a step", 0.0, self.low_s, self.time_s, self.high_s)

    def error_frac(self, measured_s: float) -> float:
        """Return modelled over measured step, minus one."""
        return self.time_s / measured_s - 1.0

    def scaled(self, by: BatchRatio) -> PredictedStep:
        """Return the step at another batch size, its interval widened by the error of the ratio.

        >>> PredictedStep(time_s=2.0, low_s=1.0, high_s=3.0).scaled(BatchRatio(median=2.0))
        PredictedStep(time_s=4.0, low_s=2.0, high_s=6.0)
        """
        return PredictedStep(
            time_s=self.time_s * by.median,
            low_s=self.low_s * by.low,
            high_s=self.high_s * by.high,
        )


def model_ratios(
    config: RunConfig, steps: FittedSteps, running_estimate: StepEstimate, sizes: Sequence[int]
) -> tuple[dict[int, StepEstimate], dict[int, BatchRatio]]:
    """Return modelled steps by global batch size, and their ratios to ``running_estimate``.

    ``running_estimate`` is from the model.  Errors that both steps share cancel.
    """
    base = config.batch.global_batch_size
    of_all = config.batch.micro_batch_size * config.parallelism.dp
    others = [size for size in sizes if size != base and size % of_all == 0]
    batches = [replace(config.batch, global_batch_size=size) for size in others]
    other_estimates = steps.estimates([replace(config, batch=batch) for batch in batches])
    estimates = dict(zip(others, other_estimates, strict=True)) | {base: running_estimate}
    for size in sizes:
        estimates.setdefault(size, running_estimate)
    ratios = {base: BatchRatio(median=1.0)}
    for size, other in zip(others, other_estimates, strict=True):
        ratio = other.over(running_estimate)
        ratios[size] = BatchRatio(
            median=ratio.median,
            error_log=ratio.error_log,
            unshared_sigma_log=RATIO_SIGMA_LOG * abs(math.log2(size / base)),
        )
    return estimates, ratios


def measured_ratios(
    seen: Mapping[int, Sequence[float]], reference: int, modelled: Mapping[int, BatchRatio]
) -> dict[int, BatchRatio]:
    """Return ratios to ``reference``: measured, else from a line through two sizes, else modelled.

    A step has a constant part and one proportional to the number of micro-batches, so that sizes
    between two measured ones lie on a line, and those beyond nearly so.
    """
    same = BatchRatio(median=1.0)
    base = modelled.get(reference, same)
    out = {
        size: known.over(base) if size != reference else same for size, known in modelled.items()
    }
    means = {
        size: (float(np.mean(times)), float(np.std(times, ddof=1)) / math.sqrt(len(times)))
        for size, times in seen.items()
        if len(times) >= _FEW_STEPS
    }
    if reference not in means or len(means) < 2:
        return out
    for size in out:
        if size not in means and size != reference:
            out[size] = _combined(out[size], _on_the_line(size, means, reference))
    reference_s, reference_error_s = means[reference]
    for size, (mean_s, error_s) in means.items():
        if size != reference:
            sigma = math.hypot(error_s / mean_s, reference_error_s / reference_s)
            out[size] = BatchRatio(
                median=mean_s / reference_s, unshared_sigma_log=sigma, provenance="measured"
            )
    return out


def _on_the_line(
    size: int, means: Mapping[int, tuple[float, float]], reference: int
) -> BatchRatio | None:
    """Return the ratio from the line through the reference and the measured size farthest from it.

    None if the line is not positive at ``size``.
    """
    far = max(means, key=lambda other: abs(other - reference))
    reference_s, reference_error_s = means[reference]
    far_s, far_error_s = means[far]
    weight = (size - reference) / (far - reference)
    time_s = reference_s + weight * (far_s - reference_s)
    if time_s <= 0:
        return None
    # In units of the reference step, whose error is common to all ratios.
    error_s = abs(weight) * math.hypot(far_error_s, reference_error_s)
    return BatchRatio(
        median=time_s / reference_s,
        unshared_sigma_log=math.hypot(error_s / time_s, RATIO_SIGMA_LOG),
        provenance=f"line through {min(far, reference)} and {max(far, reference)}",
    )


def _combined(modelled: BatchRatio, line: BatchRatio | None) -> BatchRatio:
    """Return the inverse-variance mean of both, with the provenance of the heavier one."""
    if line is None:
        return modelled
    weights = [1.0 / max(known.sigma_log, RATIO_SIGMA_LOG) ** 2 for known in (modelled, line)]
    logs = [math.log(known.median) for known in (modelled, line)]
    return BatchRatio(
        median=math.exp(float(np.average(logs, weights=weights))),
        unshared_sigma_log=sum(weights) ** -0.5,
        provenance=(modelled if weights[0] > weights[1] else line).provenance,
    )
